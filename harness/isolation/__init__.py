"""Child processes: stages run in one, and never in ours."""
