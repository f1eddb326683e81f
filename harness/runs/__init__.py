"""What a run measures, the engine that measures it, and what the machine itself can do."""
