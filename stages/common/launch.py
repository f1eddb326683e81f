"""Launch a kernel again without looking for it again: the launch path of stages 6 to 9.

    kernel[grid](*tensors, *numbers, **options)                 Triton's own: at every call it looks
                                                                at each argument
    fast_launch(kernel, grid, tensors, numbers, **options)      the same, and the compiled kernel is
                                                                kept for the next call of its kind
    Launch(kernel, grid, **options)(tensors, numbers)           a kind that the caller keeps

Triton compiles a kernel anew for arguments of another kind: another dtype, an address that is a
multiple of 16 or is none, a number that is 1, or a multiple of 16, or takes 64 bits. To find out
takes longer than the launch. Here the kind of a number is its value and type, and nothing where the
kernel doesn't specialize on it and it fits 32 bits. So launches that Triton tells apart are told
apart (tests/stages/test_launch.py).
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import compress
from typing import Any

from torch import Tensor

from stages.common.no_triton import triton

MOST_KEPT = 4096  # launches of a kernel; then all are found anew
Grid = tuple[int, ...]


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
        self.found: dict[Hashable, Any] = {}  # compiled kernels, by the kind of the tensors
        self.constants: list[Any] = []

    def __call__(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> None:
        if not self.compiles or self.kernel.pre_run_hooks:
            self.kernel[self.grid](*tensors, *numbers, **self.options)
            return
        kind, addresses = kind_of_tensors(tensors)
        run = self.found.get(kind)
        if run is not None:
            run(*addresses, *numbers, *self.constants)
            return
        compiled = self.kernel[self.grid](*tensors, *numbers, **self.options)
        if isinstance(compiled, triton.compiler.CompiledKernel):
            names = self.kernel.arg_names[len(tensors) + len(numbers) :]
            self.constants = [self.options[name] for name in names]
            self.found[kind] = starter(compiled, (*self.grid, 1, 1)[:3])


def starter(compiled: Any, grid: Grid) -> Callable[..., None]:
    """Return what starts a compiled kernel, given its arguments, on the current stream.

    It calls the kernel's launcher as Triton 3.6 and 3.7 do. Triton itself starts it where hooks are
    to see each launch, a profiler's, say, and in other versions.
    """
    by_triton = compiled[grid]
    if not triton.__version__.startswith(("3.6.", "3.7.")):
        return by_triton
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    hooks, driver = triton.knobs.runtime, triton.runtime.driver

    def start(*arguments: Any) -> None:
        before, after = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(before, "calls", before) or getattr(after, "calls", after):
            by_triton(*arguments)
            return
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        run(*grid, stream, function, metadata, None, None, None, *arguments)

    return start


def kind_of_tensors(tensors: Sequence[Any]) -> tuple[Hashable, list[Any]]:
    """Return what Triton asks of tensors, and their addresses, which it takes in their place.

    Of a tensor its launcher would ask the driver where it lies. A compiled kernel is of one GPU.
    """
    kind: list[Hashable] = [triton.runtime.driver.active.get_current_device()]
    addresses = []
    for x in tensors:
        if isinstance(x, Tensor):
            address = x.data_ptr()
            kind += x.dtype, address % 16 == 0
            addresses.append(address)
        else:
            kind.append(None if x is None else x.kind)
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
        """Return what a launch has in common with those that a `Launch` may stand for."""
        kind = [*grid, *map(type, numbers), *options, *map(type, options.values())]
        kind += options.values()
        if not self.has_free:
            kind += numbers
            return tuple(kind)
        kind += compress(numbers, self.specialized)
        free = [*compress(numbers, self.free)]
        if min(free) < -(1 << 31) or max(free) >= 1 << 31:
            kind += free
        return tuple(kind)


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
