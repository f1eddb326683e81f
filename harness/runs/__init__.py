"""Runs: the plan, the engine that measures it, and the machine's own ceilings and traffic."""
