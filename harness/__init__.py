"""The harness: problem -> plan -> runner -> engine -> contestant and judge -> record -> views.

The command line and the runner import no torch; whatever touches a tensor happens in children.
"""
