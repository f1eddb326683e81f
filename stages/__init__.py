"""The stages of the ladder, one file each, and the one place that finds and loads them.

This package also decides, alone and before triton is imported, whether Triton kernels run
compiled (a GPU is there) or in Triton's interpreter (there is none). It asks NVML, so that
importing a stage never initialises CUDA.
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

HERE = Path(__file__).parent


def files() -> list[Path]:
    """The files of the built-in stages, lowest first: every ``stages/sNN_*.py``."""
    return sorted(HERE.glob("s[0-9][0-9]_*.py"))


def load(
    path: str | os.PathLike[str], alone: bool = False, sha256: str | None = None
) -> ModuleType:
    """Import the stage in the file `path`, one of ours or anyone's.

    Someone else's may import other files of its folder, unless `alone`: modules are looked for
    there last, so that none has the place of an installed one.

    Returns the module, which has a ``STAGE`` and an ``attend``. Raises ValueError where either is
    missing, or the file's digest is not `sha256`, if that is given; and whatever the file
    itself raises while it is imported.
    """
    from stages.contract import Stage

    path = Path(path).resolve()
    if path.parent == HERE.resolve():
        module = importlib.import_module(f"stages.{path.stem}")
    else:
        name = f"stage_{path.stem}"
        while getattr(sys.modules.get(name), "__file__", str(path)) != str(path):
            name += "_"  # another folder's file of that name stays what it is
        if not alone and str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{path.name}: not a Python file; a stage is one .py file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # Triton and pickle look a function's module up by name
        spec.loader.exec_module(module)
    if sha256 not in (None, hashlib.sha256(path.read_bytes()).hexdigest()):
        raise ValueError(f"{path.name}: changed after this command began: give the command again")
    if not isinstance(getattr(module, "STAGE", None), Stage):
        raise ValueError(
            f"{path.name}: no STAGE; a stage declares "
            "STAGE = Stage(number=..., name=..., title=..., idea=...)"
        )
    if not callable(getattr(module, "attend", None)):
        raise ValueError(f"{path.name}: no attend; a stage defines attend(q, k, v)")
    stage: Stage = module.STAGE
    if "triton" not in stage.needs and holds_kernels(module):
        # declared or not: without a GPU its kernels are interpreted, and the time is no speed
        vars(module)["STAGE"] = dataclasses.replace(stage, needs=(*stage.needs, "triton"))
    return module


def holds_kernels(module: ModuleType) -> bool:
    """Whether `module` defines or imports Triton kernels, compiled or interpreted."""
    return any(type(x).__module__.startswith("triton.runtime.") for x in vars(module).values())


def by_number(number: int) -> ModuleType:
    """The built-in stage `number`, imported. Raises KeyError where there is none."""
    for path in files():
        if int(path.stem[1:3]) == number:
            return load(path)
    raise KeyError(number)
