"""Teaching material: lessons, labs, functions for notebooks, generated parts of the pages."""
