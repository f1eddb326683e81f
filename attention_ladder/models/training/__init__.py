"""`ladder train`: a small GPT is trained with a stage as its attention."""
