"""Watch what torch and Triton compute for a submission, whichever way they are called.

A mode of torch's sees each operation with its tensors. Code can hide from it: in operations and
tensor classes of its own, in TorchScript, by leaving the mode. Torch's record of operations sees
those, too, but by their names only: what ran and was hidden from the mode is found by comparing.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.problems.problem import Problem
from harness.records.code import part_of

FUSED = ("scaled_dot_product", "multi_head_attention", "transformer_encoder", "flex_attention")
PRODUCTS = ("mm", "mv", "dot")  # of matrices and vectors
WORKS = ("exp", "exp2", "_softmax", "convolution")  # as products, no part of showing a tensor
# less work than this is not compared
LEAST = {"events": 40, "operations": 3, "stores": 1, "numbers read": 64}
HIDES = -1e3  # a score that is given something lower is hidden
SCALED = 4  # numbers that torch may scale, for each number that the submission is given
# functions of a tensor that hand its numbers to NumPy, or to Python
TO_NUMPY = ("numpy", "__array__")
TO_PYTHON = ("tolist", "__dlpack__", "untyped_storage", "storage", "_typed_storage")
MODE = "PythonDispatchMode"  # in torch's record, within an operation: it is handed to a mode
WHOLE = torch._C.DispatchKey.CompositeImplicitAutograd
RECORD = ProfilerConfig(
    ProfilerState.CPU, False, False, False, False, False, _ExperimentalConfig()
)  # fmt: skip


class Work:
    """What torch and the kernels do for the submission in the file `path`.

    `rules`: those of Guard. `end` ends the process with a reason; `asked` says whether the
    submission's own code, maybe through torch's, called the function that runs.
    """

    def __init__(
        self, path: str, rules: Mapping[str, Any], end: Callable[[str], None],
        asked: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.path, self.rules, self.end, self.asked = path, rules, end, asked
        # of one call: numbers that the submission is given; rows of queries, in all heads; keys of
        # one head, and columns
        self.given, self.rows, self.keys, self.d = 1 << 20, 1, 1, 1
        self.inputs = [-1, -1, -1]  # the storages of q, k and v
        self.operations = self.stores = self.scaled = 0
        self.steps = 0  # what the interpreter has carried out, for any kernel
        # elements: loaded, at once at most (in torch: of k or v), and masked by tl.where
        self.read = self.widest = self.masked = 0
        # of each program, and of each run of loads and the stores that follow it in one program:
        # elements loaded, with those that a mask leaves out, and stored
        self.programs, self.runs = [0], [[0, 0]]
        # where scores lie: the address of a tensor -> its storage, and how many keys; and the
        # address of a storage -> the latest one there. Those that were freed go at a sweep
        self.kept: dict[int, tuple[StorageWeakRef, int]] = {}
        self.holders: dict[int, StorageWeakRef] = {}
        self.held = 0  # keys in `kept`
        self.step = 0  # keys by which more may be held at once, before it is noted
        self.largest = self.most_kept = 0  # keys whose scores one tensor has, and all hold at once
        self.seen = Counter[str]()  # operations that the mode has seen since the last `recorded`
        self.made_from: dict[int, set[int]] = {}  # a storage -> those that its numbers come from
        self.stored = set[int]()  # addresses to which its own kernels have stored
        self.sizes: dict[int, int] = {}  # a storage -> its bytes
        self.own = False  # whether the kernel that runs is the submission's
        self.operator, self.function = Operations(self), Functions(self)
        if rules["kernels"]:
            watch_kernels(self)
        _enable_profiler_legacy(RECORD)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the submission's own code runs."""
        self.operations = self.stores = self.scaled = 0
        self.read = self.widest = self.masked = self.largest = self.most_kept = self.held = 0
        self.programs, self.runs = [0], [[0, 0]]
        for noted in (self.made_from, self.sizes, self.stored, self.kept, self.holders):
            noted.clear()
        with self.operator, self.function:
            yield
        self.recorded()

    def expect(self, problem: Problem, tensors: Sequence[Any]) -> None:
        """Note what the next call is given: `tensors`, of which q, k and v are the first."""
        there = [x for x in tensors if x is not None]
        self.given = sum(x.numel() for x in there)
        q, k, _ = there[:3]
        self.rows, self.d = q.numel() // q.shape[-1], q.shape[-1]
        self.keys = problem.nk if problem.page_size else k.shape[2]
        self.step = self.keys // 64
        self.inputs = [self.place(x) for x in there[:3]]

    def record(self) -> list[Any]:
        """Return torch's record since the last time, of each thread, and begin a new one."""
        try:
            return _disable_profiler_legacy()
        except RuntimeError:
            self.end("it stops torch's record of its operations")
            return []
        finally:
            _enable_profiler_legacy(RECORD)

    def recorded(self) -> None:
        """End it where torch has computed, since the last time, what was hidden from the mode."""
        events = self.record()
        ran = Counter(
            event.name()
            for thread in events
            for event, within in pairwise([*thread, *thread[-1:]])
            if within.name() != MODE  # what is handed to the mode runs when the mode calls on
        )
        seen, self.seen = self.seen, Counter()
        for full, count in ran.items():
            home, _, name = full.rpartition("::")
            if home in ("aten", "onnx") and any(x in name.lower() for x in (*FUSED, "attention")):
                self.end(f"torch's {name} is attention itself")
            works = name in WORKS or name.endswith(PRODUCTS)
            if home == "aten" and works and count > seen[name] and not self.allowed(name):
                self.end(f"torch's {name} does work that is the submission's own, out of sight")

    def allowed(self, name: str) -> bool:
        """Whether the rules allow an operation of torch, also in place."""
        return bool({"*", name.strip("_")} & {*self.rules["torch"]})

    def operation(self, name: str, given: Sequence[Any], made: Sequence[Any]) -> None:
        """Note an operation of torch, and end the process where it is not allowed."""
        self.operations += 1
        self.seen[name] += 1
        self.called(name)
        tensors, new = ([x for x in xs if isinstance(x, torch.Tensor)] for xs in (given, made))
        numbers = [x for x in tensors if self.holds_numbers(x)]
        computes = name.endswith(PRODUCTS) or any(map(inexact, new))  # no index arithmetic
        watched = tensors if computes else numbers
        least = self.rules["least"]
        adds_up = name.strip("_") == "index_put" and any(x is True for x in given)
        allowed = self.allowed("sum" if adds_up else name)
        if not allowed and any(x.numel() >= least for x in watched):
            self.end(f"torch's {name} does work that is the submission's own")
        if not self.rules["kernels"]:
            self.torch_computes(name, numbers, new)
        scales = name.strip("_") in self.rules["scale"] and "*" not in self.rules["torch"]
        if scales and computes:
            # a product of complex numbers is four
            each = [x.numel() * (4 if x.is_complex() else 1) for x in new]
            self.scaled += sum(count for count, x in zip(each, new) if x.numel() >= least)
            if self.scaled > SCALED * self.given:
                self.end(
                    f"torch's {name} does work that is the submission's own: more than to scale"
                )
        if name == "_local_scalar_dense" and self.rules["kernels"] and any(map(part, numbers)):
            self.end("it takes the numbers out of a tensor, one by one")
        fresh = {self.place(x) for x in new} - {self.place(x) for x in tensors}
        sources = {self.place(x) for x in numbers}
        # and theirs: where one of these is freed, the next storage may have its address
        sources |= {y for at in sources for y in self.made_from.get(at, ())}
        for at in fresh:  # a storage that was freed may have been here
            self.made_from.pop(at, None)
        if name.startswith("new_") or name.endswith("_like"):  # only a shape is taken
            return
        for x in [*new, *(numbers[:1] if name.endswith("_") else ())]:  # in place
            self.made_from.setdefault(self.place(x), set()).update(sources)

    def torch_computes(
        self, name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        """Note what an operation reads and makes, where torch computes in place of kernels."""
        carries = name.strip("_") in self.rules["carry"]
        # an operation that joins keys, or values, with queries or weights reads those keys
        q, *keys = self.inputs
        sources = [{self.place(x), *self.made_from.get(self.place(x), ())} for x in given]
        self.keep(given, made, carries, set().union(*sources))
        if not carries and any(q in each for each in sources):
            read = [
                x.numel()
                for x, each in zip(given, sources, strict=True)
                if q not in each and not each.isdisjoint(keys)
            ]
            self.read += sum(read)
            self.widest = max([self.widest, *read])

    def keep(
        self, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], carries: bool,
        sources: set[int],
    ) -> None:  # fmt: skip
        """Note which tensors hold scores, until they are freed.

        They are made from q, and have a number for each row and many keys, or are made from k, too,
        and not from v. An operation that only carries numbers makes scores of scores alone.
        sources: of all `given`
        """
        q, k, v = self.inputs
        joins = k in sources and v not in sources
        holders = [self.holders.get(self.place(x)) for x in given]
        of_scores = any(each is not None and not each.expired() for each in holders)
        for x in made:
            keys = x.numel() // self.rows
            # partial outputs have some d numbers for each row
            per_row = keys * self.rows == x.numel() and keys >= 2 * self.d
            if inexact(x) and (of_scores if carries else q in sources and (per_row or joins)):
                storage = StorageWeakRef(x.untyped_storage())
                there, before = self.kept.get(x.data_ptr(), (storage, 0))
                if not there.expired():  # a view may have fewer
                    keys = max(keys, before)
                self.held += keys - before
                self.kept[x.data_ptr()] = storage, keys
                self.holders[self.place(x)] = storage
                self.largest = max(self.largest, 0 if carries else keys)
        if self.held > self.most_kept + self.step:  # to look at all takes long
            self.kept = {at: kept for at, kept in self.kept.items() if not kept[0].expired()}
            self.held = sum(keys for _, keys in self.kept.values())
            self.most_kept = max(self.most_kept, self.held)

    def holds_numbers(self, x: torch.Tensor) -> bool:
        """Whether `x` holds real or complex numbers, or integers that were made from such."""
        made = x.dtype is not torch.bool and bool(self.made_from.get(self.place(x)))
        return made or inexact(x)

    def called(self, name: str, given: Sequence[Any] = ()) -> None:
        """End it where the function or operation of torch is forbidden, whatever it is given."""
        if any(word in name for word in FUSED):
            self.end(f"torch's {name} is attention itself")
        if name in TO_NUMPY and not self.rules["imports"] and self.asked():
            self.end("it hands a tensor to NumPy")
        numbers = (x for x in given if isinstance(x, torch.Tensor) and self.holds_numbers(x))
        taken = (
            name in (*TO_NUMPY, *TO_PYTHON) and self.rules["kernels"] and any(True for _ in numbers)
        )
        if taken and self.asked():
            self.end(f"it takes the numbers out of a tensor ({name})")

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
            known = {self.place(x), *self.made_from.get(self.place(x), ())}
            if not any(at <= x < at + self.sizes[at] for at in known for x in self.stored):
                return f"no Triton kernel of the submission has computed {name}"
        return ""

    def measured(self, problem: Problem) -> dict[str, float]:
        """Return what the kernels, or torch, did for `problem`, in the units of checks.toml."""
        heads, keys = problem.b * problem.h, self.keys * self.d
        return {
            "reads": self.read / (heads * (problem.nq * self.d + 2 * keys)),
            "tile": self.widest / (problem.b * problem.hk * keys),
            "scores": self.largest / self.keys,
            "kept": self.most_kept / self.keys,
            "masked": self.masked / (self.rows * self.keys),
            "writes": len(self.stored) / (self.rows * self.d),
            "alone": max(self.programs) / max(1, sum(self.programs)),
            "visits": (
                sum(stored * loaded for loaded, stored in self.runs)
                / max(1, sum(n * (2 * keys + n) for loaded, n in self.runs if loaded))
            ),
        }

    @contextmanager
    def counted(self, works: list[dict[str, int]] | None) -> Iterator[None]:
        """Append to `works` how much is done in the block: LEAST has the names.

        Events are the interpreter's steps where kernels do the work, else calls in Python: to count
        those would take more time than the kernels.
        """
        events, steps = 0, self.steps

        def count(*_: Any) -> None:
            nonlocal events
            events += 1

        calls = works is not None and not self.rules["kernels"]
        if calls:
            sys.setprofile(count)
        try:
            yield
        finally:
            if calls:
                sys.setprofile(None)
            if works is not None:
                events += self.steps - steps
                works.append({
                    "events": events, "operations": self.operations, "stores": self.stores,
                    "numbers read": self.read,
                })  # fmt: skip

    def compare(self, works: Sequence[Mapping[str, int]]) -> None:
        """End it where the same call took far less work the second time."""
        if len(works) == 2:
            first, again = works
            for what, least in LEAST.items():
                if first[what] >= least and 2 * again[what] < first[what]:
                    self.end(f"it remembers its answers: {first[what]} {what}, then {again[what]}")


class Operations(TorchDispatchMode):
    """Tells of every operation that torch carries out."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work


def carried_out(
    self: Operations, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Carry out an operation, and tell of it."""
    if func.has_kernel_for_dispatch_key(WHOLE):  # in inference mode torch does not break it up
        self.work.called(func.__name__)
        with self:
            return func.decompose(*args, **(kwargs or {}))
    made = func(*args, **(kwargs or {}))
    home, _, name = str(func).rpartition(".")[0].partition(".")
    name = name if home == "aten" else f"{home}.{name}"  # one of its own has a home of its own
    self.work.operation(name, tree_leaves((args, kwargs)), tree_leaves(made))
    return made


class Functions(TorchFunctionMode):
    """Tells of every function of torch, also one that torch itself breaks up."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Tell of a function, and call it."""
        self.work.called(getattr(func, "__name__", ""), args)
        return func(*args, **(kwargs or {}))


# not in the class: torch would import its compiler, which takes seconds
Operations.__torch_dispatch__ = carried_out  # type: ignore[assignment]


def inexact(x: torch.Tensor) -> bool:
    """Whether `x` is of a floating-point or complex dtype."""
    return x.is_floating_point() or x.is_complex()


def part(x: torch.Tensor) -> bool:
    """Whether `x` is a part of what is stored together."""
    return x.untyped_storage().nbytes() > x.nbytes


def watch_kernels(work: Work) -> None:
    """Have Triton's interpreter tell which addresses the submission's own kernels store to."""
    from triton.runtime import interpreter

    real, execute = interpreter._interpreter, interpreter.GridExecutor.__call__
    select = interpreter.InterpreterBuilder.create_select
    set_program = interpreter.InterpreterBuilder.set_grid_idx

    class Stores:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def load(self, ptrs: Any, mask: Any, *more: Any) -> Any:
            if work.own:
                read = int(np.sum(mask))  # a tile may have more columns than d
                work.read += read
                work.widest = max(work.widest, read)
                if work.runs[-1][1]:
                    work.runs.append([0, 0])
                work.runs[-1][0] += ptrs.size
                work.programs[-1] += ptrs.size
            return real.load(ptrs, mask, *more)

        def store(self, ptrs: Any, value: Any, mask: Any) -> Any:
            note(ptrs, mask)
            return real.store(ptrs, value, mask)

        def atomic_rmw(self, op: Any, ptrs: Any, value: Any, mask: Any, sem: Any) -> Any:
            note(ptrs, mask)
            return real.atomic_rmw(op, ptrs, value, mask, sem)

    def note(ptrs: Any, mask: Any) -> None:
        if work.own:
            work.stores += 1
            places = ptrs[mask].tolist()
            work.stored.update(places)
            work.runs[-1][1] += len(places)

    def where(builder: Any, condition: Any, x: Any, y: Any) -> Any:
        tile = min(condition.data.shape[:2], default=0) > 1 < condition.data.ndim
        # columns past d may be cleared as well, by zeros: that hides no score
        if work.own and tile and min(x.data.min(), y.data.min()) < HIDES:
            work.masked += condition.data.size
        return select(builder, condition, x, y)

    def begin(builder: Any, *program: int) -> None:
        work.runs.append([0, 0])
        work.programs.append(0)
        set_program(builder, *program)

    def call(executor: Any, *args: Any, **options: Any) -> Any:
        file = executor.fn.__code__.co_filename
        work.own = file == work.path
        ours = part_of(Path(file))  # it can only have loaded what the rules name
        if ours in work.rules["stages"] and not work.rules["launches"] and not work.own:
            work.end(f"it launches a kernel of {ours}")
        return execute(executor, *args, **options)

    def counting(step: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            work.steps += 1
            return step(*args, **options)

        return counted

    interpreter._interpreter, interpreter.GridExecutor.__call__ = Stores(), call
    builder = interpreter.InterpreterBuilder
    builder.create_select, builder.set_grid_idx = where, begin
    for name, step in list(vars(builder).items()):
        if name.startswith("create_"):
            setattr(builder, name, counting(step))
