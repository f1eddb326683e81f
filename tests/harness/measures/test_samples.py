"""How samples are planned: by the parent, the same for all that take part."""

import pytest

from harness.isolation.measured_stage import serve
from harness.isolation.messages import (
    Asked,
    Checked,
    Finish,
    Finished,
    Keep,
    Order,
    Start,
    Turn,
)
from harness.isolation.roster import describe_files
from harness.isolation.session import Session
from harness.measures.samples import (
    HEAD_START,
    LEAST_ROUNDS,
    LONGEST_HEAD_START,
    ONE_CALL,
    SAMPLE_MS,
    WARM_MS,
    Plan,
    Sampled,
    Series,
    rounds_in,
    turns,
)
from harness.problems.problem import Problem

PROBLEM = Problem(
    inputs="normal", seed=1, b=1, h=1, hk=1, nq=4, nk=4, d=4, dtype="float32", precision="ieee",
    causal=False, seqlens_k=None, device="cpu",
)  # fmt: skip
STAGE = """
import time
from pathlib import Path
import stages
from stages.contract import Stage
STAGE = Stage(number=90, name="counts", title="counts", idea="a fake", gradients=True)
LOG = Path(__file__).with_suffix(".calls")


def attend(q, k, v):
    with LOG.open("a") as log:
        log.write("x")
    time.sleep({seconds} * (0.5 + LOG.stat().st_size % 3))
    return stages.by_number(3).attend(q, k, v)
"""
PLANS = [ONE_CALL, Plan(calls=12), *[Plan(untimed=3, calls=2)] * 3]


def calls_made(folder, seconds):
    """How often a stage is called that takes about `seconds`, by a process that is told PLANS."""
    path = folder / f"s{seconds}.py"
    path.write_text(STAGE.format(seconds=seconds))
    [stage] = describe_files([path])
    asked = Asked(str(path), stage.sha256, PROBLEM, str(folder / f"out{seconds}"))
    order = Order(PROBLEM, [asked], alone=True, strided=True, graph=False, memory=1 << 30)
    asked = [
        (Start(), Checked), *((Turn(**vars(plan)), Sampled) for plan in PLANS),
        (Finish(0, clock_calls=3, launches=4, rows=2), Finished),
    ]  # fmt: skip
    with Session(serve, order) as session:
        for index, (message, answer) in enumerate(asked):
            session.ask(message, answer, seconds=60.0, late="late")
            if index == 0:
                session.send(Keep([0]))
    return path.with_suffix(".calls").stat().st_size


@pytest.mark.slow
def test_two_processes_that_are_told_the_same_call_as_often(tmp_path):
    """Whatever their speed: two that compute in step would wait for each other for ever."""
    fast, slow = (calls_made(tmp_path, seconds) for seconds in (0.0, 0.004))
    assert fast == slow > 0


def series_of(call_ms, alone, device="cpu"):
    """A series whose plan is fixed, of calls that take so long, and the plans that it asked for."""
    asked = []

    def take(plan):
        asked.append(plan)
        return Sampled(call_ms)

    series = Series(take, device)
    series.fix(alone)
    return series, asked


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("call_ms", [0.001, 0.3, 2.0, 9.0, 11.0, 5000.0])
def test_a_sample_is_long_enough_and_warm_where_others_ran(call_ms, alone):
    series, asked = series_of(call_ms, alone)
    plan = series.plan
    assert len(asked) == (2 if call_ms < WARM_MS else 1)
    assert plan.calls >= 1 and (plan.calls == 1 or plan.calls * call_ms >= 0.7 * SAMPLE_MS)
    assert plan.untimed * call_ms <= WARM_MS and (plan.untimed > 0) == (
        not alone and call_ms <= WARM_MS
    )
    for _ in range(3):
        series.sample()
    assert asked[-3:] == [plan] * 3 and series.samples_ms == [call_ms] * 3


def test_a_late_sample_is_taken_again_with_twice_the_head_start_up_to_the_longest():
    for enough in (HEAD_START, 4 * HEAD_START, 1000 * HEAD_START):
        asked = []

        def take(plan, enough=enough, asked=asked):
            asked.append(plan.head_start)
            return Sampled(0.02, late=plan.head_start < enough)

        series = Series(take, "cuda")
        for _ in range(2):
            series.sample()
        assert len(series.samples_ms) == 2
        assert asked[-1] == min(enough, LONGEST_HEAD_START) and len(asked) <= 6


def test_each_has_one_sample_in_each_round_and_none_always_follows_the_same():
    order = [*turns(3, 4)]
    assert [sorted(order[i : i + 3]) for i in range(0, 12, 3)] == [[0, 1, 2]] * 4
    assert {order[i] for i in range(0, 12, 3)} == {0, 1, 2}
    assert rounds_in(1.0, 0.01) == 100 and rounds_in(0.0, 1.0) == LEAST_ROUNDS
