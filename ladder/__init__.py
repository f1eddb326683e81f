"""The `ladder` commands, their options, and errors turned into exit codes."""
