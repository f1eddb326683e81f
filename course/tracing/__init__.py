"""One query row through the online softmax, in NumPy: the walk, its text and its pictures."""
