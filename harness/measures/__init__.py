"""The measurements, one module each: time, memory, accuracy."""
