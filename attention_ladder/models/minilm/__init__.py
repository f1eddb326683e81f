"""`ladder model`: a real model with a stage as its attention."""
