"""What stages refuse, and how they say so: one table of arguments and messages for all of them."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from stage_checks import FAKES, every_stage, for_each, stage_id
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

from stages.common.inputs import check_inputs

B, H, NQ, NK, D = 2, 2, 3, 4, 8
SIZES = {"q": (B, H, NQ, D), "k": (B, H, NK, D), "v": (B, H, NK, D)}


def good(**changes):
    """Good q, k, v; `changes` gives other sizes (a tuple), another dtype, or another thing."""
    made = {name: torch.zeros(size) for name, size in SIZES.items()}
    for name, change in changes.items():
        if isinstance(change, tuple):
            change = torch.zeros(change)
        elif isinstance(change, torch.dtype):
            change = torch.zeros(SIZES[name], dtype=change)
        made[name] = change
    return made


def all_three(**changes):
    """Good q, k, v with (say) d=0 or nk=0 in every tensor that has it."""
    size = {"b": B, "h": H, "nq": NQ, "nk": NK, "d": D} | changes
    b, h, nq, nk, d = size.values()
    return good(q=(b, h, nq, d), k=(b, h, nk, d), v=(b, h, nk, d))


def of_dtype(dtype):
    return good(q=dtype, k=dtype, v=dtype)


def heads(hq, hk):
    return good(q=(B, hq, NQ, D), k=(B, hk, NK, D), v=(B, hk, NK, D))


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


def takes(option):
    return lambda stage: option in stage.STAGE.options


# the arguments, and what every stage says of them, with anything at "..."
BAD = {
    "q of rank 3": (good(q=(H, NQ, D)), "q: got 3 dimensions, shape (2, 3, 8), ...4: (B, H, N, d)"),
    "k of rank 5": (good(k=(1, B, H, NK, D)), "k: got 5 dimensions..., ...4: (B, H, N, d)"),
    "v of rank 0": (good(v=()), "v: got 0 dimensions, shape (), expected ...4: (B, H, N, d)"),
    "q a list": (good(q=[[[[1.0]]]]), "q: got list, expected a torch.Tensor of shape (B, H, N, d)"),
    "k an array": (good(k=np.zeros(SIZES["k"])), "k: got ndarray, expected a torch.Tensor"),
    "v None": (good(v=None), "v: got NoneType, expected a torch.Tensor"),
    "all int64": (of_dtype(torch.int64), "q: got dtype int64, expected a floating-point"),
    "k int32": (good(k=torch.int32), "k: got dtype int32, expected a floating-point one"),
    "v bool": (good(v=torch.bool), "v: got dtype bool, expected a floating-point one"),
    "q complex": (good(q=torch.complex64), "q: got dtype complex64, expected a floating-point one"),
    "B = 0": (all_three(b=0), "q: got shape (0, 2, 3, 8), expected B to be at least 1"),
    "H = 0": (all_three(h=0), "q: got shape (2, 0, 3, 8), expected H to be at least 1"),
    "Nq = 0": (all_three(nq=0), "q: got shape (2, 2, 0, 8), expected N to be at least 1"),
    "Nk = 0": (all_three(nk=0), "k: got shape (2, 2, 0, 8), expected N to be at least 1"),
    "no v": (good(v=(B, H, 0, D)), "v: got shape (2, 2, 0, 8), expected N to be at least 1"),
    "d = 0": (all_three(d=0), "q: got shape (2, 2, 3, 0), expected d to be at least 1"),
    "d = 257": (all_three(d=257), "q: got head dimension d = 257, expected ...1 to 256"),
    "k of another d": (good(k=(B, H, NK, 9)), "k: got head dimension d = 9, expected q's 8"),
    "v of another d": (good(v=(B, H, NK, 1)), "v: got head dimension d = 1, expected q's 8"),
    "k of another B": (good(k=(1, H, NK, D)), "k: got batch B = 1, expected q's 2"),
    "v of another B": (good(v=(4, H, NK, D)), "v: got batch B = 4, expected q's 2"),
    "three heads for two": (heads(2, 3), "k: got 3 heads, expected ...q's 2"),
    "four heads for two": (heads(2, 4), "k: got 4 heads, expected ...q's 2"),
    "v of other heads": (good(v=(B, 1, NK, D)), "v: got 1 heads, expected k's 2"),
    "k of another dtype": (good(k=torch.float16), "k: got dtype float16, expected q's float32"),
    "v of another dtype": (good(v=torch.float64), "v: got dtype float64, expected q's float32"),
    "v of another Nk": (good(v=(B, H, NK + 1, D)), "v: got Nk = 5 keys, expected k's 4"),
}
UNUSUAL = {
    "meta": lambda x: x.to("meta"),
    "sparse_coo": lambda x: x.to_sparse(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "MaskedTensor": lambda x: masked_tensor(x, x > 0),
    "TwoTensor": lambda x: TwoTensor(x, x),  # wraps two others
}
BAD |= {
    f"{kind} {name}": (
        # made by the test: some of them import the whole of torch.compile
        good(**{name: partial(make, torch.zeros(SIZES[name]))}),
        f"{name}: got a ...{kind}..., expected a torch",
    )
    for name in SIZES
    for kind, make in UNUSUAL.items()
}

# the same of some stages: which; the arguments; what they say, where DTYPES are those they take
OF_SOME = {
    "one head for two": (
        lambda stage: "gqa" not in stage.STAGE.options,
        heads(2, 1), "k: got 1 heads, expected q's 2",
    ),
    **{
        f"{n} heads for six": (takes("gqa"), heads(6, n), f"k: got {n} heads, ...divides q's 6")
        for n in (4, 5, 12)
    },
    **{
        what: (
            lambda stage: "triton" in stage.STAGE.needs,
            good(q=size, k=size, v=size), f"q: got {what}, expected at most 65535",
        )
        for what, size in {
            "batch B = 65536": (65536, 1, 1, 1), "H = 65536 heads": (1, 65536, 1, 1),
        }.items()
    },
    "rows past 2^30": (
        lambda stage: "gqa" in stage.STAGE.options and "triton" in stage.STAGE.needs,
        good(
            q=torch.zeros(1).expand(1, 1 << 15, (1 << 15) + 1, D), k=(1, 1, NK, D), v=(1, 1, NK, D)
        ),
        "q: got 1073774592 query rows to a key head, expected at most 1073741824: call it",
    ),
    **{
        f"seqlens_k {came}": (takes("seqlens_k"), good(seqlens_k=value), f"seqlens_k: got {came}")
        for value, came in (
            ([1, 2], "list, expected an int32 tensor of shape (2,) on cpu"),
            (lengths(1), "int32 of shape (1,) on cpu, expected an int32 tensor of shape (2,)"),
            (lengths(1, 2, 3), "int32 of shape (3,) on cpu, expected an int32"),
            (lengths(1, 2).view(2, 1), "int32 of shape (2, 1) on cpu, expected an int32"),
            (lengths(1, 2).long(), "int64 of shape (2,) on cpu, expected an int32"),
            (lengths(1, 2).float(), "float32 of shape (2,) on cpu, expected an int32"),
            (lengths(1, 2).to("meta"), "a tensor on meta, which holds no numbers, expected an int"),
            (lengths(1, 2).to_sparse(), "a sparse_coo tensor, expected an int32"),
            (lengths(-1, 2), "[-1, 2], expected each in 0..4"),
            (lengths(0, NK + 1), "[0, 5], expected each in 0..4"),
        )
    },
    **{
        f"causal {value}": (
            takes("causal"), good(causal=value), "causal: got ..., expected True or False",
        )
        for value in ("no", 1, None)
    },
    **{
        f"all {dtype}": (
            lambda stage, dtype=dtype: dtype not in stage.STAGE.dtypes,
            of_dtype(getattr(torch, dtype)), f"q: got dtype {dtype}: ...DTYPES",
        )
        for dtype in ("float64", "float8_e5m2")
    },
    "bfloat16 interpreted": (
        lambda stage: stage.STAGE.mode("cpu") == "interpreted" and "cpu" in stage.STAGE.devices,
        of_dtype(torch.bfloat16), "q: got dtype bfloat16: ...interpreter...float16 or float32",
    ),
    **{
        f"a gradient of {name}": (
            takes("paged"), good(**{name: torch.zeros(SIZES[name]).requires_grad_()}),
            f"{name}: got requires_grad=True, expected none",
        )
        for name in SIZES
    },
}  # fmt: skip
ALL = {case: (lambda stage: True, *row) for case, row in BAD.items()} | OF_SOME
ASKED = [(stage, case) for case, (which, *_) in ALL.items() for stage in FAKES if which(stage)]


@pytest.mark.parametrize(
    ("stage", "case"), ASKED, ids=[f"{case}-{stage_id(stage)}" for stage, case in ASKED]
)
def test_bad_arguments_are_named(stage, case):
    _, arguments, says = ALL[case]
    arguments = {name: x() if callable(x) else x for name, x in arguments.items()}
    says = says.replace("DTYPES", ", ".join(stage.STAGE.dtypes))
    with pytest.raises(ValueError, match="^" + ".*".join(map(re.escape, says.split("...")))):
        stage.attend(**arguments)


def test_every_line_is_of_some_stage_and_the_stages_in_triton_take_no_float64():
    assert {case for _, case in ASKED} == {*ALL}
    assert {stage.STAGE.number for stage, case in ASKED if case == "all float64"} >= {4, 5, 6, 7}


@for_each([stage for stage in FAKES if "cpu" in stage.STAGE.devices])
def test_what_is_at_the_border_is_taken(stage):
    for hk in (1, 2, 3, 6) if "gqa" in stage.STAGE.options else (6,):
        check_inputs(stage.STAGE, **heads(6, hk))
    check_inputs(stage.STAGE, *[torch.zeros(65535, 1, 1, 1)] * 3)


@pytest.mark.parametrize("option", ["causal", "seqlens_k"])
@every_stage
def test_an_option_is_refused_where_it_is_not_taken_and_goes_by_its_name(stage, option):
    value = {"causal": True, "seqlens_k": lengths(1, 2)}[option]
    if option in stage.STAGE.options:
        with pytest.raises(TypeError, match="positional"):
            stage.attend(*good().values(), value)
        return
    with pytest.raises((TypeError, ValueError), match=option):
        stage.attend(**good(**{option: value}))
    with pytest.raises(ValueError, match=rf"^{option}: got it set, but stage"):
        check_inputs(stage.STAGE, **good(**{option: value}))
