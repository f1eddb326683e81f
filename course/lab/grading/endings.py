"""What guard.py says where it ends a submission's process, as the grader reads it."""

EXIT = 86  # of a process that guard.py has ended
FORBIDDEN = "not allowed: "  # how guard.py begins its reason where it is cheating
REFUSED = "a submission may not do that; take it out"  # how it ends where it is an error
