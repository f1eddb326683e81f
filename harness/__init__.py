"""The harness: problem -> plan -> comparison -> process and judge -> record -> views.

Neither the parent of the processes nor the command line above it imports torch: all work with
tensors happens in child processes.
"""
