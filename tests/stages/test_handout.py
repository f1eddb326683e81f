"""What `make test` means in a course's copy of the checkout, and part of what it means in ours.

The stages that are here are exact and keep the contract, and a stub is told from a solution.
Nothing here gives a stage away: `ladder lab export` takes this file along.
"""

import pytest
import torch
from stage_checks import (
    assert_close,
    attend,
    bearable,
    every_stage,
    for_each,
    gradient_rounding,
    gradients,
    most_keys,
    normal,
    rounding,
    stage_id,
    true_gradients,
    truth,
)

import stages
from course.lab import checks, labs
from harness.records.code import built_in_files
from harness.records.environment import ROOT
from stages.common.contract import why_not

ALL = [stages.load(path) for path in built_in_files()]
SHAPES = [(2, 2, 5, 7, 8), (1, 3, 33, 70, 16), (1, 1, 1, 1, 1)]  # b, h, nq, nk, d
WRONG = {
    "k of another d": ((1, 1, 2, 4), (1, 1, 3, 5), (1, 1, 3, 4), "k: got .* expected q's 4"),
    "v of another Nk": ((1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 2, 4), "v: got .* expected k's 3"),
    "q of rank 3": ((1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4), "q: got 3 dimensions"),
}


def problem(stage, shape):
    """q, k, v and dO of a shape, where the stage runs here and is exact; skips where it isn't."""
    reasons = {device: why_not(stage.STAGE, device) for device in ("cpu", "cuda")}
    device = next((x for x, reason in reasons.items() if reason is None), None)
    if device is None:  # no compiler, or no Triton: the tour's row says so, too
        pytest.skip(reasons[stage.STAGE.devices[0]] or "")
    b, h, nq, nk, d = shape
    shape = b, h, nq, most_keys(stage, nk), d
    if not bearable(stage, device, shape):
        shape = (1, 1, *shape[2:])
    return normal(shape, seed=1, device=device)


@every_stage
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_stage_is_exact(stage, shape):
    q, k, v, _ = problem(stage, shape)
    assert_close(attend(stage, q, k, v), truth(q, k, v), rounding(q, k, v))


@for_each([stage for stage in ALL if stage.STAGE.gradients])
def test_a_stages_gradients_are_exact(stage):
    q, k, v, dO = problem(stage, SHAPES[0])
    _, *want = true_gradients(q, k, v, dO)
    bounds = gradient_rounding(q, k, v, dO)
    for name, got, true, bound in zip("qkv", gradients(stage, q, k, v, dO)[1:], want, bounds):
        assert_close(got, true, bound, f"d{name}")


def test_a_small_mistake_is_out_of_bounds():
    """The bounds above are narrow enough to find one: a forgotten max of the scores aside."""
    q, k, v, _ = normal(SHAPES[0], seed=1)
    with pytest.raises(AssertionError, match="an honest one by"):
        assert_close(truth(1.001 * q, k, v), truth(q, k, v), rounding(q, k, v))


@every_stage
@pytest.mark.parametrize("case", WRONG)
def test_a_stage_says_what_is_wrong_with_its_input(stage, case):
    q, k, v, said = WRONG[case]
    with pytest.raises(ValueError, match=said):
        stage.attend(*(torch.zeros(shape) for shape in (q, k, v)))


def with_stubs():
    """The stages for which `ladder lab start` has a stub here."""
    kept = {int(path.name[0]) for path in (ROOT / "stubs").glob("[0-9]-small")}
    whole = {stage for stage in labs.about() if labs.source(stage).is_file()}
    return sorted(kept | whole)


@pytest.mark.parametrize("stage", with_stubs())
@pytest.mark.parametrize("size", ["small", "large"])
def test_an_untouched_stub_is_found_not_written(stage, size, tmp_path):
    to = tmp_path / ("mine" if stage == 2 else "mine.py")
    labs.start(stage, to, size, twin=False)
    assert checks.check(to).verdict == "not-written"
    assert list(labs.hints(stage, 1)) and list(labs.hints(stage, 2))


def test_each_file_of_stages_is_a_stage():
    assert [stage.STAGE.number for stage in ALL] == [int(stage_id(stage)[1:3]) for stage in ALL]
