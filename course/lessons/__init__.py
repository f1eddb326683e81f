"""Lessons: traces, differences between stages, exercises, a picture of the memory hierarchy."""
