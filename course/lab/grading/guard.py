"""Watch what a submission does in its own process, and end it where that is forbidden.

It must compute from q, k and v by its own code, and is ended at once, with the reason, where it
does not. It cheats if, asked for an answer, it lets torch or one of our stages do the work or looks
for the answer elsewhere, or if it replaces a clock or a comparison. What gains nothing, but isn't
allowed either (a file, a thread, a process, another library; anything before it is asked), is an
error like any other. The guard only finds fault: the judge alone says that an answer is right. Code
that rewrites this watch in its own process evades it (docs/adversary.md).
"""

import _thread
import builtins
import importlib
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from course.lab.grading.endings import EXIT, FORBIDDEN, REFUSED
from course.lab.grading.work import Work
from harness.records.code import ROOT, STAGES, part_of

OURS = ("harness", "attention_ladder", "course", "ladder")  # packages
# what any submission may import; __main__: as debuggers and test runners do, under its other name
FREE = (*sys.stdlib_module_names, "stages", "torch", "triton", "__main__", "__mp_main__")
LOW = ("ctypes", "_ctypes")
STDLIB = sysconfig.get_path("stdlib")
TORCH = Path(torch.__file__).parent  # it replaces functions of its own when it is asked to compile

FRAMES = "looks into frames, as a debugger or a profiler does"
MEMORY = "looks through memory"
LISTENS = "listens to what its process does"
FORGES = "forges code"
PROCESSES = "starts or ends processes"
FILES = "changes files"
ELSEWHERE = "connects to something outside its process"
SEARCHES = (MEMORY, LISTENS, FORGES)  # for the answer; the others gain nothing
# Python's audit events (sys.addaudithook) -> what a submission does that raises one
ACTS = {
    "gc.get_objects": MEMORY, "gc.get_referrers": MEMORY, "gc.get_referents": MEMORY,
    "ctypes.dlopen": MEMORY, "ctypes.dlsym": MEMORY, "ctypes.string_at": MEMORY,
    "sys._getframe": FRAMES, "sys._current_frames": FRAMES, "sys.settrace": FRAMES,
    "sys.setprofile": FRAMES, "sys.addaudithook": LISTENS,
    "code.__new__": FORGES, "ctypes.cdata": MEMORY,
    "os.fork": PROCESSES, "os.forkpty": PROCESSES, "os.exec": PROCESSES, "os.system": PROCESSES,
    "os.posix_spawn": PROCESSES, "os.spawn": PROCESSES, "os.kill": PROCESSES,
    "os.killpg": PROCESSES, "subprocess.Popen": PROCESSES,
    "os.remove": FILES, "os.rename": FILES, "os.rmdir": FILES, "os.truncate": FILES,
    "os.link": FILES, "os.symlink": FILES, "os.chmod": FILES,
    "socket.connect": ELSEWHERE, "socket.bind": ELSEWHERE, "sqlite3.connect": ELSEWHERE,
    "open": "opens a file", "os.listdir": "lists files", "os.scandir": "lists files",
}  # fmt: skip
LOOKS = ("open", "os.listdir", "os.scandir")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# functions of these may not be replaced
KEPT = (
    "builtins", "gc", "json", "json.decoder", "json.encoder", "math", "numpy", "numpy.testing",
    "os", "random", "sys", "threading", "time", "timeit", "torch", "torch.cuda",
    "torch.nn.functional", "torch.testing", "torch.utils.benchmark",
    "torch.utils.benchmark.utils.timer",
)  # fmt: skip
# but these of them, which nothing here calls
SPARED = (
    "print", "input", "breakpoint", "excepthook", "displayhook", "unraisablehook", "breakpointhook",
    "_",
)  # fmt: skip
KEPT_CLASSES = (torch.Tensor, torch.cuda.Event, torch.cuda.Stream, torch.Generator, Connection)


class Guard:
    """The watch over the submission in the file `path`, by the `rules` of its lab (checks.toml).

    torch    torch's operations that it may use on tensors of numbers; ['*']: all but fused ones
    least    elements of a tensor that this is about
    kernels  the outputs that its own Triton kernels must have stored
    scale    those that scale: for some times as many numbers as it is given
    imports  what it may import besides FREE; ['*']: anything
    launches whether it may launch our kernels
    stages   what it may load of ours, as its lab's own solution does
    home     the file, or folder, that it was copied from; or None
    """

    def __init__(
        self, connection: Connection, path: str, rules: Mapping[str, Any], event: str = "cheated"
    ) -> None:
        self.path, self.rules = path, rules
        self.end, self.refused = ender(connection, event), refuser(connection, event)
        self.armed = self.busy = self.loading = False
        # its file is made by `ladder lab` itself, around the C++ files of a folder
        self.made = rules["home"] is not None and Path(rules["home"]).is_dir()
        self.work = Work(path, rules, self.gains, lambda: self.mine(sys._getframe(3), by_torch))
        sys.argv = [path]  # not those of `ladder`, which its own argparse would read
        around = {x for own in self.folders() for x in (own, *own.parents)}
        self.homes = [Path(x) for x in sys.path if x and Path(x) not in around]
        self.homes += [ROOT / name for name in ("stages", *OURS)]
        for home, name in (
            (builtins, "__import__"), (importlib, "__import__"), (importlib, "import_module")
        ):  # fmt: skip
            setattr(home, name, importer(self, getattr(home, name)))
        for owner in (threading, _thread):  # no audit event tells of a thread
            for name in ("start_new_thread", "start_joinable_thread"):
                for known in (name, f"_{name}"):
                    if start := getattr(owner, known, None):
                        setattr(owner, known, starter(self, start))
        self.functions = functions()
        sys.addaudithook(self.heard)

    def folders(self) -> list[Path]:
        """Its folder, and the one that it was copied from."""
        return [Path(self.path).parent, Path(self.rules["home"] or self.path).parent]

    def refuse(self, reason: str) -> None:
        """End it with an error in its own line."""
        self.refused(self.in_its_line(reason))

    def in_its_line(self, reason: str) -> str:
        """`reason`, and which line of it runs, if one does."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.path:
            frame = frame.f_back
        return f"line {frame.f_lineno}: {reason}" if frame else reason

    def gains(self, reason: str) -> None:
        """End it where another's work would be its answer; loaded, it is asked for none yet."""
        if self.loading:
            self.refuse(reason)
        try:
            reason = reason if self.made else self.in_its_line(reason)
        finally:  # a submission may have replaced what finds its line
            self.end(reason)

    def mine(self, frame: FrameType | None, passes: Callable[[str], bool]) -> bool:
        """Whether the submission's code called `frame`, directly or through files that `passes`."""
        while frame is not None:
            name = frame.f_code.co_filename
            if self.path in (name, frame.f_globals.get("__file__")):
                return True
            if not passes(name):
                return False
            frame = frame.f_back
        return False

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        """End the process where the audit event is one of ACTS and the submission's own doing."""
        if not self.armed or self.busy or not (event in ACTS or event == "exec"):
            return
        self.busy = True
        frame, what = sys._getframe(1), args[0] if args else ""
        passes = inspecting if event.startswith("sys.") else standard
        if ACTS.get(event) == PROCESSES:
            passes = not_importing  # by whatever library
        if event == "exec":
            self.loads(getattr(what, "co_filename", ""), frame)
        elif event in LOOKS:
            name = os.fsdecode(what) if isinstance(what, (str, bytes, os.PathLike)) else str(what)
            self.loads(name, None)
            if self.mine(frame, passes):
                self.opens(name, event == "open" and bool(args[2] & WRITES))
        elif self.mine(frame, passes):
            (self.end if ACTS[event] in SEARCHES else self.refuse)(f"it {ACTS[event]} ({event})")
        self.busy = False

    def loads(self, name: str, frame: FrameType | None) -> None:
        """End it where it opens, or runs in `frame`, a solution, or code that is in another file.

        Files of installed packages and ours may be loaded, and code without a file is its own.
        """
        path, own = Path(name), Path(self.path)
        at = path.parent.parent if path.parent.name == "__pycache__" else path.parent
        ours = part_of(path)
        itself = (at, path.name.partition(".")[0]) == (own.parent, own.stem)
        if ours and not itself and ours not in self.rules["stages"]:
            self.gains(f"it loads {ours}, and is to do that work itself")
        if name == self.path or (name.startswith("<") and "importlib" not in name):
            return
        its_own = self.mine(frame, standard)  # which it has compiled
        if its_own or (self.mine(frame, lambda _: True) and not {*path.parents} & {*self.homes}):
            self.gains(f"it runs code of another file ({path.name})")

    def opens(self, name: str, writes: bool) -> None:
        """End it where it writes a file, or opens or lists one that may hold the answer."""
        if writes and name != os.devnull:
            self.refuse(f"it writes to a file ({Path(name).name})")
        path, own = Path(name).resolve(), Path(self.path)
        beside = {path, path.parent} & {*self.folders()} and path != own
        folder = path == STAGES or (path.parent == STAGES and path.is_dir())
        if beside or folder or path.parts[1:2] == ("proc",):
            self.end(f"it looks for the answer in {name if '/proc' in name else path.name}")

    @contextmanager
    def watching(self, loading: bool = False) -> Iterator[None]:
        """Watch while the submission's own code runs: its work, and what it may not do."""
        self.armed, self.loading = True, loading
        try:
            with self.work.watching():
                yield
        finally:
            self.armed = False
            self.unchanged()

    def around(self, attend: Callable[..., Any]) -> Callable[..., Any]:
        """`attend`, watched."""

        def watched(*given: Any, **options: Any) -> Any:
            with self.watching():
                return attend(*given, **options)

        return watched

    def unchanged(self) -> None:
        """End it where it has replaced a function of KEPT, or one of the harness."""
        for (owner, name), was in self.functions.items():
            if (now := vars(owner).get(name)) is was or name in SPARED:
                continue
            code = getattr(now, "__code__", None)
            if code is None or TORCH not in Path(code.co_filename).parents:
                of = getattr(owner, "__name__", "")
                self.end(f"it replaces {of}.{name}")


def ender(connection: Connection, event: str) -> Callable[[str], None]:
    """Return what reports a reason, as one for a verdict of cheating, and exits."""
    return exits(connection, f'{{"event": "{event}", "reason": "{FORBIDDEN}%s"}}')


def refuser(connection: Connection, event: str) -> Callable[[str], None]:
    """Return what reports a reason, as an error, and exits."""
    said = '"event": "bad"' if event == "bad" else '"event": "failed", "status": "crashed"'
    return exits(connection, f'{{{said}, "reason": "%s: {REFUSED}"}}')


def exits(connection: Connection, message: str) -> Callable[[str], None]:
    """Return what sends `message` with a reason, and exits; it looks up nothing that can change."""
    send, leave = connection.send_bytes, os._exit

    def end(reason: str) -> None:
        try:
            text = "".join(x for x in reason if x.isprintable() and x not in '"\\\\')
            send((message % text).encode())
        finally:
            leave(EXIT)

    return end


def importer(guard: Guard, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a way to import of Python's, watching which modules the submission's code gets."""

    def take(*args: Any, **options: Any) -> Any:
        got = real(*args, **options)
        if guard.armed and guard.mine(sys._getframe(1), standard):
            name = getattr(got, "__name__", "")  # its own, whatever name it was asked for by
            first = name.partition(".")[0]
            allowed = {first, "*"} & {*FREE, *guard.rules["imports"]}
            if not guard.made and (not allowed or first in (*OURS, *LOW)):
                guard.refuse(f"it imports {name}")
        return got

    return take


def starter(guard: Guard, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return what starts a thread, watching whether the submission does."""

    def start(*args: Any, **options: Any) -> Any:
        if guard.armed and guard.mine(sys._getframe(1), standard):
            guard.refuse("it starts a thread")
        return real(*args, **options)

    return start


def functions() -> dict[tuple[Any, str], Any]:
    """Return the functions and classes of KEPT, KEPT_CLASSES, the harness and the stages."""
    loaded = [
        module for name, module in list(sys.modules.items())
        if name in KEPT or name.split(".")[0] in OURS
        or name.startswith(("stages.contract", "stages.common"))
    ]  # fmt: skip
    return {
        (owner, name): value
        for owner in (*loaded, *KEPT_CLASSES)
        for name, value in list(vars(owner).items())
        if callable(value) or isinstance(value, (property, staticmethod, classmethod))
        if value is not vars(torch).get("Storage")  # torch.set_default_dtype replaces it
    }


def standard(name: str) -> bool:
    """Whether a file is of Python's own library, or saves arrays; not what imports modules."""
    saves = ("torch/serialization.py", "/numpy/")
    own = name.startswith(("<", STDLIB)) and "site-packages" not in name  # <: it has no file
    return (own and not_importing(name)) or any(part in name.replace(os.sep, "/") for part in saves)


def not_importing(name: str) -> bool:
    """Whether a file isn't one of those of Python's that import modules."""
    return "importlib" not in name


def by_torch(name: str) -> bool:
    """Whether a file is torch's or Python's own."""
    return standard(name) or name.startswith(f"{TORCH}{os.sep}")


def inspecting(name: str) -> bool:
    """Whether a file is Python's inspect.py."""
    return Path(name).name == "inspect.py"
