"""The contract of every stage, and what a stage declares.

    attend(q, k, v) -> out
        q (B, H, Nq, d), k and v (B, H, Nk, d), any strides, one device -> out (B, H, Nq, d)
        in q's dtype, on q's device, scale = d ** -0.5; the inputs are never written to.

Stages whose STAGE.options name them also take, keyword-only, `causal` (query i sees keys up to
i + Nk - Nq) and `seqlens_k` ((B,) int32, valid keys per batch entry); 'gqa' means that k and v may
have fewer heads, any number that divides H; 'paged' that the file has `PagedCache` and
`attend_paged` too; 'world' that several processes may compute one attention: the file has `shard`
and `unshard` too, which cut out a process's part of a sequence and put all parts together again. A
row that may see no key is 0, and so is its gradient.

What isn't seen may hold anything, NaN and infinities included: k and v past a length, q and dO of a
row that sees no key. It changes no output and no gradient. Under a causal mask every key is seen by
the last row: a v that isn't finite may reach the rows before it, since 0 * NaN is NaN (so it is in
torch's and FlashAttention's kernels, too), and a k that isn't their gradients.

Under torch.autocast stages 7, 9 and 10 compute in autocast's dtype, as torch's own attention does;
stage 3 and the twins of 4 and 5 consist of torch's operations, which it turns to 16 bits where it
lists them. The others take no notice of it.

Float32 is multiplied as accurately as torch's own switch for a GPU promises: 'ieee' promises the
accuracy of float32, whatever unit computes it (stages/common/products.py).

Scores (scale q k^T) may be as large as float32 holds, not scaled and in base 2, too; in stage 3, as
q's dtype holds. So may the sum of a row's |v|, which is divided last; beyond that an output is NaN
or infinite. (In stage 9, at d up to 64 and above 128, weights are up to 2^8 before the division, so
|v| may be 2^8 times less.) Scores of -inf count for nothing; a row that sees no other is NaN. In 16
bits and TF32 stages 6, 7 and 9 scale a score and subtract the max in one operation: a row is NaN if
the absolute value of its largest score is beyond LARGEST_SCORE. The backward pass has one float32
per row to make its weights again: gradients lose digits as scores grow, and are NaN beyond
LARGEST_SCORE_TO_TRAIN.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._functorch import is_legacy_batchedtensor

from stages.common import machine

MAX_HEAD_DIM = 256
LARGEST_SCORE = 2.0**26 * math.log(2)  # 4.7e7
LARGEST_SCORE_TO_TRAIN = 2.0**24 * math.log(2)  # 1.2e7; log2 of a row's sum of exp(s) counts
MAX_ROWS = 1 << 30  # query rows that share a key head, which stage 8 counts in int32
MAX_GRID = 65_535  # where a CUDA grid's second and third axes end: heads and batch entries
DTYPES = ("float16", "bfloat16", "float32", "float64")
DEVICES = ("cpu", "cuda")
OPTIONS = ("causal", "seqlens_k", "gqa", "paged", "world")
NEEDS = ("triton", "gluon", "extension", "cuda", *machine.PACKAGES)
TRAFFICS = ("fused", "three-kernel")
LISTS = {"needs": NEEDS, "devices": DEVICES, "dtypes": DTYPES, "options": OPTIONS}
TEXTS = {"name": 60, "title": 100, "idea": 400, "still_hurts": 400}  # and their most characters
LARGEST = 2**63 - 1  # a number of keys, as torch counts them


class StageUnavailable(RuntimeError):
    """This stage can't run on this machine; the message says why."""


def is_whole(value: object) -> bool:
    """Whether `value` is an int of at least 0 that torch can count to."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def wrong(name: str, got: object, expected: str) -> ValueError:
    """The error for an argument that isn't what it must be."""
    return ValueError(f"{name}: got {got}, expected {expected}")


def refuse(what: str, value: object, expected: str) -> ValueError:
    """The error for a field of a Stage that isn't what it must be."""
    return wrong(f"Stage.{what}", reprlib.repr(value), expected)


@dataclass(frozen=True)
class Stage:
    """What a stage says of itself, once, in its own file. Only the first four have no default."""

    number: int  # its place on the ladder: ours 0-99, peers, whose failures fail no run, from 100
    name: str  # a short identifier; records are keyed by (number, name)
    title: str  # what a table shows
    idea: str  # the one idea, in a sentence
    still_hurts: str = ""  # what the next stage mends
    # of 'triton', 'gluon' (its lower level), 'extension' (ours, in C++), 'cuda', 'flash-attn-4' or
    # another of machine.PACKAGES
    needs: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None  # the least CUDA compute capability, such as (9, 0)
    only_major: int | None = None  # the one major CUDA compute capability it is made for, such as 9
    devices: tuple[str, ...] = DEVICES  # where it computes
    dtypes: tuple[str, ...] = DTYPES  # of q, k and v, that it gets right
    options: tuple[str, ...] = ()  # of 'causal', 'seqlens_k', 'gqa', 'paged', 'world'
    gradients: bool = False  # whether out.backward() fills q.grad, k.grad and v.grad
    # whether it is made for few query rows (decoding): compared unasked only where Nq < Nk
    few_queries: bool = False
    # whether it splits the keys where rows are too few to fill a GPU: compared unasked only there
    splits_keys: bool = False
    exact_up_to: int | None = None  # the largest Nk at which it is exact; None: at any
    # whether scores are rounded to q's dtype: where they are large (peaky input), it is inexact in
    # half precision
    rounds_scores: bool = False
    # device -> the largest N that the tour gives it; a missing device: any N
    worth_up_to: Mapping[str, int] = field(default_factory=dict)
    files: tuple[str, ...] = ()  # its others, from its own folder, in the order to read them in
    # what crosses memory at the least: 'fused' (q, k, v and o, once each) or 'three-kernel' (S and
    # P too, written and read)
    traffic: str = "fused"

    def __post_init__(self) -> None:
        if not is_whole(self.number):
            raise refuse("number", self.number, "an int of at least 0")
        if not (self.exact_up_to is None or is_whole(self.exact_up_to)):
            raise refuse("exact_up_to", self.exact_up_to, "None or an int of at least 0")
        for what, most in TEXTS.items():
            value = getattr(self, what)
            if not isinstance(value, str) or not (value.strip() or what == "still_hurts"):
                raise refuse(what, value, "a text")
            if not value.isprintable() or len(value) > most:
                raise refuse(what, value, f"at most {most} characters, all of which print")
        for what, allowed in LISTS.items():
            value = getattr(self, what)
            some = f"some of {', '.join(allowed)}"
            if not isinstance(value, (tuple, list)) or (
                what in ("devices", "dtypes") and not value
            ):
                raise refuse(what, value, some)
            for each in value:
                if each not in allowed:
                    raise refuse(what, each, some)
        if not isinstance(self.files, tuple) or not all(isinstance(x, str) for x in self.files):
            raise refuse("files", self.files, "a tuple of names, such as ('kernels.py',)")
        for what in ("gradients", "few_queries", "splits_keys", "rounds_scores"):
            if not isinstance(getattr(self, what), bool):
                raise refuse(what, getattr(self, what), "True or False")
        if not (self.only_major is None or is_whole(self.only_major)):
            raise refuse("only_major", self.only_major, "None or an int of at least 0")
        pair = self.capability
        if pair is not None and not (
            isinstance(pair, tuple) and len(pair) == 2 and all(map(is_whole, pair))
        ):
            raise refuse("capability", pair, "two ints, such as (9, 0)")
        worth = self.worth_up_to
        if not isinstance(worth, Mapping) or not all(
            device in DEVICES and is_whole(n) for device, n in worth.items()
        ):
            raise refuse("worth_up_to", worth, "an int of at least 0 for cpu, cuda or both")
        if self.traffic not in TRAFFICS:
            raise refuse("traffic", self.traffic, f"one of {', '.join(TRAFFICS)}")

    def computes_on(self, device: str) -> str:
        """Where it does its work when its input is on `device`: a CPU stage takes a GPU's tensors,
        works on the CPU and answers on the GPU."""
        return device if device in self.devices else self.devices[0]

    def mode(self, device: str) -> str:
        """How it runs on `device`: 'native', or Triton 'compiled' (cuda) or 'interpreted' (cpu)."""
        if "triton" not in self.needs:
            return "native"
        return "compiled" if device == "cuda" else "interpreted"


class FirstDerivative(torch.autograd.Function):
    """A backward pass as a node of torch's graph, so that going back through it can be refused.

    apply(stage, passes, *tensors) gives what passes(*tensors) gives; `tensors` are all that it
    depends on. torch's own once_differentiable is silent where dO itself needs no gradient. Raises
    RuntimeError where several gradients come at once (is_grads_batched): one has no memory.
    """

    @staticmethod
    def forward(ctx: Any, stage: Stage, passes: Callable[..., Any], *tensors: Any) -> Any:
        ctx.stage = stage
        if any(isinstance(x, torch.Tensor) and is_legacy_batchedtensor(x) for x in tensors):
            raise RuntimeError(
                f"stage {stage.number} ({stage.name}): got several gradients of its output at once "
                "(is_grads_batched, or vectorize=True), but it takes one: call it for each, or use "
                "stage 3"
            )
        return passes(*tensors)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"stage {ctx.stage.number} ({ctx.stage.name}) can't be differentiated twice: its "
            "backward pass has no derivative; use stage 3, which torch differentiates at will"
        )


def why_not(stage: Stage, where: str | torch.device) -> str | None:
    """Why `stage` can't run on a device of this machine, or None where it can.

    where   'cpu', 'cuda', which is the current GPU, or a torch.device: GPUs may be unlike
    """
    place = torch.device(where)
    device = place.type
    if device == "cpu" and "cpu" not in stage.devices:
        which = f" of compute capability {stage.only_major}.x" if stage.only_major else ""
        return f"computes on a GPU{which} only"
    if device == "cuda" or "cuda" in stage.needs:
        if reason := machine.why_no_gpu():
            return reason
        count = torch.cuda.device_count()
        if place.index is not None and place.index >= count:
            return f"no GPU {place.index}: torch sees {count}, counted from 0"
        if stage.capability or stage.only_major:
            have = capability(where)
            got = ".".join(map(str, have))
            if stage.capability and have < stage.capability:
                need = ".".join(map(str, stage.capability))
                return f"needs compute capability {need}; this GPU has {got}"
            if stage.only_major not in (None, have[0]):
                return f"needs compute capability {stage.only_major}.x; this GPU has {got}"
    if "triton" in stage.needs and (reason := machine.why_no_triton(device)):
        return reason
    if "gluon" in stage.needs and (reason := machine.why_no_gluon()):
        return reason
    if "extension" in stage.needs and (reason := machine.why_no_extension()):
        return reason
    missing = (machine.why_no_package(need) for need in stage.needs if need in machine.PACKAGES)
    return next(filter(None, missing), None)


def capability(where: str | torch.device) -> tuple[int, int]:
    """A GPU's compute capability; of the current one where it isn't said which, or 'cpu'."""
    device = torch.device(where)
    return torch.cuda.get_device_capability(device if device.type == "cuda" else None)


def why_not_dtype(stage: Stage, dtype: str, where: str | torch.device) -> str | None:
    """Why `stage` refuses `dtype` (such as 'bfloat16') there, or None; `where` as in `why_not`."""
    device = torch.device(where).type
    if dtype not in stage.dtypes:
        return f"{dtype} is not among the dtypes that it gets right: {', '.join(stage.dtypes)}"
    if dtype == "bfloat16" and stage.mode(device) == "interpreted":
        return (
            "bfloat16 is refused in Triton's interpreter, whose tl.dot is silently wrong in it; "
            "use float16 or float32"
        )
    if dtype == "bfloat16" and stage.mode(device) == "compiled" and not machine.why_no_gpu():
        have = capability(where)
        if have < (8, 0):
            got = ".".join(map(str, have))
            return (
                f"Triton multiplies bfloat16 from compute capability 8.0 on; this GPU has {got}: "
                "use float16 or float32"
            )
    return None


def most_on_an_axis(stage: Stage) -> int | None:
    """Return how many batch entries, and how many heads, `stage` takes; None: any number.

    A kernel has an axis of its grid for each. The limit holds in the interpreter, too, whose grid
    has none: a stage takes the same problems everywhere.
    """
    return MAX_GRID if "triton" in stage.needs else None
