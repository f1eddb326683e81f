"""For other projects: the best stage for a call; `models` has models that attend by a stage."""
