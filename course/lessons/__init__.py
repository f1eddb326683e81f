"""Lessons: traces, differences between stages, exercises, explaining pictures."""
