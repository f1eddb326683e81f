"""Models that run with a stage as their attention: a small GPT, trained; MiniLM, a real one."""
