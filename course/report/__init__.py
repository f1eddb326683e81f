"""The generated parts of README and docs, which `ladder readme` writes."""
