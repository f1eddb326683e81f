"""Has the file of another student compute."""

import importlib.util
from pathlib import Path

from stages.common import contract
from stages.contract import Stage

STAGE = Stage(number=1, name="mine", title="mine", idea="a cheat", devices=("cpu",))

OTHER = Path(contract.__file__).parents[1] / "tests" / "variants" / "raw_python.py"
spec = importlib.util.spec_from_file_location("other", OTHER)
other = importlib.util.module_from_spec(spec)
spec.loader.exec_module(other)
attend = other.attend
