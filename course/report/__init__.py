"""What `ladder readme` writes: the generated parts of README and docs."""
