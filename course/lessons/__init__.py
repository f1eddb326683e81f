"""What explains: traces, differences, exercises, explaining pictures."""
