"""Grading: what a submission may not do, its calls, and what is written of it."""
