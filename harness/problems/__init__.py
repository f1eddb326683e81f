"""What every stage is asked: problems, their inputs, what a call is, what it costs."""
