"""Watch what a submission does in its own process, and end it where that is forbidden.

It must compute from q, k and v by its own code. If it lets torch or one of our stages do the work,
looks for the answer elsewhere, puts work off, or replaces a clock or a comparison, it is ended at
once, with the reason. The guard only finds fault: the judge alone says that an answer is right.
Code that rewrites this watch in its own process evades it (docs/lecturer.md).
"""

import _thread
import builtins
import importlib
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.lab.grading.calls import EXIT
from course.lab.labs import NUMPY
from harness.isolation.roster import STAGES

OURS = ("harness", "models", "course", "ladder")  # packages
STDLIB = sysconfig.get_path("stdlib")
TORCH = Path(torch.__file__).parent  # it replaces functions of its own when it is asked to compile
FUSED = ("scaled_dot_product", "multi_head_attention", "transformer_encoder", "flex_attention")
PRODUCTS = ("mm", "mv", "dot")  # of matrices and vectors
LEAST = {"events": 40, "operations": 3, "stores": 1}  # less work than this is not compared

FRAMES = "looks into the frames of its callers"
MEMORY = "looks through memory"
PROCESSES = "starts or ends processes"
ELSEWHERE = "keeps something outside its process"
# Python's audit events (sys.addaudithook) -> what a submission does that raises one
ACTS = {
    "gc.get_objects": MEMORY, "gc.get_referrers": MEMORY, "gc.get_referents": MEMORY,
    "ctypes.dlopen": MEMORY, "ctypes.dlsym": MEMORY, "ctypes.string_at": MEMORY,
    "sys._getframe": FRAMES, "sys._current_frames": FRAMES, "sys.settrace": FRAMES,
    "sys.setprofile": FRAMES,
    "os.fork": PROCESSES, "os.forkpty": PROCESSES, "os.exec": PROCESSES, "os.system": PROCESSES,
    "os.posix_spawn": PROCESSES, "os.spawn": PROCESSES, "os.kill": PROCESSES,
    "os.killpg": PROCESSES, "subprocess.Popen": PROCESSES,
    "socket.connect": ELSEWHERE, "socket.bind": ELSEWHERE, "sqlite3.connect": ELSEWHERE,
    "open": "opens a file", "os.listdir": "lists files", "os.scandir": "lists files",
}  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# functions of these may not be replaced
KEPT = (
    "builtins", "gc", "json", "json.decoder", "json.encoder", "math", "numpy", "numpy.testing",
    "os", "random", "sys", "threading", "time", "timeit", "torch", "torch.cuda",
    "torch.nn.functional", "torch.testing", "torch.utils.benchmark",
    "torch.utils.benchmark.utils.timer",
)  # fmt: skip
KEPT_CLASSES = (torch.Tensor, torch.cuda.Event, torch.cuda.Stream, torch.Generator, Connection)


class Guard:
    """The watch over the submission in the file `path`, by the `rules` of its lab (checks.toml).

    torch    torch's operations that it may use on tensors of numbers; ['*']: all but fused ones
    least    elements of a tensor that this is about
    kernels  the outputs that its own Triton kernels must have stored
    imports  modules that it may not import
    stages   what it may load of ours, as its lab's own solution does
    """

    def __init__(self, connection: Connection, path: str, rules: Mapping[str, Any]) -> None:
        self.path, self.rules = path, rules
        self.end = ender(connection)
        self.armed = self.busy = False
        self.operations = self.stores = 0
        self.made_from: dict[int, set[int]] = {}  # a storage -> those that its numbers come from
        self.stored: list[int] = []  # an address of each store by one of its own kernels
        self.sizes: dict[int, int] = {}  # a storage -> its bytes
        self.own = False  # whether the kernel that runs is the submission's
        self.operator, self.function = Operations(self), Functions(self)
        if rules["kernels"]:
            watch_kernels(self)
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
        if event == "exec":
            self.loads(getattr(what, "co_filename", ""))
        elif self.mine(frame, inspecting if event.startswith("sys.") else standard):
            if event in ("open", "os.listdir", "os.scandir"):
                self.opens(str(what), event == "open" and bool(args[2] & WRITES))
            else:
                self.end(f"it {ACTS[event]} ({event})")
        self.busy = False

    def loads(self, name: str) -> None:
        """End it where the file whose code it runs is a solution that it may not load."""
        path = Path(name)
        solution = path == NUMPY or (path.parent == STAGES and path.name[1:3].isdigit())
        if solution and name != self.path and path.name[:3] not in self.rules["stages"]:
            self.end(f"it loads {path.name}, and is to do that work itself")

    def opens(self, name: str, writes: bool) -> None:
        """End it where it writes a file, or opens or lists one that may hold the answer."""
        if name == self.path:
            return
        if writes:
            self.end(f"it writes to a file ({Path(name).name})")
        path = Path(name).resolve()
        if name.startswith("/proc") or path.parent == STAGES or path == NUMPY:
            self.end(f"it looks for the answer in {name}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the submission's own code runs: its work, and what it may not do."""
        self.operations = self.stores = 0
        for noted in (self.made_from, self.sizes, self.stored):
            noted.clear()
        self.armed = True
        try:
            with self.operator, self.function:
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

    @contextmanager
    def counted(self, works: list[dict[str, int]] | None) -> Iterator[None]:
        """Append to `works` how much is done in the block: calls in Python, operations, stores."""
        events = 0

        def count(*_: Any) -> None:
            nonlocal events
            events += 1

        if works is not None:
            sys.setprofile(count)
        try:
            yield
        finally:
            if works is not None:
                sys.setprofile(None)
                works.append(
                    {"events": events, "operations": self.operations, "stores": self.stores}
                )

    def compare(self, works: Sequence[Mapping[str, int]]) -> None:
        """End it where the same call took far less work the second time."""
        if len(works) == 2:
            first, again = works
            for what, least in LEAST.items():
                if first[what] >= least and 2 * again[what] < first[what]:
                    self.end(f"it remembers its answers: {first[what]} {what}, then {again[what]}")

    def unchanged(self) -> None:
        """End it where it has replaced a function of KEPT, or one of the harness."""
        for (owner, name), was in self.functions.items():
            now = vars(owner).get(name)
            code = getattr(now, "__code__", None)
            if now is not was and (code is None or TORCH not in Path(code.co_filename).parents):
                of = getattr(owner, "__name__", "")
                self.end(f"it replaces {of}.{name}")

    def operation(self, name: str, given: Sequence[Any], made: Sequence[Any]) -> None:
        """Note an operation of torch, and end the process where it is not allowed."""
        self.operations += 1
        self.called(name)
        tensors, new = ([x for x in xs if isinstance(x, torch.Tensor)] for xs in (given, made))
        numbers = [x for x in tensors if self.holds_numbers(x)]
        computes = name.endswith(PRODUCTS) or any(map(inexact, new))  # no index arithmetic
        watched = tensors if computes else numbers
        allowed, least = self.rules["torch"], self.rules["least"]
        if not {"*", name.strip("_")} & {*allowed} and any(x.numel() >= least for x in watched):
            self.end(f"torch's {name} does work that is the submission's own")
        fresh = {self.place(x) for x in new} - {self.place(x) for x in tensors}
        for at in fresh:  # a storage that was freed may have been here
            self.made_from.pop(at, None)
        if name.startswith("new_") or name.endswith("_like"):  # only a shape is taken
            return
        sources = {self.place(x) for x in numbers}
        for x in [*new, *(numbers[:1] if name.endswith("_") else ())]:  # in place
            self.made_from.setdefault(self.place(x), set()).update(sources)

    def holds_numbers(self, x: torch.Tensor) -> bool:
        """Whether `x` holds real or complex numbers, or integers that were made from such."""
        made = x.dtype is not torch.bool and bool(self.made_from.get(self.place(x)))
        return made or inexact(x)

    def called(self, name: str) -> None:
        """End it where the function or operation of torch is forbidden, whatever it is given."""
        if any(word in name for word in FUSED):
            self.end(f"torch's {name} is attention itself")
        if name in ("numpy", "__array__") and "numpy" in self.rules["imports"]:
            self.end("it hands a tensor to NumPy")

    def place(self, x: torch.Tensor) -> int:
        """Return the address at which the storage of `x` begins."""
        storage = x.untyped_storage()
        self.sizes[storage.data_ptr()] = storage.nbytes()
        return storage.data_ptr()

    def suspect(self, outputs: Mapping[str, Any]) -> str:
        """Say why the outputs, if they are right, are not the submission's own; '' if they are.

        Its own kernels must have stored a part of each output that the rules name.
        """
        for name in self.rules["kernels"]:
            if type(x := outputs.get(name)) is not torch.Tensor:
                continue
            seen, fresh = set[int](), {self.place(x)}
            while fresh:
                seen |= fresh
                fresh = {y for z in fresh for y in self.made_from.get(z, ())} - seen
            if not any(at <= x < at + self.sizes[at] for at in seen for x in self.stored):
                return f"no Triton kernel of the submission has computed {name}"
        return ""


class Operations(TorchDispatchMode):
    """Tells the guard of every operation that torch carries out."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard


def carried_out(
    self: Operations, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Carry out an operation, and tell of it."""
    made = func(*args, **(kwargs or {}))
    name = str(func).removeprefix("aten.").split(".")[0]
    self.guard.operation(name, tree_leaves((args, kwargs)), tree_leaves(made))
    return made


class Functions(TorchFunctionMode):
    """Tells the guard of every function of torch, also one that torch itself breaks up."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Tell of a function, and call it."""
        self.guard.called(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


# not in the class: torch would import its compiler, which takes seconds
Operations.__torch_dispatch__ = carried_out  # type: ignore[assignment]


def inexact(x: torch.Tensor) -> bool:
    """Whether `x` is of a floating-point or complex dtype."""
    return x.is_floating_point() or x.is_complex()


def ender(connection: Connection) -> Callable[[str], None]:
    """Return what reports why and exits; made before a submission can replace what it calls."""
    send, leave = connection.send_bytes, os._exit

    def end(reason: str) -> None:
        try:
            text = "".join(x for x in reason if x.isprintable() and x not in '"\\\\')
            send(f'{{"event": "cheated", "reason": "{text}"}}'.encode())
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
            if first in guard.rules["imports"] or (first in OURS and not ours(guard.path)):
                guard.end(f"it imports {name}")
        return got

    return take


def starter(guard: Guard, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return what starts a thread, watching whether the submission does."""

    def start(*args: Any, **options: Any) -> Any:
        if guard.armed and guard.mine(sys._getframe(1), standard):
            guard.end("it puts work off to a thread")
        return real(*args, **options)

    return start


def ours(path: str) -> bool:
    """Whether a file is made by `ladder lab` itself, around two C++ files."""
    return Path(path).name == "stage_2.py"


def functions() -> dict[tuple[Any, str], Any]:
    """Return the functions and classes of KEPT, KEPT_CLASSES, the harness and the stages."""
    loaded = [
        module for name, module in list(sys.modules.items())
        if name in KEPT or name.split(".")[0] in OURS or name == "stages.contract"
    ]  # fmt: skip
    return {
        (owner, name): value
        for owner in (*loaded, *KEPT_CLASSES)
        for name, value in list(vars(owner).items())
        if callable(value) or isinstance(value, (property, staticmethod, classmethod))
    }


def standard(name: str) -> bool:
    """Whether a file is of Python's own library, or saves arrays; not what imports modules."""
    saves = ("torch/serialization.py", "/numpy/")
    frozen = name.startswith("<frozen ") and "importlib" not in name
    own = name.startswith(STDLIB) and "site-packages" not in name and "importlib" not in name
    return frozen or own or any(part in Path(name).as_posix() for part in saves)


def inspecting(name: str) -> bool:
    """Whether a file is Python's inspect.py."""
    return Path(name).name == "inspect.py"


def watch_kernels(guard: Guard) -> None:
    """Have Triton's interpreter tell which addresses the submission's own kernels store to."""
    from triton.runtime import interpreter

    real, execute = interpreter._interpreter, interpreter.GridExecutor.__call__

    class Stores:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def store(self, ptrs: Any, value: Any, mask: Any) -> Any:
            note(ptrs, mask)
            return real.store(ptrs, value, mask)

        def atomic_rmw(self, op: Any, ptrs: Any, value: Any, mask: Any, sem: Any) -> Any:
            note(ptrs, mask)
            return real.atomic_rmw(op, ptrs, value, mask, sem)

    def note(ptrs: Any, mask: Any) -> None:
        if guard.own:
            guard.stores += 1
            guard.stored.extend(int(at) for at in ptrs[mask][:1])

    def call(executor: Any, *args: Any, **options: Any) -> Any:
        guard.own = executor.fn.__code__.co_filename == guard.path
        return execute(executor, *args, **options)

    interpreter._interpreter, interpreter.GridExecutor.__call__ = Stores(), call
