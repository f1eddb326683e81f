"""One measurement each: time, memory, accuracy."""
