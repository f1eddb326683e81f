"""The `ladder` commands, their options, and the exit codes of errors."""
