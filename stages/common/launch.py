"""Launch a kernel again without looking for it again: the launch path of stages 6 to 9.

    kernel[grid](*tensors, *numbers, **options)                 Triton's own: at every call it looks
                                                                at each argument
    fast_launch(kernel, grid, tensors, numbers, **options)      the same, and the compiled kernel is
                                                                kept for the next call of its kind
    Launch(kernel, grid, **options)(tensors, numbers)           a kind that the caller keeps
    launch_and_keep(key, steps), launch_again(key)              several, whose arguments are kept

Triton compiles a kernel anew for arguments of another kind: another dtype, an address that is a
multiple of 16 or is none, a number that is 1, or a multiple of 16, or takes 64 bits. To find out
takes longer than the launch. Here the kind of a number is its value and type, and nothing where the
kernel doesn't specialize on it and it fits 32 bits. So launches that Triton tells apart are told
apart (tests/stages/test_launch.py).
"""

import inspect
import marshal
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

from torch import Tensor

from stages.common.graph import Graph, graph_of
from stages.common.no_triton import triton

MOST_KEPT = 4096  # launches of a kernel; then all are found anew
LARGEST = 1 << 31  # ints of 32 bits are below it
Grid = tuple[int, ...]
Call = tuple[Callable[..., None], tuple[Any, ...]]  # a function of a stream and of these
Start = Callable[[list[Any]], Call | None]


class Launch:
    """A launch of a kernel with numbers of one kind; called with the tensors and the numbers.

    grid     up to three ints
    options  the constants, the kernel's last arguments, and what the compiler is told: num_warps...

    tensors  the first arguments: tensors on the current GPU, None, and descriptors with a `kind`
    numbers  the next ones: int, float or bool; in each call as many of the same kind

    It runs on the current GPU and stream. Triton itself launches what it interprets, and what has
    hooks that are to see each launch.
    """

    def __init__(self, kernel: Any, grid: Grid, **options: Any) -> None:
        self.kernel, self.grid, self.options = kernel, grid, options
        self.compiles = isinstance(kernel, triton.JITFunction)
        self.found: dict[Hashable, Start] = {}  # of compiled kernels, by the kind of the tensors
        self.constants: list[Any] = []

    def __call__(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> Call | None:
        """Launch; return the call that did, or None where Triton did."""
        if not self.compiles or self.kernel.pre_run_hooks:
            self.kernel[self.grid](*tensors, *numbers, **self.options)
            return None
        kind, arguments = kind_of_tensors(tensors)
        start = self.found.get(kind)
        if start is not None:
            arguments += numbers
            arguments += self.constants
            return start(arguments)
        compiled = self.kernel[self.grid](*tensors, *numbers, **self.options)
        if isinstance(compiled, triton.compiler.CompiledKernel):
            names = self.kernel.arg_names[len(tensors) + len(numbers) :]
            self.constants = [self.options[name] for name in names]
            self.found[kind] = starter(compiled, (*self.grid, 1, 1)[:3])
        return None


def starter(compiled: Any, grid: Grid) -> Start:
    """Return what starts a compiled kernel, given its arguments, on its GPU's current stream.

    It calls the launcher's part in C, as the part in Python does. Triton itself starts the kernel
    where that part isn't known, and where hooks are to see each launch, a profiler's, say.
    """
    by_triton, known = compiled[grid], launcher_in_c(compiled)
    if known is None:
        return lambda arguments: by_triton(*arguments)
    launch, how, in_one, descriptors = known
    launch = partial(launch, *grid)
    driver = triton.runtime.driver
    device = driver.active.get_current_device()

    def start(arguments: list[Any]) -> Call | None:
        if profiled():
            by_triton(*arguments)
            return None
        for place, encode in descriptors:
            x = arguments[place]
            if not hasattr(x, "encoded"):  # kept there, since its `kind` tells how it is encoded
                x.encoded = encode(x)
            arguments[place : place + 1] = x.encoded
        rest = (*how, arguments) if in_one else (*how, *arguments)
        launch(driver.active.get_current_stream(device), *rest)
        return launch, rest

    return start


class LauncherInC(NamedTuple):
    """The part in C of what Triton launches a compiled kernel with, and what it takes.

    how          after the grid and the stream, and before the kernel's arguments
    in_one       whether it takes those as one list
    descriptors  which of them are descriptors, the last first, and what gives the arguments that
                 one stands for: Triton would have the driver encode it at each launch
    """

    launch: Callable[..., None]
    how: tuple[Any, ...]
    in_one: bool
    descriptors: Sequence[tuple[int, Callable[[Any], list[Any]]]]


def launcher_in_c(compiled: Any) -> LauncherInC | None:
    """Return a compiled kernel's launcher in C, or None where it isn't known.

    Known are those of Triton 3.6 and 3.7 for Nvidia's GPUs, of kernels that need no memory for
    themselves. Whatever isn't as it is there makes it unknown: no promise of Triton's holds here.
    """
    version = triton.__version__
    if not version.startswith(("3.6.", "3.7.")) or type(compiled.run).__name__ != "CudaLauncher":
        return None
    try:
        run, metadata = compiled.run, compiled.packed_metadata
        if run.global_scratch_size or run.profile_scratch_size:
            return None
        launch = run.launch
        descriptors: list[tuple[int, Any]] = []
        kinds = enumerate(compiled.src.signature.values())
        if places := [at for at, kind in kinds if str(kind).startswith("tensordesc")]:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            launch = inspect.getclosurevars(launch).nonlocals["launcher"]  # which encodes nothing
            blocks = zip(places, compiled.metadata.tensordesc_meta, strict=True)
            descriptors = [(at, partial(make_tensordesc_arg, metadata=x)) for at, x in blocks][::-1]
        how: tuple[Any, ...] = compiled.function, run.launch_cooperative_grid, run.launch_pdl
        no_hooks, no_memory = (None,) * 3, (None,) * 2
        in_one = version.startswith("3.7.")
        if in_one:
            how += metadata, *no_hooks, *no_memory, run.arg_annotations, run.kernel_signature
        else:
            how += *no_memory, metadata, *no_hooks
        return LauncherInC(launch, how, in_one, descriptors)
    except (AttributeError, ImportError, KeyError, TypeError, ValueError):
        return None


def profiled() -> bool:
    """Whether hooks of Triton are to see each launch."""
    hooks = triton.knobs.runtime
    before, after = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def kind_of_tensors(tensors: Sequence[Any]) -> tuple[Hashable, list[Any]]:
    """Return what Triton asks of tensors, and their addresses, which it takes in their place.

    Of a tensor its launcher would ask the driver where it lies. A compiled kernel is of one GPU.
    """
    kind: list[Hashable] = [triton.runtime.driver.active.get_current_device()]
    addresses: list[Any] = []
    for x in tensors:
        if x is None:
            kind.append(None)
            addresses.append(None)
        elif isinstance(x, Tensor):
            address = x.data_ptr()
            kind.append((x.dtype, address % 16 == 0))
            addresses.append(address)
        else:
            kind.append(x.kind)
            addresses.append(x)
    return tuple(kind), addresses


class Launches:
    """The launches of one kernel, whose arguments are tensors, then numbers, then constants."""

    def __init__(self, kernel: Any, tensors: int, numbers: int) -> None:
        self.kernel = kernel  # kept, so that no other kernel gets its id
        params = kernel.params[tensors : tensors + numbers]
        self.free = [param.do_not_specialize for param in params]
        self.specialized = [not free for free in self.free]
        self.has_free = any(self.free)
        self.found: dict[Hashable, Launch] = {}

    def kind(self, grid: Grid, numbers: Sequence[Any], options: dict[str, Any]) -> Hashable:
        """Return what a launch has in common with those that a `Launch` may stand for.

        It is bytes, which differ where values are equal and types aren't: 1, 1.0 and True.
        """
        if self.has_free:
            free = [*compress(numbers, self.free)]
            if {*map(type, free)} == {int} and min(free) >= -LARGEST and max(free) < LARGEST:
                numbers = [*compress(numbers, self.specialized)]
        kind: Any = grid, numbers, options
        return marshal.dumps(kind, 2)  # in later formats, bytes depend on who else has these


launches: dict[int, Launches] = {}  # by the id of a kernel: its own hash takes a lock


def fast_launch(
    kernel: Any, grid: Grid, tensors: Sequence[Any], numbers: Sequence[Any], **options: Any
) -> None:
    """Do kernel[grid](*tensors, *numbers, **options); see `Launch`."""
    known = launches.get(id(kernel))
    if known is None:
        if not isinstance(kernel, triton.JITFunction):  # it is interpreted
            kernel[grid](*tensors, *numbers, **options)
            return
        known = launches[id(kernel)] = Launches(kernel, len(tensors), len(numbers))
    kind = known.kind(grid, numbers, options)
    launch = known.found.get(kind)
    if launch is None:
        if len(known.found) == MOST_KEPT:
            known.found.clear()
        launch = known.found[kind] = Launch(kernel, grid, **options)
    launch(tensors, numbers)


Step = tuple[Launch, Sequence[Any], Sequence[Any]]  # its tensors and its numbers
GRAPH_FROM = 4  # times that calls are done again, each by itself, before they become a graph
MOST_GRAPHS = 256  # of some 100 KB each


@dataclass
class Kept:
    """Calls of kernels with all their arguments, and their CUDA graph, once done often."""

    kernels: list[Any]
    calls: list[Call]
    device: int
    times: int = 0
    graph: Graph | None = None


kept: dict[Hashable, Kept] = {}


def launch_and_keep(key: Hashable, steps: Sequence[Step]) -> None:
    """Launch in turn, and keep the calls for `launch_again`.

    key  tells apart all that the arguments depend on, addresses, too, and so GPUs, and streams;
         with None nothing is kept
    """
    done = [launch(tensors, numbers) for launch, tensors, numbers in steps]
    calls = [call for call in done if call is not None]
    if key is not None and len(calls) == len(steps):
        if len(kept) >= MOST_KEPT:
            kept.clear()
        kernels = [launch.kernel for launch, *_ in steps]
        kept[key] = Kept(kernels, calls, triton.runtime.driver.active.get_current_device())


def launch_again(key: Hashable) -> bool:
    """Do the calls that are kept for `key` again; False where none are, or hooks are to see them.

    Addresses recur: a step of training often has its tensors where the step before it had them.
    After a few such steps the calls become a CUDA graph, which the host launches as one; it is made
    only while no other thread of Python's runs. Not for a stream that is being captured: no graph
    can be launched into it.
    """
    found = kept.get(key)
    if found is None or any(x.pre_run_hooks for x in found.kernels) or profiled():
        return False
    stream = triton.runtime.driver.active.get_current_stream(found.device)
    if found.graph is not None and found.graph.launch(stream):
        return True
    do_all(found.calls, stream)
    found.times += 1
    # asked again ever more rarely: other threads end, a driver that refuses may do so always
    if found.times >= GRAPH_FROM and found.times.bit_count() == 1 and graphs_may_be_made():
        found.graph = graph_of(partial(do_all, found.calls), stream)
    return True


def graphs_may_be_made() -> bool:
    """Whether there are not too many, and no thread is known that may wait for the whole device.

    While anything is captured, such a wait fails, so other threads that Python started forbid it.
    Those that it didn't start are mostly autograd's, which the main thread waits for.
    """
    main, not_started = threading.main_thread(), threading._DummyThread
    others = [x for x in threading.enumerate() if x is not main and not isinstance(x, not_started)]
    return not others and sum(x.graph is not None for x in [*kept.values()]) < MOST_GRAPHS


def do_all(calls: Sequence[Call], stream: int) -> None:
    """Start kernels in turn."""
    for launch, rest in calls:
        launch(stream, *rest)
