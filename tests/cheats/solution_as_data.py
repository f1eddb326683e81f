"""Reads the solution as a package's data."""

import pkgutil

from stages.contract import Stage

STAGE = Stage(number=1, name="mine", title="mine", idea="a cheat", devices=("cpu",))

text = pkgutil.get_data("stages", "s01_raw_python.py").decode()
space = {"__name__": "mine"}
exec(compile(text, "<mine>", "exec"), space)
attend = space["attend"]
