"""Tables and plots, from records alone."""
