"""The harness: problem -> plan -> runner -> engine -> contestant and judge -> record -> views.

Neither the runner nor the command line above it imports torch: all work with tensors happens in
child processes.
"""
