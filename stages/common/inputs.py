"""The checks of a stage's input against the contract (stages/common/contract.py)."""

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad

from stages.common.contract import (
    MAX_HEAD_DIM,
    MAX_ROWS,
    Stage,
    StageUnavailable,
    most_on_an_axis,
    why_not,
    why_not_dtype,
    wrong,
)


def dtype_name(dtype: torch.dtype) -> str:
    """'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")


def check_plain(name: str, x: Any, expected: str) -> None:
    """Raise ValueError unless `x` is a tensor whose numbers lie in strided memory, `expected`."""
    if not isinstance(x, Tensor):
        raise wrong(name, type(x).__name__, expected)
    kind = type(x)
    own = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    # torch's own tensors that stand for another one in a trace have shapes, too, and answers
    if own and not kind.__module__.startswith("torch._subclasses."):
        got = f"a {kind.__name__}, which computes in its own way"
        raise wrong(name, got, f"{expected}: call the stage on the plain tensors in it")
    if x.is_nested or x.layout != torch.strided:
        got = "nested" if x.is_nested else str(x.layout).removeprefix("torch.").removeprefix("_")
        raise wrong(name, f"a {got} tensor", f"{expected}, strided: call to_dense()")
    if x.is_meta:
        raise wrong(name, "a tensor on meta, which holds no numbers", expected)


PLAIN = (Tensor, torch.nn.Parameter)  # what a tensor of these types is like tells all


def transformed(*tensors: Tensor) -> bool:
    """Whether torch transforms any of `tensors`: torch.func, forward mode, batched gradients."""
    if any(map(is_functorch_wrapped_tensor, tensors)) or any(map(is_legacy_batchedtensor, tensors)):
        return True
    return dual(*tensors)


def dual(*tensors: Tensor) -> bool:
    """Whether any of `tensors` has a tangent, of torch's forward mode."""
    # no level is entered, mostly; torch 2.6 to 2.14 know it by this name
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def unavailable(stage: Stage, reason: str) -> StageUnavailable:
    """The error for a stage that can't run here."""
    return StageUnavailable(f"stage {stage.number} ({stage.name}) can't run here: {reason}")


def check_inputs(
    stage: Stage,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    seqlens_k: Tensor | None = None,
) -> None:
    """Check the arguments of `stage`'s attend against the contract.

    Raises ValueError that names the argument, what came and what was expected, and
    StageUnavailable where the input is good but this machine can't run the stage. Input like one
    that has passed passes at once.
    """
    kind = kind_of(stage, q, k, v, causal, seqlens_k)
    if kind is None or kind not in passed:
        check_each(stage, q, k, v, causal, seqlens_k)
        if len(passed) == MOST_KEPT:
            passed.clear()
        if kind is not None:
            passed[kind] = stage


MOST_KEPT = 4096
passed: dict[Any, Stage] = {}  # kinds of input; the stage is kept, so that no other gets its id


def kind_of(
    stage: Stage, q: Any, k: Any, v: Any, causal: Any, seqlens_k: Any
) -> tuple[Any, ...] | None:
    """Return all that `check_each` looks at; None where it has to look each time.

    It has where the answer isn't in what a tensor is like: in transformed ones, for stages that
    refuse those, and in lengths on a CPU, whose values it reads.
    """
    kind = [id(stage), causal]
    for x in (q, k, v) if seqlens_k is None else (q, k, v, seqlens_k):
        if type(x) not in PLAIN or x.is_nested:
            return None
        kind += x.shape, x.dtype, x.device, x.layout
    if not isinstance(causal, bool) or (seqlens_k is not None and not seqlens_k.is_cuda):
        return None
    return tuple(kind) if stage.gradients or not transformed(q, k, v) else None


def check_each(
    stage: Stage, q: Tensor, k: Tensor, v: Tensor, causal: bool, seqlens_k: Tensor | None
) -> None:
    """Look at each argument, as `check_inputs` promises."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_plain(name, x, "a torch.Tensor of shape (B, H, N, d)")
        # a stage that carries gradients is a part of torch's graph, where torch itself refuses
        if not stage.gradients and transformed(x):
            plain = f"a plain one: stage {stage.number} computes outside torch; use stage 3"
            raise wrong(name, "a tensor inside torch.func (grad, vmap, jvp) or forward_ad", plain)
        check_layout(stage, name, x)
    if q.shape[3] > MAX_HEAD_DIM:
        raise wrong("q", f"head dimension d = {q.shape[3]}", f"1 to {MAX_HEAD_DIM}")
    check_like_q(q, k, v)
    check_heads(stage, q, k, v)
    if v.shape[2] != k.shape[2]:
        raise wrong("v", f"Nk = {v.shape[2]} keys", f"k's {k.shape[2]}")
    if not isinstance(causal, bool):
        raise wrong("causal", repr(causal), "True or False")
    if seqlens_k is not None:
        check_seqlens(seqlens_k, q.shape[0], k.shape[2], q.device)
    for option, wanted in (("causal", causal), ("seqlens_k", seqlens_k is not None)):
        if wanted and option not in stage.options:
            raise ValueError(
                f"{option}: got it set, but stage {stage.number} ({stage.name}) does not take it"
            )
    if reason := why_not_dtype(stage, dtype_name(q.dtype), q.device):
        raise ValueError(f"q: got dtype {dtype_name(q.dtype)}: {reason}")
    if reason := why_not(stage, q.device):
        raise unavailable(stage, reason)


def check_layout(stage: Stage, name: str, x: Tensor) -> None:
    """Raise ValueError unless `x` has four dimensions, none of them empty, and floats."""
    if x.ndim != 4:
        raise wrong(name, f"{x.ndim} dimensions, shape {tuple(x.shape)}", "4: (B, H, N, d)")
    if not x.dtype.is_floating_point:
        floats = f"a floating-point one: {', '.join(stage.dtypes)}"
        raise wrong(name, f"dtype {dtype_name(x.dtype)}", floats)
    for size, what in zip(x.shape, ("B", "H", "N", "d"), strict=True):
        if size < 1:
            raise wrong(name, f"shape {tuple(x.shape)}", f"{what} to be at least 1")


def check_like_q(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless k and v have q's batch, head dimension, dtype and device."""
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != q.shape[0]:
            raise wrong(name, f"batch B = {x.shape[0]}", f"q's {q.shape[0]}")
        if x.shape[3] != q.shape[3]:
            raise wrong(name, f"head dimension d = {x.shape[3]}", f"q's {q.shape[3]}")
        if x.dtype != q.dtype:
            raise wrong(name, f"dtype {dtype_name(x.dtype)}", f"q's {dtype_name(q.dtype)}")
        if x.device != q.device:
            raise wrong(name, f"device {x.device}", f"q's {q.device}")


def check_heads(stage: Stage, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless the stage takes as many heads, key heads and batch entries."""
    (B, H), Hk = q.shape[:2], k.shape[1]
    if v.shape[1] != Hk:
        raise wrong("v", f"{v.shape[1]} heads", f"k's {Hk}")
    if "gqa" in stage.options:
        if H % Hk:
            raise wrong("k", f"{Hk} heads", f"a number that divides q's {H}")
    elif Hk != H:
        raise wrong("k", f"{Hk} heads", f"q's {H} (stage {stage.number} has no grouped heads)")
    most = most_on_an_axis(stage)
    size, what = max((B, f"batch B = {B}"), (H, f"H = {H} heads"))
    if most and size > most:
        end = f"at most {most}, where a CUDA grid's axis ends; call it for parts of the batch"
        raise wrong("q", what, f"{end} or of the heads")
    rows = q.shape[2] * (H // Hk)
    if most and rows > MAX_ROWS:
        fewer = f"at most {MAX_ROWS}: call it for parts of q"
        raise wrong("q", f"{rows} query rows to a key head", fewer)


def check_seqlens(seqlens_k: Tensor, batch: int, keys: int, device: torch.device) -> None:
    """Raise ValueError unless `seqlens_k` is (batch,) int32 on `device`, each entry in 0..keys."""
    expected = f"an int32 tensor of shape ({batch},) on {device}"
    check_plain("seqlens_k", seqlens_k, expected)
    if seqlens_k.shape != (batch,) or seqlens_k.dtype != torch.int32 or seqlens_k.device != device:
        got = f"{dtype_name(seqlens_k.dtype)} of shape {tuple(seqlens_k.shape)}"
        raise wrong("seqlens_k", f"{got} on {seqlens_k.device}", expected)
    # on a GPU the values stay unread: looking would wait for the device at each call
    if device.type == "cpu" and (int(seqlens_k.min()) < 0 or int(seqlens_k.max()) > keys):
        each = f"each in 0..{keys}, the number of keys"
        raise wrong("seqlens_k", seqlens_k.tolist(), each)


asked_for: set[str] = set()  # what `input_precision` gave for float32 on a GPU: for records


def input_precision(x: Tensor) -> str:
    """How a kernel multiplies float32 `x`: as accurately as torch's own switch promises.

    'tf32' where torch.backends.cuda.matmul.fp32_precision (allow_tf32 in older torch) allows it.
    Where that says 'ieee', which promises float32's accuracy and no unit: 'bf16x6'
    (stages/common/products.py). On a GPU that has neither, on a CPU, and for any other dtype:
    'ieee'.
    """
    if x.dtype != torch.float32 or x.device.type != "cuda":
        return "ieee"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "ieee"  # which has neither TF32 nor bfloat16
    switch = torch.backends.cuda.matmul
    new = hasattr(switch, "fp32_precision")
    allowed = switch.fp32_precision == "tf32" if new else switch.allow_tf32
    precision = "tf32" if allowed else "bf16x6"
    asked_for.add(precision)
    return precision


def autocast(*tensors: Any) -> list[Any]:
    """`tensors` in the dtype that torch.autocast has for the device of the first, if it is on.

    What torch's own attention leaves as it is, is left: float64, what isn't floating-point, no
    tensor.
    """
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "meta"
    # torch itself raises where there is no autocast: on meta. An older torch can't compile the
    # question, nor does what it compiles lie there.
    there = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    if not there or not torch.is_autocast_enabled(device):
        return list(tensors)
    cast = torch.float16, torch.bfloat16, torch.float32
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if isinstance(x, Tensor) and x.dtype in cast else x for x in tensors]
