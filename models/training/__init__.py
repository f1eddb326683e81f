"""`ladder train`: a small GPT learns with a stage as its attention."""
