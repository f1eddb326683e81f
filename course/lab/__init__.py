"""The course as a lab: stubs to write, hints, checks, and what a wrong answer comes from."""
