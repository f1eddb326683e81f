"""The stages of the ladder, each a file or a folder, and the one place that loads them.

This package also decides, alone and before triton is imported, whether Triton kernels run
compiled (a GPU is there) or in Triton's interpreter (there is none). It asks NVML, so that
importing a stage never initialises CUDA.
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

HERE = Path(__file__).parent


def interpret_without_gpu() -> None:
    """Have Triton interpret kernels in this process where there is no GPU; it isn't imported yet.

    Done when this package is imported, and when a stage in Triton is loaded: between the two,
    attention_ladder takes it back, since it is imported beside other people's code.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


interpret_without_gpu()


def load(
    path: str | os.PathLike[str], alone: bool = False, sha256: str | None = None
) -> ModuleType:
    """Import the stage in the file or folder `path`, one of ours or anyone's.

    Someone else's may import other files of its folder, unless `alone`: modules are looked for
    there last, so that none has the place of an installed one.

    Returns the module, which has a ``STAGE`` and an ``attend``. Raises ValueError where either is
    missing, or the digest of its files is not `sha256`, if that is given; and whatever the file
    itself raises while it is imported.
    """
    from stages.contract import Stage

    path = Path(path).resolve()
    path = path / "__init__.py" if path.is_dir() else path
    if b"triton" in path.read_bytes():
        interpret_without_gpu()
    named = path.parent if path.name == "__init__.py" else path
    if HERE.resolve() in named.parents:
        inside = named.relative_to(HERE.resolve()).with_suffix("")
        module = importlib.import_module(".".join(("stages", *inside.parts)))
    else:
        # a student's may be "mine (1).py"; it goes into the names of torch's operators, too
        name = "stage_" + re.sub(r"\W", "_", named.stem, flags=re.ASCII)
        while getattr(sys.modules.get(name), "__file__", str(path)) != str(path):
            name += "_"  # another folder's file of that name stays what it is
        if not alone and str(named.parent) not in sys.path:
            sys.path.append(str(named.parent))
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{named.name}: not a Python file, as a stage's first file is")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # Triton and pickle look a function's module up by name
        spec.loader.exec_module(module)
    if not isinstance(getattr(module, "STAGE", None), Stage):
        raise ValueError(
            f"{named.name}: no STAGE; a stage declares "
            "STAGE = Stage(number=..., name=..., title=..., idea=...)"
        )
    if not callable(getattr(module, "attend", None)):
        raise ValueError(f"{named.name}: no attend; a stage defines attend(q, k, v)")
    stage: Stage = module.STAGE
    if sha256 not in (None, digest(path, stage.files)):
        raise ValueError(f"{named.name}: changed after this command began: give the command again")
    if "triton" not in stage.needs and holds_kernels(module):
        # declared or not: without a GPU its kernels are interpreted, and the time is no speed
        vars(module)["STAGE"] = dataclasses.replace(stage, needs=(*stage.needs, "triton"))
    return module


def digest(path: Path, files: Iterable[str]) -> str:
    """The SHA-256 of the bytes of a stage's files: its first, and the `files` that it declares."""
    total = hashlib.sha256(path.read_bytes())
    for name in files:
        if (path.parent / name).is_file():
            total.update((path.parent / name).read_bytes())
    return total.hexdigest()


def holds_kernels(module: ModuleType) -> bool:
    """Whether `module` defines or imports Triton kernels, compiled or interpreted."""
    return any(type(x).__module__.startswith("triton.runtime.") for x in vars(module).values())


def by_number(number: int) -> ModuleType:
    """The built-in stage `number`, imported. Raises KeyError where there is none."""
    for path in HERE.glob(f"s{number:02d}_*"):
        return load(path)
    raise KeyError(number)
