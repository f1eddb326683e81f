"""The course as a lab: stubs to write, hints, checks, and the cause of a wrong answer."""
