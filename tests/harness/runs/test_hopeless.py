"""Problems that no machine can hold or check end at once, with a reason; all others are tried."""

import time
from dataclasses import replace

import pytest
from ladder_command import in_turn
from made_up import problem

from course import suites
from harness.isolation.roster import read_stages
from harness.problems.cost import checking_bytes
from harness.problems.problem import Problem
from harness.records import environment
from harness.records.jsonl import read
from harness.runs import plan
from harness.runs.plan import plan_tour, why_hopeless


@pytest.fixture
def machine(monkeypatch):
    """Set the machine's memory, in bytes, and its cores."""

    def be(memory, cores=2):
        monkeypatch.setattr(environment, "memory_bytes", lambda: memory)
        monkeypatch.setattr(environment, "cores", lambda: cores)

    return be


def test_the_bytes_of_a_check_are_its_tensors():
    shape = {"b": 2, "h": 6, "hk": 2, "nq": 5, "nk": 7, "d": 10}
    q = o = dO = dq = 2 * 6 * 5 * 10
    k = v = dk = dv = 2 * 2 * 7 * 10
    given, wide = q + k + v, 8 + 4
    assert checking_bytes(problem(**shape)) == 2 * 4 * given + wide * (given + o)
    trained = given + dO
    for direction, answers in (("bwd", dq + dk + dv), ("train", o + dq + dk + dv)):
        asked = problem(**shape, direction=direction)
        assert checking_bytes(asked) == 2 * 4 * trained + wide * (trained + answers)
    half = problem(**shape, dtype="float16")
    assert checking_bytes(half) == 2 * 2 * given + (8 + 2) * (given + o)
    for direction in ("fwd", "bwd"):  # on a GPU's machine they are only drawn, dO before the others
        assert checking_bytes(replace(half, device="cuda", direction=direction)) == 2 * 4 * given


def test_a_check_may_take_half_of_the_machines_memory(machine):
    asked = problem(nq=256, nk=256, d=64)
    machine(2 * checking_bytes(asked))
    assert why_hopeless(asked) is None
    machine(2 * checking_bytes(asked) - 1)
    status, reason = why_hopeless(asked)
    assert status == "out-of-memory"
    assert reason == (
        "can't be checked: that takes at least 1.12 MB, more than half of this machine's 2.25 MB"
    )
    machine(None)  # where nobody says how much there is, it is tried
    assert why_hopeless(asked) is None


def test_an_oracle_may_take_as_long_as_it_is_waited_for(machine, monkeypatch):
    asked = problem(nq=64, nk=64, d=64)
    monkeypatch.setattr(plan, "CORE_RATE", 4 * 64 * 64 * 64 / 1200)  # FLOP/s
    machine(1 << 40)
    assert why_hopeless(asked) is None
    machine(1 << 40, cores=1)
    assert why_hopeless(asked) == (
        "timeout",
        "can't be checked: the oracle would take at least 1200 s, more than its limit of 600 s",
    )
    assert why_hopeless(replace(asked, device="cuda")) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_harness_has_planned_itself_is_never_hopeless(machine, device):
    machine(8 << 30)
    base = problem(nq=1, nk=1, d=1, device=device)
    stages = read_stages()
    problems: set[Problem] = {cell.problem for cell in plan_tour(stages, base)}
    if device == "cuda":
        machine(32 << 30)
        for suite in suites.SUITES.values():
            problems.update(suite.problems(base))
    assert len(problems) > 10
    assert [why_hopeless(asked) for asked in problems] == [None] * len(problems)


def test_a_stage_is_told_before_it_is_called_that_it_is_beyond_its_limits(monkeypatch):
    three, online = (stage for stage in read_stages() if stage.number in (3, 6))
    online = replace(online, modes={"cpu": "interpreted", "cuda": "compiled"})
    asked, limits = problem(nq=64, nk=32, d=64), plan.Limits(budget=10.0, memory=64 * 32 * 4)
    assert plan.why_beyond(three, asked, limits) is None
    short = replace(limits, memory=64 * 32 * 4 - 1)
    status, reason = plan.why_beyond(three, asked, short)
    assert status == "out-of-memory" and "its 64 x 32 scores alone" in reason
    assert plan.why_beyond(online, asked, short) is None  # it keeps none
    assert plan.why_beyond(three, replace(asked, device="cuda"), short) is None
    monkeypatch.setattr(plan, "INTERPRETED_RATE", 4 * 64 * 32 * 64 / 20)
    status, reason = plan.why_beyond(online, asked, limits)
    assert status == "timeout" and reason.startswith("one call takes 20 s")
    assert plan.why_beyond(online, asked, plan.Limits(budget=20.0)) is None
    assert plan.why_beyond(three, asked, limits) is None


@pytest.mark.slow
def test_bench_and_run_say_the_same_of_what_is_beyond_them_and_start_nothing(tmp_path):
    for command in ("run", "bench"):
        sizes = ("--b", 1, "--h", 1, "--n", 100000, "--stages", 3, "--device", "cpu")
        masks = ("--causal", "off") if command == "bench" else ()
        in_turn(command, *sizes, *masks, "--out", tmp_path / f"{command}.jsonl")
        [record] = read(tmp_path / f"{command}.jsonl")[1]
        assert record["status"] == "out-of-memory" and record["first_call_ms"] is None
        assert "100000 x 100000 scores alone take 37.3 GB" in record["reason"]


@pytest.mark.parametrize(
    ("command", "sizes"),
    [("bench", "--b 1 --h 1 --n 200000000 --causal on --stages 3"),
     ("bench", "--b 999999999 --h 1 --n 16 --causal both --stages 3"),
     ("run", "--n 200000000 --stages 1,3")],
)  # fmt: skip
def test_absurd_sizes_end_at_once(tmp_path, command, sizes):
    out = tmp_path / "out.jsonl"
    begun = time.monotonic()
    done = in_turn(command, *sizes.split(), "--device", "cpu", "--budget", 5, "--out", out)
    assert time.monotonic() - begun < 60  # their inputs alone would take longer, where they fit
    assert "Traceback" not in done.stderr
    records = read(out)[1]
    assert records
    for record in records:
        assert record["status"] == "out-of-memory"
        assert record["reason"].startswith("can't be checked: ")
