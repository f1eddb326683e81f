"""The Triton rungs hold, after each tile, what the NumPy reference holds (harness/trace.py).

A recorder is the shipped file with a few lines put in by text substitution, each found exactly
once, as in test_mutants.py: the kernel then writes m_i, l_i and acc of each row after each tile
into `states`, (B * H, tiles, Nq, 2 + d) float32, which `attend` returns beside o, with BLOCK_N. A
place that no program wrote is NaN. A recorder writes m_i in natural units: a rung that keeps it in
others (log2) turns it back in the line that it puts in.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rung_checks import device_of, relative_rounding
from test_mutants import mutate

import stages
from harness import trace
from harness.inputs import make_inputs
from harness.problem import Problem

ALLOCATE = """\
    shape = (B * H, triton.cdiv(Nk, config["BLOCK_N"]), Nq, 2 + d)
    states = torch.full(shape, float("nan"), dtype=torch.float32, device=q.device)
    grid = ("""
STORE = """\
        tile = tl.program_id(1) * tl.cdiv(Nk, BLOCK_N) + start_n // BLOCK_N
        state_ptrs = states_ptr + (tile * Nq + offs_m) * (2 + d)
        tl.store(state_ptrs, {m_i}, mask=offs_m < Nq)
        tl.store(state_ptrs + 1, {l_i}, mask=offs_m < Nq)
        tl.store(state_ptrs[:, None] + 2 + offs_d[None, :], acc, mask=q_mask)
"""
RECORD = (
    ("H, Nq, Nk, d, scale,\n", "H, Nq, Nk, d, scale, states_ptr,\n"),
    ("d**-0.5, PRECISION", "d**-0.5, states, PRECISION"),
    ("    grid = (", ALLOCATE),
    ("    return o\n", '    return o, states, config["BLOCK_N"]\n'),
)
LAST = "        v_ptrs += BLOCK_N * stride_vn\n"  # of what a tile does
RECORDERS = {
    # Lite knows only acc from one tile to the next
    4: (*RECORD, (LAST, LAST + STORE.format(m_i="tl.max(s, 1)", l_i="tl.sum(p, 1)"))),
    5: (*RECORD, (LAST, LAST + STORE.format(m_i="m_i", l_i="l_i"))),
}

# nq, nk, d: one tile, a lone key in the last one, whole ones, a ragged one
SHAPES = [(3, 1, 16), (5, 64, 16), (4, 65, 8), (33, 192, 16), (7, 150, 40)]


def recorder(number, folder, *more):
    """The recorder of a rung, changed by the pairs of `more`, too, and imported."""
    shipped = Path(stages.by_number(number).__file__).read_text(encoding="utf-8")
    path = folder / f"records_{number}_{len(more)}.py"
    path.write_text(mutate(mutate(shipped, RECORDERS[number]), more), encoding="utf-8")
    return stages.load(path)


def problem(inputs, nq, nk, d, device, b=2, h=2):
    return Problem(inputs, 7, b, h, h, nq, nk, d, "float32", "ieee", False, None, device)


def states_of(rung, inputs, nq, nk, d, device):
    """The tensors, what `rung` gives for them, its states by head and tile, and its tile."""
    q, k, v = make_inputs(problem(inputs, nq, nk, d, device))
    o, states, tile = rung.attend(q, k, v)
    return (q, k, v), o.cpu(), states.unflatten(0, q.shape[:2]).movedim(2, 0).cpu().numpy(), tile


def reference(q, k, v, tile):
    """The states of the reference, in float64."""
    return trace.walk(*(x.double().cpu().numpy() for x in (q, k, v)), tile)


def assert_near(got, want, bound, what):
    error = np.abs(got - want)  # a NaN, where nothing was recorded, is no <=
    assert (error <= bound).all(), f"{what} is off by {error.max():.2e}, an honest one less"


def check_online(rung, inputs, nq, nk, d, device):
    """m_i, l_i, acc after every tile, and the output, are the reference's but for rounding.

    relative_rounding bounds what float32 may do to a score, absolutely, by E / 2, and to a
    probability, of itself, by E. The max of scores is off by what scores are; l_i is a sum of
    exp(s - m_i), each off by E of itself, and acc a sum of those times v.
    """
    (q, k, v), o, states, tile = states_of(rung, inputs, nq, nk, d, device)
    E = relative_rounding(q, k)
    steps = reference(q, k, v, tile)
    assert len(states) == len(steps) == math.ceil(nk / tile)
    v_max = v.abs().max().item()
    for index, (state, step) in enumerate(zip(states, steps, strict=True)):
        assert_near(state[..., 0], step.m_i, E / 2, f"m_i after tile {index}")
        assert_near(state[..., 1], step.l_i, E * step.l_i, f"l_i after tile {index}")
        bound = E * step.l_i[..., None] * v_max
        assert_near(state[..., 2:], step.acc, bound, f"acc after tile {index}")
    assert_near(o.numpy(), steps[-1].o, E * v_max, "o")


def check_lite(rung, inputs, nq, nk, d, device):
    """acc after every tile, right or wrong, is the reference's: the same mistake."""
    (q, k, v), o, states, tile = states_of(rung, inputs, nq, nk, d, device)
    E = relative_rounding(q, k)
    steps = reference(q, k, v, tile)
    assert len(states) == len(steps)
    for index, (state, step) in enumerate(zip(states, steps, strict=True)):
        bound = E * (index + 1) * v.abs().max().item()  # the weights sum to 1 in each tile
        assert_near(state[..., 2:], step.lite, bound, f"acc after tile {index}")
    assert_near(o.numpy(), steps[-1].lite, E * len(steps) * v.abs().max().item(), "o")


CHECKS = {4: check_lite, 5: check_online}


def test_every_recorder_is_checked():
    assert CHECKS.keys() == RECORDERS.keys()


@pytest.mark.parametrize("inputs", ["normal", "peaky"])
@pytest.mark.parametrize("number", RECORDERS)
def test_the_states_are_the_references(number, inputs, tmp_path):
    rung = recorder(number, tmp_path)
    for shape in SHAPES:
        CHECKS[number](rung, inputs, *shape, device_of(stages.by_number(number)))


# mistakes that the output doesn't show: as long as nothing overflows, any number does for the max
MAX, P = "m_new = tl.maximum(m_i, tl.max(s, 1))", "p = tl.exp(s - m_new[:, None])"
SILENT = {
    "too large a max": (MAX, f"{MAX} + 1.0"),
    "the first tile's max": (MAX, 'm_new = tl.where(m_i == float("-inf"), tl.max(s, 1), m_i)'),
    "twice l and acc": (P, P.replace("=", "= 2 *")),
}


@pytest.mark.parametrize("name", SILENT)
def test_a_wrong_state_is_found_where_the_output_is_right(name, tmp_path):
    rung = recorder(5, tmp_path, SILENT[name])
    arguments = (rung, "normal", 5, 150, 16, device_of(stages.by_number(5)))
    (q, k, v), o, _, tile = states_of(*arguments)
    bound = relative_rounding(q, k) * v.abs().max().item()
    assert_near(o.numpy(), reference(q, k, v, tile)[-1].o, bound, "o")
    with pytest.raises(AssertionError, match=r"(m_i|l_i) after tile \d is off by"):
        check_online(*arguments)


def test_what_was_not_recorded_is_found(tmp_path):
    rung = recorder(5, tmp_path, ("l_i, mask=offs_m < Nq)", "l_i, mask=offs_m < Nq - 1)"))
    with pytest.raises(AssertionError, match="l_i after tile 0"):
        check_online(rung, "normal", 5, 150, 16, device_of(stages.by_number(5)))


def test_recording_changes_nothing(tmp_path):
    for number in RECORDERS:
        shipped = stages.by_number(number)
        q, k, v = make_inputs(problem("peaky", 7, 150, 16, device_of(shipped)))
        assert torch.equal(recorder(number, tmp_path).attend(q, k, v)[0], shipped.attend(q, k, v))
