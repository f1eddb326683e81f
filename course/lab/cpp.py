"""Stage 2's submissions: two C++ files, compiled for each submission, loaded in its own process."""

import ctypes
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from course.lab.grading.endings import FORBIDDEN

FILES = ("value_graph.hpp", "attention.cpp")  # both are in csrc/; the first has the gaps
ROOT = Path(__file__).parents[2]
# a handout of the stages below has it beside the stub
STAGE_2 = next(
    (path for path in (ROOT / folder / "s02_cpp_value_graph.py" for folder in ("stages", "stubs"))
     if path.is_file()), ROOT / "stages" / "s02_cpp_value_graph.py",
)  # fmt: skip
COMPILE_LIMIT = 60.0  # seconds
COMPILE_BYTES = 2 << 30  # the most memory, and the largest file that is written
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"\n]+)"', re.M)
LARGEST = 1 << 20  # bytes of a submission's file
Array = np.ndarray[Any, Any]


class NotBuilt(Exception):
    """Raised where a submission can't be compiled; the message holds the first errors."""


def files(submission: Path) -> list[Path]:
    """Return a submission's files: its one file, or the two C++ files of a folder."""
    return [submission / name for name in FILES] if submission.is_dir() else [submission]


def read(file: Path) -> bytes:
    """Return the bytes of a submission's file. Raises OSError where it can't be one, or be read."""
    if not file.is_file():
        raise OSError(errno.ENOENT, "no such file")
    if file.stat().st_size > LARGEST:
        raise OSError(
            errno.EFBIG, f"it has more than {LARGEST >> 20} MiB, the most for a submission"
        )
    return file.read_bytes()


def compiler() -> str | None:
    """Return the C++ compiler: what CXX names, else the first that is found; None without any."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def build(submission: Path, folder: Path, home: Path) -> Path:
    """Compile a submission's C++ files; return a file in `folder` that is stage 2 with them.

    `home`: the folder that the submission was copied from. Raises NotBuilt where they don't
    compile, or there is no compiler.
    """
    command = compiler()
    if command is None:
        raise NotBuilt("there is no C++ compiler here: install one, or name it in CXX")
    sources = [submission / "attention.cpp", Path(__file__).with_name("value_graph_c.cpp")]
    library = folder / "value_graph.so"
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", f"-I{submission}", "-H"]
    code, said = compiled([*command.split(), *options, *map(str, sources), "-o", str(library)])
    printed = [line for line in said if line.startswith(".")]  # -H prints what is included
    said = [line for line in said if line not in printed]
    included = [Path(line.lstrip(". ")) for line in printed]
    for file in files(submission):  # into a folder without anything else
        named = INCLUDE.findall(file.read_text(encoding="utf-8", errors="replace"))
        included += [home / name for name in named if (home / name).is_file()]
    own = {submission.resolve(), home}
    for path in (each.resolve() for each in included):
        others = {ROOT, *(each.parent for each in own)} & {*path.parents}
        if others and not own & {*path.parents}:
            raise NotBuilt(f"{FORBIDDEN}it includes {path.name} of another folder")
    if code:
        errors = [line for line in said if "error" in line]
        raise NotBuilt(f"does not compile: {'; '.join(errors[:3]) or ' '.join(said)[-300:]}")
    text = STAGE_2.read_text(encoding="utf-8").replace('    needs=("extension",),\n', "")
    stage = folder / "stage_2.py"
    stage.write_text(
        "import sys\n\nfrom course.lab.cpp import Library\n\n"
        f'sys.modules["ladder_value_graph"] = Library({str(library)!r})\n\n{text}',
        encoding="utf-8",
    )
    return stage


def compiled(command: list[str]) -> tuple[int, list[str]]:
    """Run a compiler under limits; returns its exit code and the lines that it printed.

    Raises NotBuilt where it can't be run, or does not end in time.
    """
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", start_new_session=True,
            preexec_fn=limit if sys.platform == "linux" else None,
        ) as made:  # fmt: skip
            try:
                said = made.communicate(timeout=COMPILE_LIMIT)[1]
            finally:  # the compiler's own children, too
                if made.returncode is None and hasattr(os, "killpg"):
                    os.killpg(made.pid, signal.SIGKILL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"the compiler failed: {error}") from None
    return made.returncode, said.splitlines()


def limit() -> None:
    """Limit the memory of a compiler, and the files that it writes (Linux)."""
    import resource

    for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (COMPILE_BYTES, COMPILE_BYTES))


class Library:
    """Stands in for stage 2's extension, with a submission's compiled files."""

    def __init__(self, path: str) -> None:
        self.c = loaded(path)
        self.c.graph_attend.restype = ctypes.c_void_p
        self.c.graph_nodes.restype = ctypes.c_size_t

    def attend(self, q: Array, k: Array, v: Array, scale: float) -> tuple[Array, "Graph"]:
        """q (B, H, Nq, d), k and v (B, H, Nk, d) float64 -> o as q, and its graph."""
        held = [np.ascontiguousarray(x) for x in (q, k, v)]
        o, (B, H, Nq, d) = np.empty(q.shape), q.shape
        sizes = map(ctypes.c_size_t, (B * H, Nq, k.shape[2], d))
        given = map(pointer, held)
        graph = self.c.graph_attend(*given, ctypes.c_double(scale), pointer(o), *sizes)
        return o, Graph(self.c, graph, q.shape, k.shape)


def loaded(path: str) -> ctypes.CDLL:
    """Load a library, also from a folder that doesn't allow it (noexec): from memory (Linux)."""
    try:
        return ctypes.CDLL(path)
    except OSError:
        if not hasattr(os, "memfd_create"):
            raise
        handle = os.memfd_create("value_graph")  # stays open, as the library does
        with open(handle, "wb", closefd=False) as file:
            file.write(Path(path).read_bytes())
        return ctypes.CDLL(f"/proc/self/fd/{handle}")


class Graph:
    """The Values of one attend; they are freed with this object."""

    def __init__(self, c: Any, graph: int, q_shape: Any, k_shape: Any) -> None:
        self.c, self.graph, self.shapes = c, ctypes.c_void_p(graph), (q_shape, k_shape, k_shape)
        self.nodes = c.graph_nodes(self.graph)

    def backward(self, dO: Array) -> list[Array]:
        """dO (B, H, Nq, d) float64 -> dq, dk, dv, in the shapes of q, k, v."""
        grads = [np.empty(shape) for shape in self.shapes]
        dO = np.ascontiguousarray(dO)
        self.c.graph_backward(self.graph, pointer(dO), *map(pointer, grads))
        return grads

    def __del__(self) -> None:
        self.c.graph_free(self.graph)


def pointer(x: Array) -> Any:
    """Where the numbers of a contiguous array lie."""
    return x.ctypes.data_as(ctypes.c_void_p)
