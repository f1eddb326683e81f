"""Stage 9, Gluon on Hopper: loads, matrix products and softmax at the same time.

The finished kernel; read first.py before this picture, which is not to scale:

    one CTA stays on each multiprocessor (or three do), and takes work tiles: rows of one head's Q
    producer    1 warp: has the copy engine (TMA) bring tiles of Q, K and V
    consumers   1 to 3 warpgroups, 64 query rows each: products, softmax, the output

    time, in the source's order ->
    producer    K0 Q K1 V0 K2 V1 K3 V2 ...     as far ahead as the pipelines have empty slots
    consumer 0     |S0=Q K0|    |S1=Q K1|O+=P0 V0|    |S2=Q K2|O+=P1 V1|    ...   matrix unit
                           | P0 |       |     P1      |       |     P2      |     softmax of S
    consumer 1  the same for the next 64 rows; nothing orders the two, but as measured they mostly
                take turns: products of one run during the other's softmax (docs/log/hopper.md)

Tiles pass from the producer to the consumers through pipelines of slots in shared memory, and so
does the number of the next work tile. The rest of the stage, in this order:

    first.py       the smallest kernel that is right, by itself: begin here
    pipeline.py    how roles hand tiles to each other: acquire, load, wait, release
    schedule.py    which work tile a CTA takes next; sizes and masks. Read TileScheduler now, and
                   Problem's methods where they are called
    forward.py     the forward kernel: producer, mask, online softmax, mainloop, epilogue
    backward.py    the backward pass: five products in one pass over the keys, where stage 7 has
                   seven in two; the small kernels before and after it
    backward_two_pass.py    for d above 128: dV in one pass, dK and dQ in another
    launch.py      the host side of both: descriptors, configurations, launches

Cost: stage 6's FLOPs and bytes, d padded to 64, 80, 96, 128, 192 or 256 on the chip; in the
backward pass 10 d FLOPs per visible pair and head (12 d above 128), and dQ's sums in float32.
Copied once per call: tensors that the copy engine can't describe (launch.py), and the output where
d is no multiple of 8. float32 goes to the kernels of stages 6 to 8.
What it bought: loads and softmax run during the products (docs/hopper.md). After FlashAttention-3,
Shah et al. 2024, https://arxiv.org/abs/2407.08608, sections 3.1 and 3.2.
Still hurts: one GPU is all it uses.
"""

from torch import Tensor

from stages.common import operators
from stages.common.inputs import autocast
from stages.contract import Stage, check_inputs, transformed
from stages.s07_triton_training import Attention

from . import launch

STAGE = Stage(
    number=9,
    name="gluon_hopper",
    title="Gluon on Hopper",
    idea="loads, products and softmax at the same time",
    still_hurts="one GPU is all it uses",
    needs=("triton", "gluon", "cuda"),
    only_major=9,
    devices=("cuda",),
    dtypes=("float16", "bfloat16", "float32"),
    options=("causal", "seqlens_k", "gqa"),
    gradients=True,
    files=(
        "first.py",
        "pipeline.py",
        "schedule.py",
        "forward.py",
        "backward.py",
        "backward_two_pass.py",
        "launch.py",
    ),
)


PASSES = operators.Passes(STAGE, launch.forward, launch.backward)


@operators.register(PASSES)
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, seqlens_k: Tensor | None = None
) -> Tensor:
    """Exact attention that trains, on a Hopper GPU.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) with Hk dividing H, float16, bfloat16 or float32;
    `seqlens_k` (B,) int32 -> (B, H, Nq, d) in q's dtype; under torch.autocast as stage 7. A row
    that sees no key is 0, and so is its gradient. The last bits of q's gradient may differ from run
    to run, unless torch.use_deterministic_algorithms(True) asks for the same ones (launch.py).
    Raises ValueError on input that breaks the contract (stages/contract.py), StageUnavailable where
    there is no such GPU or no Gluon, RuntimeError when it is differentiated twice.
    """
    q, k, v = autocast(q, k, v)
    check_inputs(STAGE, q, k, v, causal=causal, seqlens_k=seqlens_k)
    if operators.wanted_of(q, k, v) or transformed(q, k, v):
        return Attention.apply(PASSES, q, k, v, causal, seqlens_k)
    return launch.forward(q, k, v, causal, seqlens_k)
