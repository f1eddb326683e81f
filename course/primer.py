"""Check the primer's first kernels, and stand in for Triton where there is none.

`check` launches a reader's kernel on tensors that lie in storage full of NaN, and says in words
what is wrong with what comes out. `triton` and `tl` stand for the two modules of that name: the
part of Triton's language that the primer uses, one program after another in NumPy.
"""

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

GAP = "____"
EDGE = 4096  # elements before and behind each tensor
UNWRITTEN = -777.0  # what an output holds before the kernel runs

# a likely mistake, and whether an output looks like it
Hint = tuple[str, Callable[[torch.Tensor], bool]]


def check(
    kernel: Any,
    launch: Callable[..., object],
    inputs: Sequence[torch.Tensor],
    expected: torch.Tensor,
    bound: torch.Tensor | float,
    hints: Sequence[Hint] = (),
) -> None:
    """Print whether `kernel` is right, or what is wrong with it.

    `launch(kernel, *inputs, out)` is called with copies of the inputs and an output of the shape of
    `expected`, float32. It is right where every element is within `bound` (a number, or a tensor of
    that shape) of `expected`, and nothing outside the output was written.
    """
    if gaps := sum(line.split("#")[0].count(GAP) for line in source_of(kernel)):
        print(f"Not written yet: {gaps} gap{'s' * (gaps > 1)} left.")
        return
    out, around = guarded(torch.full_like(expected, UNWRITTEN), UNWRITTEN)
    try:
        launch(kernel, *(guarded(x, float("nan"))[0] for x in inputs), out)
        out = out.cpu()
    except Exception as error:  # whatever a reader's kernel raises is what there is to say
        print(f"It stopped: {str(error) or repr(error)}")
        return
    bound = bound.cpu() if isinstance(bound, torch.Tensor) else bound
    wrong = what_is_wrong(out, around.cpu(), expected.cpu(), bound, hints)
    print(f"Wrong: {wrong}" if wrong else "Right.")


def source_of(kernel: Any) -> list[str]:
    """Return the source lines of a kernel, Triton's own or its stand-in's."""
    return inspect.getsource(kernel.fn).splitlines()


def guarded(x: torch.Tensor, edge: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a contiguous copy of `x` between `edge`s, and its whole storage, (2 EDGE + n,)."""
    storage = torch.full((x.numel() + 2 * EDGE,), edge, dtype=x.dtype, device=x.device)
    copy = storage[EDGE : EDGE + x.numel()].view(x.shape)
    copy.copy_(x)
    return copy, storage


def what_is_wrong(
    out: torch.Tensor, around: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | float,
    hints: Sequence[Hint],
) -> str:  # fmt: skip
    """Say what is wrong with `out` in a sentence or two; empty where nothing is."""
    bad = ~((out - expected).abs() <= bound)  # NaN is bad, too
    outside = torch.cat([around[:EDGE], around[EDGE + out.numel() :]])
    if (outside != UNWRITTEN).any():
        return "it wrote outside the output. Which elements does the mask of tl.store let through?"
    if not bad.any():
        return ""
    at = tuple(int(i) for i in bad.nonzero()[0])
    place = f"out[{', '.join(map(str, at))}]"
    said = f"{int(bad.sum())} of {out.numel()} elements, the first of them {place}: "
    for words, looks_like in hints:
        if looks_like(out):
            return f"{said}{words}"
    if out[at] == UNWRITTEN:
        return f"{said}never written. Do all programs together cover the output?"
    if out[at].isnan():
        return f"{said}not a number. Was something read that lies outside a tensor? See the masks."
    return f"{said}got {out[at]:.6g}, expected {expected[at]:.6g}."


class Pointer:
    """The address of some elements of a flat array: adding offsets gives other addresses."""

    def __init__(self, array: np.ndarray, offsets: Any = 0) -> None:
        self.array, self.offsets = array, offsets

    def __add__(self, offsets: Any) -> "Pointer":
        return Pointer(self.array, self.offsets + offsets)

    def within(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the mask and the offsets in one shape. Raises IndexError beyond the array."""
        offsets, opened = np.broadcast_arrays(self.offsets, True if mask is None else mask)
        beyond = opened & ((offsets < 0) | (offsets >= self.array.size))
        if beyond.any():
            raise IndexError(
                f"program {tl.program} reaches for element {offsets[beyond].flat[0]} of a tensor "
                f"that has {self.array.size}. See the mask."
            )
        return opened, offsets


class Language:
    """triton.language, as far as the primer goes; `program` is the number of the one that runs."""

    constexpr = int
    program: tuple[int, ...] = (0, 0, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)  # exp, where, sum ... are called the same there

    def program_id(self, axis: int) -> int:
        return self.program[axis]

    def load(self, pointer: Pointer, mask: Any = None, other: float = 0.0) -> Any:
        opened, offsets = pointer.within(mask)
        return np.where(opened, pointer.array[np.where(opened, offsets, 0)], np.float32(other))

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        opened, offsets = pointer.within(mask)
        pointer.array[offsets[opened]] = np.broadcast_to(value, opened.shape)[opened]

    def dot(self, a: np.ndarray, b: np.ndarray, **_: object) -> np.ndarray:
        return a @ b


class Kernel:
    """A function that `kernel[grid](...)` calls once for each program of the grid, in order."""

    def __init__(self, fn: Callable[..., object]) -> None:
        self.fn = fn

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **constants: object) -> None:
            given = [
                Pointer(x.numpy().reshape(-1)) if isinstance(x, torch.Tensor) else x
                for x in arguments
            ]
            for program in itertools.product(*map(range, grid)):
                tl.program = program
                self.fn(*given, **constants)

        return launch


class Compiler:
    """The module triton, as far as the primer goes."""

    jit = Kernel

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        """Return how many blocks of `b` cover `a`."""
        return -(-a // b)


tl, triton = Language(), Compiler()
