"""Which stage is the best for a call, on this machine: the rule, and a call by it.

The rule is ORDER: the first stage that takes the call, by what the stages declare (STAGE in their
files) and by what this machine has. The order is that of the measured times on the pages
docs/hopper.md and docs/results.md.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from harness.records.code import built_in_files, number_of

Function = TypeVar("Function", bound=Callable[..., Any])

SET_BY_STAGES = ("PYTORCH_NVML_BASED_CUDA_CHECK", "TRITON_INTERPRET")


@contextmanager
def environment_kept() -> Iterator[None]:
    """Put back what importing `stages` sets: whoever imports this didn't ask for it."""
    before = {name: os.environ.get(name) for name in SET_BY_STAGES}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)


with environment_kept():
    import stages
    from stages import s03_torch_three_gemm as s03
    from stages.common.contract import (
        MAX_GRID,
        Stage,
        is_whole,
        most_on_an_axis,
        why_not,
        why_not_dtype,
    )
    from stages.common.inputs import (
        autocast,
        check_inputs,
        dtype_name,
        input_precision,
        transformed,
    )


def constant(function: Function) -> Function:
    """`function`, which torch.compile calls when it traces, and takes its result for a constant.

    As torch.compiler.assume_constant_result does, which would import torch._dynamo and with it
    Triton, before anybody has asked for them.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


FEW = 16  # query rows up to which stage 8 was measured, ahead of stage 6
ROWS, LEAST = 64, 192  # of a block in stage 8's float32 kernel; beyond which it splits the keys
# the first that takes a call is chosen; and what it is chosen for
ORDER = {
    8: "few query rows: it splits the keys, too",
    9: "the fastest stage on Hopper",
    6: "the fastest forward pass in Triton",
    7: "the fastest in Triton that carries gradients",
    3: "torch's own operations, for all that the others don't take",
}
# the others, which are there to be read
NEVER = {
    0: "counts every operation, on one thread of a CPU",
    1: "loops in Python, on one thread of a CPU",
    2: "a graph of scalars, on one thread of a CPU",
    4: "wrong on purpose above 64 keys",
    5: "takes no masks, and stage 6 is faster",
    10: "for a sequence that is cut over several GPUs; alone it is one of the others",
}
ONLY = "torch's own operations, the fastest that need no GPU"
ON_A_CPU = "in Triton, which is compiled for a GPU only"


MODULES: dict[int, ModuleType] = {3: s03}  # of the stages that were asked about, by number


class Call(NamedTuple):
    """What the rule looks at.

    device      'cuda', 'cpu' or another of torch's
    dtype       such as 'float16'
    options     of 'causal', 'seqlens_k' and 'gqa', those that the call needs
    gradients   whether torch records the call for a backward pass
    few         whether it has at most FEW query rows, and more keys
    idle        whether stage 8 splits its keys for float32 rows that are too few to fill the GPU
    many        whether it has more batch entries, or heads, than a CUDA grid's axis holds
    transformed whether torch.func or forward_ad is at work
    gpu         the index of the GPU that it is on, or None
    """

    device: str
    dtype: str
    options: tuple[str, ...] = ()
    gradients: bool = False
    few: bool = False
    idle: bool = False
    many: bool = False
    transformed: bool = False
    gpu: int | None = None

    @property
    def where(self) -> str:
        """The device with its index: one host may have unlike GPUs."""
        return self.device if self.gpu is None else f"{self.device}:{self.gpu}"


@dataclass(frozen=True)
class Choice:
    """The chosen stage, why, and for each other stage's number why it was passed over."""

    number: int
    name: str
    why: str
    passed_over: Mapping[int, str]

    def __str__(self) -> str:
        others = (f"  not {number}: {why}" for number, why in self.passed_over.items())
        return "\n".join([f"stage {self.number} ({self.name}): {self.why}", *others])


def why_passed_over(number: int, call: Call) -> str | None:
    """Why stage `number` of ORDER can't take `call` on this machine, or None where it can."""
    if number != 3 and call.device != "cuda":
        return ON_A_CPU  # it isn't imported there, nor is Triton
    if number not in MODULES:
        MODULES[number] = stages.by_number(number)
    declared: Stage = MODULES[number].STAGE
    if reason := why_not(declared, call.where) or why_not_dtype(declared, call.dtype, call.where):
        return reason
    for option in call.options:
        if option not in declared.options:
            return f"takes no {option}"
    if call.gradients and not declared.gradients:
        return "carries no gradients, and they are wanted"
    if declared.splits_keys and not (call.few or call.idle):
        return f"made for few query rows: at most {FEW}, or float32 that leaves the GPU idle"
    if call.many and most_on_an_axis(declared):
        return f"takes at most {MAX_GRID} batch entries, and as many heads"
    if number == 9 and call.dtype == "float32":
        return "hands float32 on to the kernels of stages 6 to 8"
    if call.transformed and "triton" in declared.needs:
        return "torch.func and forward_ad transform torch's own operations only"
    return None


@constant
def number_for(*call: Any) -> int:
    """The number of the stage that is chosen for Call(*call): the first of ORDER that takes it.

    Stage 3 where none does: its own check says what is wrong.
    """
    taking = (number for number in ORDER if why_passed_over(number, Call(*call)) is None)
    return next(taking, 3)


@constant
def multiprocessors(index: int) -> int:
    """How many a GPU has; 0 where float32 isn't multiplied as bfloat16, in blocks of ROWS."""
    device = torch.device("cuda", index)
    tensor: Any = SimpleNamespace(device=device, dtype=torch.float32)
    if input_precision(tensor) != "bf16x6":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def decided(condition: Any) -> bool:
    """Whether it holds. torch.compile, which has symbols for sizes that vary, decides it here."""
    return True if condition else False  # noqa: SIM210  bool(condition) would stay a symbol


def leaves_idle(q: Any, k: Any) -> bool:
    """Whether the blocks of rows of float32 q are too few for its GPU, and keys enough to split."""
    if q.device.type != "cuda" or q.dtype != torch.float32 or q.shape[3] > 128:
        return False
    blocks = q.shape[0] * q.shape[1] * -(-q.shape[2] // ROWS)
    enough = q.shape[2] > LEAST and k.shape[2] > LEAST
    return decided(enough and blocks <= multiprocessors(q.device.index))


def call_of(q: Any, k: Any, v: Any, causal: bool, seqlens_k: Tensor | None) -> Call | None:
    """What the rule looks at in these arguments; None where no stage takes them."""
    tensors = (q, k, v)
    if not all(isinstance(x, Tensor) and not x.is_nested and x.ndim == 4 for x in tensors):
        return None
    needed = (
        ("causal", causal is not False), ("seqlens_k", seqlens_k is not None),
        ("gqa", k.shape[1] != q.shape[1]),
    )  # fmt: skip
    return Call(
        device=q.device.type,
        dtype=dtype_name(q.dtype),
        options=tuple(name for name, needs in needed if needs),
        gradients=torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
        few=decided(q.shape[2] <= FEW and q.shape[2] < k.shape[2]),
        idle=leaves_idle(q, k),
        many=decided(max(q.shape[0], q.shape[1]) > MAX_GRID),
        transformed=not torch.compiler.is_compiling() and transformed(*tensors),
        gpu=q.device.index,
    )


def choose(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, seqlens_k: Tensor | None = None
) -> Choice:
    """Say which stage `attend` takes for these arguments on this machine, and why no other.

    Shapes and errors as there. Nothing is computed.
    """
    q, k, v = autocast(q, k, v)
    check_inputs(s03.STAGE, q, k, v, causal=causal, seqlens_k=seqlens_k)
    call = call_of(q, k, v, causal, seqlens_k)
    assert call is not None  # checked
    chosen = number_for(*call)
    passed_over = dict(NEVER)
    for number in ORDER:
        if number != chosen:
            reason = why_passed_over(number, call)
            passed_over[number] = reason or f"takes it, too, but stage {chosen} comes first"
    why = ORDER[chosen] if call.device == "cuda" else ONLY
    name = MODULES[chosen].STAGE.name
    return Choice(chosen, name, why, dict(sorted(passed_over.items(), reverse=True)))


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, seqlens_k: Tensor | None = None
) -> Tensor:
    """Exact attention by the best stage that this machine has for these arguments (`choose`).

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) with Hk dividing H and d up to 256, any float dtype, any
    strides, one device; `causal`: query i sees keys up to i + Nk - Nq; `seqlens_k` (B,) int32: how
    many keys are valid. -> (B, H, Nq, d) in q's dtype, or under torch.autocast in autocast's, on
    q's device, which carries gradients where one is wanted; a row that sees no key is 0. Raises
    ValueError on input that breaks the contract (stages/common/contract.py). torch.compile traces
    it; the choice is made then.
    """
    q, k, v = autocast(q, k, v)
    call = call_of(q, k, v, causal, seqlens_k)
    number = 3 if call is None else number_for(*call)
    out: Tensor = MODULES[number].attend(q, k, v, causal=causal, seqlens_k=seqlens_k)
    return out


def stage(number: int) -> ModuleType:
    """The module of a stage, with its `attend` and its declaration, `STAGE`.

    Raises ValueError where there is no such stage. Without a GPU, a stage in Triton is interpreted:
    for it, and only then, TRITON_INTERPRET=1 is set for this process.
    """
    if is_whole(number):
        with suppress(KeyError):
            return stages.by_number(number)
    known = ", ".join(str(number_of(path)) for path in built_in_files())
    raise ValueError(f"stage: got {number!r}, expected one of {known}")
