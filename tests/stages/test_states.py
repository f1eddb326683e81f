"""The Triton stages hold after each tile what course/tracing/trace.py, in NumPy, holds.

Stage 8's parts, which it hands from one kernel to the next, are held to course/tracing/merge.py.

A recorder is the shipped file with a few lines put in by text substitution, each found exactly
once, as in test_mutants.py: the kernel then writes m_i, l_i and acc of each row after each tile
into `states`, (B * H, tiles, Nq, 2 + d) float32, which `attend` returns beside o, with BLOCK_N. A
place that no program wrote is NaN. A recorder writes m_i in natural units: a stage that keeps it in
others (log2) turns it back in the line that it puts in.
"""

import math

import numpy as np
import pytest
import torch
from stage_checks import device_of, hidden_keys, options_of, relative_rounding

import stages
from course.edits import write_changed
from course.tracing import merge, trace
from harness.problems.inputs import make_inputs
from harness.problems.problem import Problem
from stages.common.fit import card_of
from stages.common.inputs import input_precision

ALLOCATE = """\
    shape = (B * H, triton.cdiv(Nk, config["BLOCK_N"]), Nq, 2 + d)
    states = torch.full(shape, float("nan"), dtype=torch.float32, device=q.device)
"""
STORE = """\
        head = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
        tile = head * tl.cdiv(Nk, BLOCK_N) + start_n // BLOCK_N
        state_ptrs = states_ptr + (tile * Nq + offs_m) * (2 + d)
        tl.store(state_ptrs, {m_i}, mask=offs_m < Nq)
        tl.store(state_ptrs + 1, {l_i}, mask=offs_m < Nq)
        tl.store(state_ptrs[:, None] + 2 + offs_d[None, :], acc, mask=q_mask)
"""
RETURN = ("    return o\n", '    return o, states, config["BLOCK_N"]\n')

# untuned, so that one configuration writes the states
CONFIG = "    config = launch_config(d, q.dtype, precision, card_of(q.device))\n"
LAUNCHING, LAST = "    def launch(precision", "        v_ptrs += BLOCK_N * stride_vn\n"
ONE_KERNEL = (
    ("    Nq, Nk, d, scale,\n", "    Nq, Nk, d, scale, states_ptr,\n"),
    ("d**-0.5, PRECISION", "d**-0.5, states, PRECISION"),
    (LAUNCHING, CONFIG + ALLOCATE + LAUNCHING),
    RETURN,
)

# stage 6's loop is a function of its own; without masks or with, it is called for either part
LAUNCH, VISITED = "    def launch(config: tuner.Config, precision", "        visited += 1\n"
NAMES = """\
        offs_m, offs_d = rows, tl.arange(0, BLOCK_D)
        q_mask = (rows[:, None] < Nq) & (offs_d[None, :] < d)
"""
# stage 6 keeps log2(e) times the scores, and begins with the lowest number
LN_2 = 'tl.where(l_i == 0.0, float("-inf"), m_i * 0.6931471805599453)'
SPLIT_LOOP = (
    ("    start, end, rows", "    start, end, states_ptr, Nq, Nk, rows"),
    ("        0, full, rows", "        0, full, states_ptr, Nq, Nk, rows"),
    ("        full, end, rows", "        full, end, states_ptr, Nq, Nk, rows"),
    (VISITED, VISITED + NAMES + STORE.format(m_i=LN_2, l_i="l_i")),
    ("    group, Nq, Nk, d, qk_scale,\n", "    group, Nq, Nk, d, qk_scale, states_ptr,\n"),
    ("d**-0.5 * LOG2_E,\n", "d**-0.5 * LOG2_E, states,\n"),
    (LAUNCH, CONFIG + ALLOCATE + LAUNCH),
    RETURN,
)

RECORDERS = {
    # Lite knows only acc from one tile to the next
    4: (*ONE_KERNEL, (LAST, LAST + STORE.format(m_i="tl.max(s, 1)", l_i="tl.sum(p, 1)"))),
    5: (*ONE_KERNEL, (LAST, LAST + STORE.format(m_i="m_i", l_i="l_i"))),
    6: SPLIT_LOOP,
}

# nq, nk, d: one tile, a lone key in the last one, whole ones, a ragged one
SHAPES = [(3, 1, 16), (5, 64, 16), (4, 65, 8), (33, 192, 16), (7, 150, 40)]


def recorder(number, folder, *more):
    """The recorder of a stage, changed by the pairs of `more`, too, and imported."""
    changes = (*RECORDERS[number], *more)
    return stages.load(write_changed(number, changes, folder, f"records_{number}_{len(more)}"))


def problem(inputs, nq, nk, d, device, causal=False, seqlens_k=None):
    """Two batch entries, two heads."""
    return Problem(
        inputs, 7, 2, 2, 2, nq, nk, d, "float32", "ieee", causal, seqlens_k, device
    )  # fmt: skip


def states_of(stage, asked):
    """q, k, v, o, and the states, (tiles, B, H, Nq, 2 + d), of `stage` for a problem; its tile."""
    q, k, v = make_inputs(asked)
    o, states, tile = stage.attend(q, k, v, **options_of(asked))
    states = states.unflatten(0, q.shape[:2]).movedim(2, 0).cpu().numpy()
    return (q, k, v), o.cpu().numpy(), states, tile


def visible_keys(asked):
    """How many keys each row of a problem sees, (B, 1, Nq), as trace.walk takes it."""
    return (~hidden_keys(asked)).sum(-1).expand(asked.b, asked.h, asked.nq).cpu().numpy()


def reference(q, k, v, tile, visible=None):
    """The states of the reference, in float64."""
    return trace.walk(*(x.double().cpu().numpy() for x in (q, k, v)), tile, visible)


def assert_near(got, want, bound, what):
    """Within the bound, -inf where that is wanted; NaN, for what was not recorded, is neither."""
    with np.errstate(invalid="ignore"):  # -inf - -inf
        near = (np.abs(got - want) <= bound) | (got == want)
    assert near.all(), f"{what} is off, {got[~near][:3]} for {want[~near][:3]}"


def check_online(stage, asked):
    """m_i, l_i, acc after every tile, and the output, are the reference's but for rounding.

    relative_rounding bounds what float32 may do to a score, absolutely, by E / 2, and to a
    probability, of itself, by E. The max of scores is off by what scores are; l_i is a sum of
    exp(s - m_i), each off by E of itself, and acc a sum of those times v. A block that visits no
    more tiles leaves NaN behind: it must have gone as far as any of its rows sees, and no further.
    """
    (q, k, v), o, states, tile = states_of(stage, asked)
    seen = visible_keys(asked)
    E, v_max = relative_rounding(q, k), v.abs().max().item()
    steps = reference(q, k, v, tile, seen)
    assert len(states) == math.ceil(asked.nk / tile) >= len(steps)
    config = stage.launch_config(asked.d, q.dtype, input_precision(q), card_of(q.device))
    block = config["BLOCK_M"]
    furthest = [seen[..., i : i + block].max(-1) for i in range(0, asked.nq, block)]
    furthest = np.stack([furthest[i // block] for i in range(asked.nq)], -1)  # (B, H, Nq)
    for index, state in enumerate(states):
        visited = index * tile < furthest  # (B, H, Nq)
        assert np.array_equal(visited, ~np.isnan(state).all(-1)), f"visits of tile {index}"
        if not visited.any():
            continue
        state, step = state[visited], steps[index]
        m_i, l_i, acc = (x[visited] for x in (step.m_i, step.l_i, step.acc))
        assert_near(state[:, 0], m_i, E / 2, f"m_i after tile {index}")
        assert_near(state[:, 1], l_i, E * l_i, f"l_i after tile {index}")
        assert_near(state[:, 2:], acc, E * l_i[:, None] * v_max, f"acc after tile {index}")
    assert_near(o, steps[-1].o, E * v_max, "o")


def check_lite(stage, asked):
    """acc after every tile, right or wrong, is the reference's: the same mistake."""
    (q, k, v), o, states, tile = states_of(stage, asked)
    bound = relative_rounding(q, k) * v.abs().max().item()  # a tile: its weights sum to 1
    steps = reference(q, k, v, tile)
    assert len(states) == len(steps)
    for index, (state, step) in enumerate(zip(states, steps, strict=True)):
        assert_near(state[..., 2:], step.lite, (index + 1) * bound, f"acc after tile {index}")
    assert_near(o, steps[-1].lite, len(steps) * bound, "o")


CHECKS = {4: check_lite, 5: check_online, 6: check_online}


def test_every_recorder_is_checked():
    assert CHECKS.keys() == RECORDERS.keys()


@pytest.mark.parametrize("inputs", ["normal", "peaky"])
@pytest.mark.parametrize("number", RECORDERS)
def test_the_states_are_the_references(number, inputs, tmp_path):
    stage = recorder(number, tmp_path)
    for shape in SHAPES:
        CHECKS[number](stage, problem(inputs, *shape, device_of(stage)))


# nq, nk, causal, seqlens_k: several blocks of queries and tiles of keys; rows that see nothing
MASKS = [
    (150, 150, True, None),
    (70, 200, True, None),
    (200, 70, True, None),
    (40, 150, False, (150, 65)),
    (130, 150, True, (64, 0)),
]


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["normal", "peaky"])
@pytest.mark.parametrize("number", [number for number in RECORDERS if number >= 6])
def test_the_states_under_masks_are_the_references(number, inputs, tmp_path):
    stage = recorder(number, tmp_path)
    for nq, nk, causal, seqlens_k in MASKS:
        check_online(stage, problem(inputs, nq, nk, 8, device_of(stage), causal, seqlens_k))


# mistakes that the output doesn't show: as long as nothing overflows, any number does for the max
MAX, P = "m_new = tl.maximum(m_i, tl.max(s, 1))", "p = tl.exp(s - m_new[:, None])"
SILENT = {
    "too large a max": (MAX, f"{MAX} + 1.0"),
    "the first tile's max": (MAX, "m_new = tl.where(m_i < -3e38, tl.max(s, 1), m_i)"),
    "twice l and acc": (P, P.replace("=", "= 2 *")),
}


@pytest.mark.parametrize("name", SILENT)
def test_a_wrong_state_is_found_where_the_output_is_right(name, tmp_path):
    stage = recorder(5, tmp_path, SILENT[name])
    asked = problem("normal", 5, 150, 16, device_of(stage))
    (q, k, v), o, _, tile = states_of(stage, asked)
    bound = relative_rounding(q, k) * v.abs().max().item()
    assert_near(o, reference(q, k, v, tile)[-1].o, bound, "o")
    with pytest.raises(AssertionError, match=r"(m_i|l_i) after tile \d is off"):
        check_online(stage, asked)


def test_a_state_that_was_not_recorded_is_detected(tmp_path):
    stage = recorder(5, tmp_path, ("l_i, mask=offs_m < Nq)", "l_i, mask=offs_m < Nq - 1)"))
    with pytest.raises(AssertionError, match="l_i after tile 0"):
        check_online(stage, problem("normal", 5, 150, 16, device_of(stage)))


def test_a_needless_tile_is_detected(tmp_path):
    last = "tl.minimum(start_m + BLOCK_M, Nq) + shift"
    stage = recorder(6, tmp_path, (last, f"{last} + BLOCK_N"))
    asked = problem("normal", 150, 150, 8, device_of(stage), causal=True)
    (q, k, v), o, _, tile = states_of(stage, asked)
    want = reference(q, k, v, tile, visible_keys(asked))[-1].o
    assert_near(
        o, want, relative_rounding(q, k) * v.abs().max().item(), "o"
    )  # but the output is right
    with pytest.raises(AssertionError, match="visits of tile"):
        check_online(stage, asked)


@pytest.mark.parametrize("number", RECORDERS)
def test_recording_changes_nothing(number, tmp_path):
    shipped = stages.by_number(number)
    q, k, v = make_inputs(problem("peaky", 7, 150, 16, device_of(shipped)))
    assert torch.equal(recorder(number, tmp_path).attend(q, k, v)[0], shipped.attend(q, k, v))


# ---- stage 8


class Seen:
    """In place of a kernel: launches it, and keeps the first two tensors that it was given."""

    def __init__(self, kernel):
        self.kernel, self.given = kernel, []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.given.append([x.clone() for x in args[:2]])
            return self.kernel[grid](*args, **options)

        return launch


def parts_of(stage, asked, splits):
    """q, k, v; o; acc_s (B, H, Nq, splits, d) and m_s, l_s (..., 2) as the merge was given them."""
    q, k, v = make_inputs(asked)
    config = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_D": 16, "num_warps": 4, "num_stages": 2}
    options = options_of(asked)
    masks = options.get("causal", False), options.get("seqlens_k")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "merge_kernel", seen := Seen(stage.merge_kernel))
        o = stage.forward(q, k, v, *masks, splits=splits, config=config)
    [(acc, stats)] = seen.given
    return (q, k, v), o.cpu().numpy(), acc.cpu().numpy(), stats.cpu().numpy()


def check_parts(stage, asked, splits):
    """Each part's m_s, l_s and acc_s are the reference's but for rounding, and so is the output."""
    (q, k, v), o, acc, stats = parts_of(stage, asked, splits)
    E, v_max = relative_rounding(q, k), v.abs().max().item()
    wide = [x.double().cpu().numpy() for x in (q, k, v)]
    for b, visible in enumerate(visible_keys(asked)[:, 0]):  # each entry divides its own length
        found = merge.split(
            *(x[b] for x in wide), 16, splits, np.broadcast_to(visible, q.shape[1:3])
        )
        for index, part in enumerate(found.parts):
            m_s, l_s = (stats[b, ..., index, at] for at in (0, 1))
            # not scaled; for a part in which a row sees no key, the kernel leaves the lowest number
            m_s = np.where(m_s < -3e38, -np.inf, m_s * asked.d**-0.5)
            assert_near(m_s, part.m_s, E / 2, f"m_s of part {index}")
            assert_near(l_s, part.l_s, E * part.l_s, f"l_s of part {index}")
            bound = E * part.l_s[..., None] * v_max
            assert_near(acc[b, ..., index, :], part.acc_s, bound, f"acc_s of part {index}")
        assert_near(o[b], found.o, E * v_max, "o")


# nq, nk, causal, seqlens_k; one head a group, so that a block's rows are those of one head
SPLIT = [
    (3, 150, False, None),
    (5, 90, True, None),
    (2, 100, False, (100, 20)),
    (4, 70, True, (0, 33)),
]


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("inputs", ["normal", "peaky"])
def test_the_parts_are_the_references(inputs, splits):
    stage = stages.by_number(8)
    for nq, nk, causal, seqlens_k in SPLIT:
        asked = problem(inputs, nq, nk, 16, device_of(stage), causal, seqlens_k)
        check_parts(stage, asked, splits)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        # the output stays right: what is written is right for another max, or another share
        ("tl.max(s, 1))  #", "tl.max(s, 1) + 1.0)  #", "m_s of part 0"),
        ("split * (tiles // splits) + tl", "(splits - 1 - split) * (tiles // splits) + 0 * tl", ""),
    ],
)
def test_a_wrong_part_is_found_where_the_output_is_right(tmp_path, old, new, what):
    stage = stages.load(write_changed(8, [(old, new)], tmp_path, "s08_other"))
    asked = problem("normal", 3, 128, 16, device_of(stage))  # eight tiles, in two parts
    (q, k, v), o, *_ = parts_of(stage, asked, 2)
    want = trace.attention(*(x.double().cpu().numpy() for x in (q, k, v)))
    assert_near(o, want, relative_rounding(q, k) * v.abs().max().item(), "o")
    with pytest.raises(AssertionError, match=what or "of part 0 is off"):
        check_parts(stage, asked, 2)
