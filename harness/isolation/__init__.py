"""Child processes, in which all stages run: never in the parent."""
