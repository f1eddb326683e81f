"""The harness: problem -> plan -> runner -> engine -> contestant and judge -> record -> views.

The runner imports no torch, nor does the command line above it; whatever touches a tensor happens
in children.
"""
