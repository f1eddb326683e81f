"""Models with a stage as their attention: a small GPT that is trained, and MiniLM."""
