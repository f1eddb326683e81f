"""The harness: problem -> runner -> worker -> timing, memory, accuracy -> results -> views.

The command line and the runner import no torch; whatever touches a tensor happens in children.
"""
