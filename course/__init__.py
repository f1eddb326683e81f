"""What teaches: lessons, labs, what the notebooks call, the generated parts of the pages."""
