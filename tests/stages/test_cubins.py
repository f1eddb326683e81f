"""The Triton kernels compile for GPUs that are not here, fit them, and spill nothing.

What doesn't fit a GPU's shared memory still compiles, and only its launch would fail; what spills
still runs, slowly. So the numbers are read from the cubins (cubins.py, a process of its own, since
kernels are interpreted in this one).

`make cubins` compiles all that `jobs` chooses from ($LADDER_CUBINS is set): half an hour. `make
gluon` compiles Hopper's stage under other versions of Triton, too ($LADDER_TRITON is a folder that
has one).
"""

import importlib.util
import os
import sys
from itertools import count, product

import machine_code
import pytest
import torch
from cubins import SHARED_LIMIT, card_of, kernels
from stage_checks import FAKES, stage_id

import stages
from harness.records.code import first_file
from stages.common.fit import DK_DV, DQ, FORWARD, kind_of, shared_needed
from stages.s09_gluon_hopper.launch import REGISTERS, TWO_PASS, backward_tile

TRITON = [stage for stage in FAKES if "triton" in stage.STAGE.needs]
STAGES = [stage_id(stage) for stage in TRITON if "gluon" not in stage.STAGE.needs]
GLUON = [stage_id(stage) for stage in TRITON if "gluon" in stage.STAGE.needs]
OTHER_TRITON = os.environ.get("LADDER_TRITON")
WHOLE = "LADDER_CUBINS" in os.environ
CARDS = tuple(SHARED_LIMIT)
SIZES = (16, 64, 128, 256)
DTYPES = ("float16", "float32", "tf32", "bfloat16", "bf16x6")
ROWS = ((1, False), (200, True), (40, False), (20, True))  # packed rows of stage 8, and `several`


def dtypes_of(sm):
    """What a card multiplies: before sm_80 Triton knows no bfloat16, and TF32 is float32."""
    return DTYPES if sm >= 80 else DTYPES[:2]


def flags_of(kernel, d, dtype):
    """'plain', and 'masked' where a kernel has masks; 'redo' is float32's after split products."""
    masks = ("masked",) if "CAUSAL" in kernel.arg_names else ()
    redo = ("redo",) if dtype == "float32" and "REDO" in kernel.arg_names else ()
    return ("plain", *masks, *redo)


def chosen(nth, stage, kernel, d, dtype, sm):
    """With which flags CI compiles the nth kernel at a size and a dtype for a card: most with none.

    float16 has the largest tiles: it is compiled for all cards, at d = 64 for every second and at
    128 for the others (86 and 89 take turns, since their limits are the same); and at 128 with
    masks, which leave the fewest registers, for sm_90. All else is compiled for one card,
    another for each kernel: TF32 where it may not spill; bfloat16, whose code is that of float16,
    at one size; split products at one, too, and float32, with masks or after split products:
    another size for each kernel.
    """
    flags = flags_of(kernel, d, dtype)
    size, at = SIZES.index(d), CARDS.index(sm)
    if dtype == "float16" and d in (64, 128):
        if (d, sm) == (128, 90):
            return flags[:2]
        at -= sm > 86  # 86 and 89 are one card
        twin = sm in (86, 89) and (nth // 2 + size + sm) % 2
        return () if twin or (nth + at + size) % 2 else flags[:1]
    have = [card for card in CARDS if dtype in dtypes_of(card)]
    if sm != have[(nth + size + DTYPES.index(dtype)) % len(have)]:
        return ()
    if dtype == "float16":
        return flags[:1]
    # some split products take ten seconds: at other sizes, and for other cards, none does
    one = SIZES[1 + (nth + (2 if dtype == "bf16x6" else 1)) % 3]
    if d not in {"tf32": (64, 128), "bfloat16": (64,)}.get(dtype, (one,)):
        return ()
    return flags[-1:] if dtype in ("float32", "bfloat16") and d <= 128 else flags[:1]


def jobs():
    """(stage, kernel, d, dtype, sm, flags) to compile, for stage 8's split also ROWS' rows."""
    nth = count()
    for stage in STAGES:
        for name, kernel in kernels(stage).items():
            if name == "delta_kernel":
                continue  # no tiles to speak of
            own = next(nth)
            for turn, (d, dtype, sm) in enumerate(product(SIZES, DTYPES, CARDS)):
                if dtype not in dtypes_of(sm):
                    continue
                choose = flags_of(kernel, d, dtype) if WHOLE else None
                more = [()] if name != "split_kernel" else ROWS if WHOLE else [ROWS[turn % 4]]
                if choose is None:
                    choose = chosen(own, stage, kernel, d, dtype, sm)
                for flags, rows in product(choose, more):
                    yield stage, name, d, dtype, sm, flags, *rows


JOBS = list(jobs())

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and importlib.util.find_spec("triton") is None,
    reason="no wheel of triton for this machine",
)


def test_every_card_size_and_dtype_is_compiled_for():
    """Each card with each size and each dtype, and every kernel for each."""
    assert STAGES, "no stage needs triton: these tests test nothing"
    assert {job[0] for job in JOBS} == set(STAGES)
    pairs = {(sm, dtype) for sm in CARDS for dtype in dtypes_of(sm)}
    assert {(job[4], job[3]) for job in JOBS} == pairs
    assert {(job[4], job[2]) for job in JOBS} >= set(product(CARDS, SIZES[1:]))
    for stage, name in {job[:2] for job in JOBS}:
        d, dtype = (
            set(each) for each in zip(*(job[2:4] for job in JOBS if job[:2] == (stage, name)))
        )
        assert (d, dtype) == (set(SIZES), set(DTYPES)), (stage, name)
    # float16 up to d = 128, where nothing may spill: each card, and every kernel for each
    half = {(*job[:3], job[4]) for job in JOBS if job[3] == "float16" and job[2] in (64, 128)}
    assert {job[2:] for job in half} == set(product((64, 128), CARDS))
    for stage, name in {job[:2] for job in JOBS}:
        cards = {sm for *kernel, _, sm in half if kernel == [stage, name]}
        assert cards | {86, 89} == set(CARDS) and cards & {86, 89}, (stage, name)


def fused(stage, name, dtype):
    """Whether a kernel's exponents are to be multiply-adds of a score and a max, or an lse.

    The product isn't rounded then, and what is subtracted is: of large scores 0 or infinity would
    come. Such kernels refuse them (tests/stages/test_magnitudes.py); no others may be compiled so.
    """
    if name in ("dk_dv_kernel", "dq_kernel"):
        return True
    if dtype == "bf16x6":  # a score is a sum times 2^-32, a product that needs no rounding
        return True
    return stage == "s06_triton_flash2" and dtype != "float32"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "name", "dtype"),
    [
        ("s05_triton_online", "attention_kernel", "float16"),
        ("s06_triton_flash2", "attention_kernel", "float16"),
        ("s08_triton_split_kv", "split_kernel", "float16"),
    ],
)
def test_a_score_is_rounded_before_its_max_is_subtracted_unless_large_ones_are_refused(
    stage, name, dtype, compiler
):
    (report,) = compiler.answers((stage, name, 64, dtype, 80, "plain"))
    assert ("FFMA" in report["exponents"]) is fused(stage, name, dtype), report["exponents"]


@pytest.mark.slow
@pytest.mark.parametrize(("info", "kernel"), dict.fromkeys(job[:2] for job in JOBS))
def test_every_kernel_is_compiled_and_fits(info, kernel, compiler):
    faults = []
    asked = [job for job in JOBS if job[:2] == (info, kernel)]
    for job, report in zip(asked, compiler.answers(*asked), strict=True):
        stage, name, d, dtype, sm, flags = job[:6]
        said = [report[field] for field in ("stage", "kernel", "d", "sm", "flags")]
        assert said == [stage, name, d, sm, flags]
        assert dtype in (report["dtype"], report["precision"])
        card, limit = card_of(sm), SHARED_LIMIT[sm]
        if name != "merge_kernel":  # which multiplies no matrices
            walk = {"dk_dv_kernel": DK_DV, "dq_kernel": DQ}.get(name, FORWARD)
            kind = kind_of(getattr(torch, report["dtype"]), report["precision"], card)
            limit = min(limit, shared_needed(report["config"], walk, kind, card))
            assert report["shared"] > 0
        if report["shared"] > limit:
            faults.append(f"{job}: {report['shared']} bytes of shared memory, at most {limit} fit")
        if report["tmem"] > 512:
            faults.append(f"{job}: {report['tmem']} columns of tensor memory, at most 512 fit")
        # masks cost registers: what is held to none is the way without, which has the most to do;
        # float32's own units have only blocks whose split products didn't fit
        held = flags == "plain" and d <= 128 and dtype in ("float16", "bfloat16", "tf32")
        held = held and sm >= 80
        if held and report["STACK"] + report["LOCAL"]:
            spilled = f"{report['STACK']} + {report['LOCAL']} bytes a thread"
            faults.append(f"{job}: {spilled} on the stack and in local memory, expected none")
        # sm_90a: that of the wgmma instructions, which sm_90 itself has not
        if report["ptx_target"] not in (f"sm_{sm}", f"sm_{sm}a"):
            faults.append(f"{job}: compiled for {report['ptx_target']}")
        if not 0 < report["REG"] <= 255:
            faults.append(f"{job}: {report['REG']} registers a thread")
        if not report["cubin_bytes"] > 0:
            faults.append(f"{job}: an empty cubin")
        made_by = report["exponents"]
        if made_by == {} or ("FFMA" in (made_by or {}) and not fused(stage, name, dtype)):
            faults.append(f"{job}: exponents made by {made_by}")
    assert not faults, "\n".join(faults)


# d, configuration, and flags that `plan` gives it; the slow ones differ the less from the first
HOPPER = [
    pytest.param(d, name, flags, marks=() if (d, flags) == (128, ["plain"]) else pytest.mark.slow)
    for d, name, flags in (
        (128, "TWO_CONSUMERS", ["plain"]),
        (128, "TWO_CONSUMERS", ["lengths", "masked"]),
        (64, "THREE_CTAS", ["causal"]),
        (64, "THREE_CONSUMERS", ["plain", "ragged"]),
        (64, "THREE_CONSUMERS", ["masked"]),
        (256, "D_256", ["plain", "masked"]),
        (192, "D_192", ["causal"]),
        (96, "D_96", ["plain"]),
        (80, "D_80", ["causal"]),
        *(
            (
                (128, "TWO_CONSUMERS", ["ragged", "causal"]),
                (64, "THREE_CTAS", ["masked"]),
                (64, "THREE_CONSUMERS", ["lengths", "causal"]),
                (256, "D_256", ["ragged", "lengths", "causal"]),
                (192, "D_192", ["plain", "ragged", "lengths", "masked"]),
                (96, "D_96", ["ragged", "lengths", "causal", "masked"]),
                (80, "D_80", ["plain", "ragged", "lengths", "masked"]),
            )
            if WHOLE or OTHER_TRITON
            else ()
        ),
    )
]


@pytest.mark.parametrize("info", GLUON)
@pytest.mark.parametrize(("d", "name", "flags"), HOPPER)
def test_products_on_hopper_run_by_themselves(info, d, name, flags, compiler):
    """ptxas makes asynchronous products wait for one another in silence: one group for each of S
    and P V, in each part of d, is right, 8 and more for a part mean that it did.
    """
    # once in float16, whose code is that of bfloat16
    dtypes = {masks: "float16" if masks == "ragged" else "bfloat16" for masks in flags}
    asked = [(info, "gluon", d, dtype, name, masks) for masks, dtype in dtypes.items()]
    for job, report in zip(asked, compiler.answers(*asked), strict=True):
        assert 0 < report["shared"] <= SHARED_LIMIT[90], job
        # ptxas 12.8 computed a descriptor for the first of two loops only, which may have no turn
        assert report["unset"] == [], job
        config = getattr(stages.by_number(9).launch, name)
        loops, consumers, parts = report["loops"], config.CONSUMERS, -(-config.D // config.BLOCK_D)
        # the compiler's own, constants in its code; pipelines have 5 and more, in registers, but
        # where a slot has always the same part of d
        slots = config.K_SLOTS + config.V_SLOTS + consumers
        ours = {*range(5, 5 + slots)} if parts > 1 else set()
        assert report["barriers"], job
        assert {*report["barriers"]} - ours <= {*range(5)}, job
        assert len(loops) >= consumers, job
        for loop in loops:
            assert loop["WARPGROUP.ARRIVE"] == 2 * parts, (job, loops)
            assert loop["HGMMA"] >= 8, (job, loops)
        # the few tiles with masks may spill, each consumer's loop over the other ones may not; and
        # ptxas counted there in registers of single threads once, which is slower: another may
        slow = ("spills",) if OTHER_TRITON else ("spills", "R2UR")
        swift = [loop for loop in loops if not any(loop[name] for name in slow)]
        assert len(swift) >= consumers, (job, loops)
        if job[-1] == "plain":
            assert report["STACK"] == report["LOCAL"] == 0, job
        # what each role gets of the registers when it begins
        assert {config.CONSUMER_REGS, config.PRODUCER_REGS} <= set(report["budgets"]), job


@pytest.mark.slow
def test_products_of_the_smallest_kernel_on_hopper_run_by_themselves(compiler):
    """Two groups in each consumer's loop, S and P V; one that waits for another has more."""
    path = str(first_file(9).with_name("first.py"))
    (report,) = compiler.answers((path, "gluon", 128, "float16", "FIRST", "plain"))
    assert 0 < report["shared"] <= SHARED_LIMIT[90]
    assert report["STACK"] == report["LOCAL"] == 0
    assert report["unset"] == []
    assert {240, 24} <= set(report["budgets"])  # registers of a consumer and of the producer
    first, second = report["loops"]
    for loop in (first, second):
        assert (loop["WARPGROUP.ARRIVE"], loop["HGMMA"], loop["spills"]) == (2, 16, 0), loop
    # the max is subtracted before the product is scaled: any score is right, however large
    assert "FFMA" not in report["exponents"]


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 80, 96, 128])
def test_products_of_the_backward_pass_on_hopper_run_by_themselves(d, compiler):
    """Five groups in each consumer's loops: S, dP, dV, dK and, where it is wanted, dQ.

    The first four in two parts each at d = 80 and 96.
    """
    kinds = ["plain", "masked", "lengths"] if d == 64 else ["plain", "causal", "keys"]
    if 64 < d < 128:
        kinds = ["masked"] if d == 80 else ["lengths"]
    if WHOLE or OTHER_TRITON:
        kinds = ["plain", "keys", "causal", "lengths", "masked"]
    dtypes = {flags: "float16" if flags == "keys" else "bfloat16" for flags in kinds}
    asked = [
        ("s09_gluon_hopper.launch", "gluon", d, dtype, "BACKWARD", flags)
        for flags, dtype in dtypes.items()
    ]
    for job, report in zip(asked, compiler.answers(*asked), strict=True):
        flags = job[-1]
        assert 0 < report["shared"] <= SHARED_LIMIT[90], job
        assert report["unset"] == [], job
        loops = report["loops"]
        # K's, V's, whose turn it is, and where the consumers meet for dS; those below 5 are the
        # compiler's
        ours = {5, 6}
        if flags != "keys":
            ours |= {64: {9}, 128: {9, 15}}.get(d, {15})
        assert {number for number in report["barriers"] if number >= 5} == ours, job
        # a step adds up 16 columns of d for S and dP, 16 of BLOCK_M queries for dV and dK
        parts = 1 if d in (64, 128) else 2
        BLOCK_M, _, _ = backward_tile(d)
        products, steps = 4 * parts, 2 * d // 16 + 2 * parts * BLOCK_M // 16
        if flags != "keys":
            products, steps = products + 1, steps + 8  # 16 of 128 keys for dQ
        assert len(loops) == (2 if flags in ("plain", "keys") else 4), job  # with masks and without
        for loop in loops:
            assert loop["WARPGROUP.ARRIVE"] == products, (job, loops)
            assert loop["HGMMA"] == steps, (job, loops)
        assert set(REGISTERS.values()) <= set(report["budgets"]), job
        if not OTHER_TRITON:  # another may spill more
            spilled = [loop["spills"] for loop in loops]
            assert sorted(spilled)[:2] == [0, 0], (job, loops)  # each consumer's without masks
            assert max(spilled) <= 2, (job, loops)
            assert not any(loop["R2UR"] for loop in loops), (job, loops)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_PASS[256])
@pytest.mark.parametrize("d", [192, 256])
def test_products_of_both_passes_above_128_on_hopper_run_by_themselves(d, name, compiler):
    """A group for each product and part of d: S and dV; or S, dP, dK and a consumer's parts of dQ.

    Of two parts each consumer has one, of three one has two.
    """
    kinds = ["plain", "masked"] if d == 256 else ["lengths"]
    if WHOLE or OTHER_TRITON:
        kinds = ["plain", "causal", "lengths", "masked"]
    kinds += ["keys"]
    dtypes = {flags: "float16" if flags == "masked" else "bfloat16" for flags in kinds}
    asked = [
        ("s09_gluon_hopper.launch", "gluon", d, dtype, name, flags)
        for flags, dtype in dtypes.items()
    ]
    for job, report in zip(asked, compiler.answers(*asked), strict=True):
        flags, loops = job[-1], report["loops"]
        assert 0 < report["shared"] <= SHARED_LIMIT[90], job
        assert report["unset"] == [], job
        # those below 5 are the compiler's; of K, of V, slots of known numbers, and where consumers
        # meet for dS and, at d = 192, behind dQ
        ours = {5} if name == "VALUES" else {5, 6}
        ours |= {9} if d == 192 else {10} if name == "KEYS" else set()
        if name == "KEYS" and flags != "keys":
            ours |= {14, 15} if d == 192 else {15}
        assert {number for number in report["barriers"] if number >= 5} == ours, job
        # a step adds up 16 columns of d for S and dP, 16 of a tile's queries for dV and dK, 16 of
        # 128 keys for dQ; those are for one part of d
        config = TWO_PASS[d][name]
        parts = config["PARTS"]
        products = (2 if name == "VALUES" else 3) * parts
        steps = d // (16 if name == "VALUES" else 8) + config["BLOCK_M"] // 16 * parts
        each = [0, 0] if name == "VALUES" or flags == "keys" else [1, 1] if parts == 2 else [1, 2]
        assert len(loops) == (2 if flags in ("plain", "keys") else 4), job  # with masks and without
        dq = [loop["WARPGROUP.ARRIVE"] - products for loop in loops]
        assert sorted(dq) == sorted(each * (len(loops) // 2)), (job, loops)
        assert [loop["HGMMA"] for loop in loops] == [steps + 8 * x for x in dq], (job, loops)
        assert set(REGISTERS.values()) <= set(report["budgets"]), job
        if not OTHER_TRITON:  # another may spill
            assert not any(loop["spills"] + loop["R2UR"] for loop in loops), (job, loops)


def test_a_register_that_one_of_two_ways_sets_is_found():
    """As ptxas 12.8 left it, from Triton 3.6's PTX: the branch passes over what sets UR4."""
    lines = [
        "@!P0 BRA 0x0030", "UMOV UR4, 0x10", "UMOV UR5, URZ", "UMOV UR6, 0x20", "UMOV UR7, URZ",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", "EXIT",
    ]  # fmt: skip
    sass = "".join(f"/*{16 * i:04x}*/ {line} ;\n" for i, line in enumerate(lines))
    assert machine_code.unset_registers(sass) == [lines[5]]
    for target in ("0x0010", "0x0060"):  # past nothing, past all of it
        assert machine_code.unset_registers(sass.replace("0x0030", target)) == []
