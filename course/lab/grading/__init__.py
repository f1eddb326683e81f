"""Grading: what a submission may not do, its calls, its points and reports."""
