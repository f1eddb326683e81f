"""merge.py's formulas in one kernel: on a GPU o is read twice and written once, at memory speed."""

from torch import Tensor

from stages.common.fit import padded_dim
from stages.common.machine import launching
from stages.common.no_triton import no_triton, tl, triton

there = triton is not no_triton  # else merge.py's own operations do it
ELEMENTS = 4096  # of o in a program


@triton.jit
def merge_kernel(
    o_ptr, lse_ptr, part_ptr, part_lse_ptr,
    stride_ob, stride_oh, stride_om, stride_od, stride_lb, stride_lh, stride_lm,
    stride_pb, stride_ph, stride_pm, stride_pd, stride_plb, stride_plh, stride_plm,
    N, d,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one head. o and lse are changed in place."""
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)  # (BLOCK_D,)
    in_range = offs_m < N
    mask = in_range[:, None] & (offs_d[None, :] < d)
    lse_ptrs = lse_ptr + b * stride_lb + h * stride_lh + offs_m * stride_lm
    part_lse_ptrs = part_lse_ptr + b * stride_plb + h * stride_plh + offs_m * stride_plm
    o_ptrs = o_ptr + b * stride_ob + h * stride_oh
    o_ptrs += offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    part_ptrs = part_ptr + b * stride_pb + h * stride_ph
    part_ptrs += offs_m[:, None] * stride_pm + offs_d[None, :] * stride_pd
    lse = tl.load(lse_ptrs, mask=in_range, other=0.0)  # (BLOCK_M,)
    part_lse = tl.load(part_lse_ptrs, mask=in_range, other=0.0)  # (BLOCK_M,)
    o = tl.load(o_ptrs, mask=mask, other=0.0).to(tl.float32)  # (BLOCK_M, BLOCK_D)
    part = tl.load(part_ptrs, mask=mask, other=0.0).to(tl.float32)  # (BLOCK_M, BLOCK_D)
    # each warp reads all of lse, and one writes it: a warp that is late would read what was written
    tl.debug_barrier()
    m = tl.maximum(lse, part_lse)
    m = tl.where(m == float("-inf"), 0.0, m)  # -inf - -inf would be NaN
    w, part_w = tl.exp2(lse - m), tl.exp2(part_lse - m)  # (BLOCK_M,)
    total = w + part_w
    tl.store(lse_ptrs, m + tl.log2(total), mask=in_range)
    none = total == 0  # then o + part, unweighted
    share = tl.where(none, 1.0, w / total)[:, None]  # (BLOCK_M, 1)
    part_share = tl.where(none, 1.0, part_w / total)[:, None]  # (BLOCK_M, 1)
    # a share of 0 counts for nothing, whatever o is there
    o = tl.where(share == 0, 0.0, share * o) + tl.where(part_share == 0, 0.0, part_share * part)
    tl.store(o_ptrs, o.to(o_ptr.dtype.element_ty), mask=mask)


def launch_configs(d: int, *_: object) -> dict[str, dict[str, int]]:
    """kernel -> its configuration, the same for each dtype, precision and card."""
    BLOCK_D = padded_dim(d)
    return {"merge_kernel": {"BLOCK_M": ELEMENTS // BLOCK_D, "BLOCK_D": BLOCK_D, "num_warps": 4}}


def launch(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge as merge.merge does; all lse in float32."""
    B, H, N, d = o.shape
    config = launch_configs(d)["merge_kernel"]
    with launching(o):
        merge_kernel[(-(-N // config["BLOCK_M"]), H, B)](
            o, lse, part, part_lse, *o.stride(), *lse.stride(), *part.stride(), *part_lse.stride(),
            N, d, **config,
        )  # fmt: skip
