"""`ladder train`: the judgement of curves, what a contestant's process does, the command."""

import math
import random
import subprocess
import textwrap
from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import make_train_text as tool
import pytest
import torch
from ladder_command import ROOT, in_turn, run_here

import stages
from attention_ladder.models import views
from attention_ladder.models.training import curves, loop, trainer
from attention_ladder.models.training import plan as train_plan
from attention_ladder.models.training.loop import Run, WrongOutput
from attention_ladder.models.training.plan import SHAPES, Plan, Trainee
from harness.isolation import roster, session
from harness.isolation.child import NO_MESSAGE
from harness.records import environment
from harness.records.code import built_in_files, first_file
from harness.records.jsonl import Writer, read
from harness.records.schema import BadRecord, check_record
from ladder import train
from stages.common.contract import why_not

STAGE_3 = stages.by_number(3).attend
MEMORY = 4 << 30
pytestmark = pytest.mark.usefixtures("one_thread")  # as a contestant's process has it


# Records, made up or trained here


def a_contestant(stage, name, path=None, backend=None, **more):
    declared = {"stage": stage, "name": name, "title": name}
    return Trainee(stage, name, "native", declared, path=path, backend=backend, **more)


def a_plan(steps, seeds=(0,), size="tiny", dtype="float32"):
    return Plan(size, steps, seeds, train_plan.make_problem(size, dtype, "cpu"))


def a_record(stage, name, losses, /, seed=0, reference=False, **changes):
    contestant = a_contestant(stage, name, backend="MATH" if reference else None)
    record = trainer.train_record(contestant, a_plan(len(losses)), seed)
    done = {"status": "ok", "losses": losses, "val_loss": 3.0, "parameters": 110_000}
    return record | done | {"tokens_per_s": 1230.0} | changes


def level(*windows):
    """Losses whose window averages are `windows`."""
    return [float(value) for value in windows for _ in range(curves.WINDOW)]


def four_backends(seeds=(0, 1, 2), at=(3.0, 2.0), differ=(0.001, 0.001)):
    """SDPA's backends: symmetric around `at`, so far apart as `differ` says, at each window."""
    return [
        a_record(
            100 + place, f"sdpa_{place}",
            level(*(x + d * share for x, d in zip(at, differ, strict=True))),
            seed, reference=True,
        )
        for seed in seeds
        for place, share in enumerate((-0.5, -0.1, 0.1, 0.5))
    ]  # fmt: skip


def beside(backends, *windows, seed=0, **changes):
    """The verdict on a stage that is as its backends, but in one seed has `windows`."""
    seeds = sorted({record["seed"] for record in backends})
    means = curves.means(backends)
    records = [
        a_record(7, "mine", level(*(windows if s == seed else means[s])), s, **changes)
        for s in seeds
    ]
    [verdict] = [v for v in curves.judge([*backends, *records]) if v.name == "mine"]
    return verdict


# The judgement


@pytest.mark.parametrize("steps", [1, 3, 24, 25, 26, 49, 50, 60, 500])
def test_windows_cover_each_step_once(steps):
    ends = curves.ends(steps)
    widths = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert ends[-1] == steps
    assert all(curves.WINDOW <= width < 2 * curves.WINDOW for width in widths) or len(widths) == 1
    losses = [random.Random(steps).random() for _ in range(steps)]
    averages = curves.averages(losses)
    total = sum(width * average for width, average in zip(widths, averages, strict=True))
    assert total == pytest.approx(sum(losses))


def test_the_spread_is_the_largest_over_seeds_and_the_windows_so_far():
    records = [
        *four_backends(seeds=(0,), at=(3, 2, 1), differ=(0.010, 0.040, 0.001)),
        *four_backends(seeds=(1,), at=(4, 3, 2), differ=(0.020, 0.005, 0.060)),
    ]
    assert curves.spread(records) == pytest.approx([0.020, 0.040, 0.060])
    quiet_end = four_backends(at=(3, 2, 1), differ=(0.030, 0.010, 0.001))
    assert curves.spread(quiet_end) == pytest.approx([0.030, 0.030, 0.030])


def test_twice_the_spread_is_allowed_and_a_little_more_is_not():
    backends = four_backends()
    assert beside(backends, 3.00199, 2.0).status == "ok"
    assert beside(backends, 3.0, 1.99801).status == "ok"
    for outside in (beside(backends, 3.00201, 2.0), beside(backends, 3.0, 1.99799)):
        assert outside.status == "outside"
        assert outside.failed
        assert outside.allowed == pytest.approx(0.002)
        assert outside.deviation == pytest.approx(0.00201)
    assert beside(backends, 3.00201, 2.0).step == curves.WINDOW
    assert beside(backends, 3.0, 1.99799, seed=2).step == 2 * curves.WINDOW


def test_a_stage_is_held_against_its_own_seed():
    # each seed's curve is elsewhere; another seed's mean would be off by 1
    backends = [r for s in range(3) for r in four_backends(seeds=(s,), at=(3 + s, 2 + s))]
    assert beside(backends, 4.0, 3.0, seed=1).status == "ok"
    assert beside(backends, 3.0, 2.0, seed=1).status == "outside"


def test_backends_that_agree_to_the_bit_leave_an_ulp_of_the_loss():
    backends = four_backends(at=(3.0, 3.0), differ=(0.0, 0.0))
    ulp = 3.0 * torch.finfo(torch.float32).eps
    assert beside(backends, 3.0 + 1.9 * ulp, 3.0).status == "ok"
    assert beside(backends, 3.0 + 2.1 * ulp, 3.0).status == "outside"


def test_too_few_backends_or_seeds_judge_nothing_and_tell_the_deviation():
    few = [r for r in four_backends() if r["stage"] in (100, 103)]
    for backends in (few, four_backends(seeds=(0, 1)), four_backends(seeds=(0,))):
        verdict = beside(backends, 3.5, 2.0)
        assert verdict.status == "not judged"
        assert not verdict.failed
        assert "3 seeds of 3 backends" in verdict.reason
        assert verdict.deviation == pytest.approx(0.5)
        assert verdict.allowed is None
        assert verdict.tokens_per_s is None  # unchecked
    [alone] = curves.judge([a_record(7, "mine", level(3.0))])
    assert (alone.status, alone.deviation) == ("not judged", None)


def test_a_backend_that_fell_out_costs_its_own_row_alone():
    backends = four_backends()
    for record in backends:
        if record["stage"] == 103:
            record |= {"status": "crashed", "reason": "killed by SIGSEGV"}
            record["losses"] = level(9.0, 9.0)  # of all steps, and yet no curve to go by
    assert beside(backends, 3.0, 2.0).status == "ok"
    assert beside(backends, 3.1, 2.0).status == "outside"
    [crashed] = [v for v in curves.judge(backends) if v.failed]
    assert (crashed.stage, crashed.status, crashed.final) == (103, "crashed", None)
    assert "SIGSEGV" in crashed.reason


@pytest.mark.parametrize("status", ["wrong", "crashed", "timeout", "out-of-memory", "skipped"])
def test_one_seed_that_failed_decides_over_a_contestant(status):
    records = four_backends()
    records += [a_record(7, "mine", level(3.0, 2.0), seed) for seed in (0, 1)]
    records += [a_record(7, "mine", level(3.0, 2.0), 2, status=status, reason="why", losses=[])]
    [verdict] = [v for v in curves.judge(records) if v.name == "mine"]
    assert verdict.status == status
    assert verdict.failed == (status != "skipped")
    assert verdict.reason == "seed 2: why"
    assert verdict.tokens_per_s is None


def honest_run(rng, backends, shift=0.0):
    """Curves of backends and a stage, 3 seeds, 20 windows: draws of one kind, those of neighbouring
    windows correlated; the stage's shifted by so many deviations."""
    records = []
    for seed in range(3):
        for stage in (*range(100, 100 + backends), 7):
            x, curve = rng.gauss(0, 1), []
            for _ in range(20):
                x = 0.8 * x + 0.6 * rng.gauss(0, 1)
                curve.append(3.0 + 1e-3 * (x + shift * (stage == 7)))
            records.append(a_record(stage, str(stage), curve, seed, reference=stage >= 100))
    return records


@pytest.mark.slow
def test_an_honest_stage_is_seldom_outside_and_a_shifted_one_always(monkeypatch):
    monkeypatch.setattr(curves, "WINDOW", 1)
    rng = random.Random(0)

    def count(times, backends, shift=0.0):
        runs = (curves.judge(honest_run(rng, backends, shift)) for _ in range(times))
        return Counter(verdicts[0].status for verdicts in runs)

    # the docstring's 1 of 300, and 1 of 65
    assert count(300, 4)["outside"] <= 4
    assert count(300, 3)["outside"] <= 15
    assert count(50, 4, shift=20)["outside"] == 50


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 3}, "steps: got"),
        ({"dtype": "float16"}, "dtype: got"),
        ({"losses": [1.0] * 51}, "51 losses of 50"),
        ({"losses": ["1.0"]}, "no finite number"),
        ({"losses": [math.inf]}, "no finite number"),
    ],
)
def test_records_that_make_no_training_are_refused(changes, says):
    records = four_backends()
    curves.check(records)
    records[-1] |= changes
    with pytest.raises(BadRecord, match=says):
        curves.check(records)


# Training


def a_run(attend, steps, size="tiny", dtype="float32"):
    return Run(attend, SHAPES[size], steps, dtype, "cpu")


def curve(run, seed):
    return [loss for losses in run.train(seed) for loss in losses]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses_bit_for_bit_and_another_gives_others():
    run = a_run(STAGE_3, 12)
    first = curve(run, 0)
    val_loss = run.val_loss
    other = curve(run, 1)
    assert curve(run, 0) == first
    assert run.val_loss == val_loss
    assert curve(a_run(STAGE_3, 12), 0) == first
    assert len(first) == 12
    assert not set(first) & set(other)


def test_contestants_of_one_seed_see_the_same_weights_and_batches():
    def blind(q, k, v, causal):
        return v * 1.0

    for seed in (0, 1):
        ours, theirs = a_run(STAGE_3, 5), a_run(blind, 5)
        for a, b in zip(
            ours.new_model(seed).parameters(), theirs.new_model(seed).parameters(), strict=True
        ):
            assert torch.equal(a, b)
        draws = [run.draw(run.text, 5, seed) for run in (ours, theirs)]
        assert torch.equal(*draws)
        assert not torch.equal(draws[0], ours.draw(ours.text, 5, seed + 1))


def test_nothing_held_out_is_trained_on():
    run = a_run(STAGE_3, 1)
    assert len(run.text) + len(run.held_out) == len(loop.TEXT.read_text(encoding="utf-8"))
    for text in (run.text, run.held_out):
        starts = run.draw(text, 2000, 0)
        assert starts.min() >= 0
        assert starts.max() + run.shape.block < len(text)  # the last target is still in the text


@pytest.mark.slow
def test_a_model_starts_from_ignorance_and_learns_more_than_how_often_a_character_comes():
    run = a_run(STAGE_3, 150)
    losses = curve(run, 0)
    assert losses[0] == pytest.approx(math.log(run.characters), rel=0.05)
    counts = torch.bincount(run.text).double()
    shares = counts[counts > 0] / counts.sum()
    entropy = -(shares * shares.log()).sum().item()
    assert curves.averages(losses)[-1] < entropy
    assert run.val_loss < entropy


def test_no_position_sees_what_comes_after_it_and_each_knows_where_it_is():
    run = a_run(STAGE_3, 1)
    model = run.new_model(0)
    ids, targets = run.text[None, :20], run.text[None, 1:21].clone()
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % run.characters
    assert model(ids, targets) != model(changed, targets)
    targets[0, -1] = -100  # cross_entropy's own mark for what doesn't count
    loss = model(ids, targets)
    assert loss == model(changed, targets)
    loss.backward()
    moved = model.positions.weight.grad.abs().sum(dim=1) > 0
    assert moved[:19].all() and not moved[20:].any()


def test_the_rate_rises_then_falls_and_stays_within_its_peak():
    for steps in (1, 2, 10, 300):
        rates = [loop.rate(step, steps) for step in range(steps)]
        peak = rates.index(1.0)
        assert rates == sorted(rates[: peak + 1]) + sorted(rates[peak + 1 :], reverse=True)
        assert max(rates) == 1.0 and min(rates) > 0
    assert rates[-1] == pytest.approx(loop.LAST_RATE)


class Scaled(torch.autograd.Function):
    """The identity; its gradient is `factor` times what it should be."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def in_float64(q, k, v, causal):
    return STAGE_3(q.double(), k.double(), v.double(), causal=causal).to(q.dtype)


def dk_without_scale(q, k, v, causal):
    return STAGE_3(q, Scaled.apply(k, k.shape[-1] ** 0.5), v, causal=causal)


def dq_a_tenth_off(q, k, v, causal):
    return STAGE_3(Scaled.apply(q, 1.1), k, v, causal=causal)


def without_dv(q, k, v, causal):
    return STAGE_3(q, k, v.detach(), causal=causal)


def without_delta(q, k, v, causal):
    """ds = p * dp: the backward pass forgets the softmax's own share."""
    s = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    e = torch.exp(s.masked_fill(hidden, -math.inf))
    return e / e.sum(-1, keepdim=True).detach() @ v


def mask_off_by_one(q, k, v, causal):
    ahead = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(2)
    s = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(ahead, -math.inf)
    return torch.softmax(s, -1) @ v


WRONG = (dk_without_scale, dq_a_tenth_off, without_dv, without_delta, mask_off_by_one)


@pytest.mark.slow
def test_a_right_stage_trains_as_sdpa_does_and_a_wrong_gradient_or_mask_falls_outside():
    flash, math_ = (loop.sdpa(name) for name in ("FLASH_ATTENTION", "MATH"))
    references = {"flash": flash, "math": math_, "in_float64": in_float64}
    right = references | {"stage_3": STAGE_3}
    asked = [(name, attend, seed) for name, attend in right.items() for seed in range(3)]
    # one seed is enough to be wrong in, but for the mistake that shows least
    asked += [(x.__name__, x, seed) for x in WRONG for seed in range(1 + 2 * (x is dq_a_tenth_off))]
    records = [
        a_record(100 * (name in references), name, curve(a_run(attend, 30), seed), seed,
                 reference=name in references)
        for name, attend, seed in asked
    ]  # fmt: skip
    found = {verdict.name: verdict for verdict in curves.judge(records)}
    assert found["stage_3"].status == "ok", found["stage_3"]
    for name in (attend.__name__ for attend in WRONG):
        assert found[name].status == "outside", name
        assert found[name].deviation > 3 * found[name].allowed, name


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_end_where_they_stop_being_numbers(bad):
    calls = []

    def attend(q, k, v, causal):
        calls.append(1)
        # two layers a step: the third step is bad
        return STAGE_3(q, k, v, causal=causal) * (bad if len(calls) > 4 else 1.0)

    losses = []
    with pytest.raises(WrongOutput, match="at step 3"):
        for some in a_run(attend, 40).train(0):  # four a message
            losses += some
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda o: o[:, :, :-1], "returned shape"),
        (lambda o: o.double(), "returned dtype float64, expected float32"),
        (lambda o: o.detach(), "carries no gradient"),
        (lambda o: None, "returned shape None"),
    ],
)
def test_an_output_that_no_model_can_train_with_is_wrong(spoil, says):
    attend = loop.checked(lambda q, k, v, causal: spoil(STAGE_3(q, k, v, causal=causal)))
    with pytest.raises(WrongOutput, match=says):
        curve(a_run(attend, 1), 0)


def test_a_backend_that_refuses_is_unavailable_and_one_that_takes_it_is_not():
    from stages.contract import StageUnavailable

    def refuses(q, k, v, causal):
        raise RuntimeError("No available kernel. Aborting execution.")

    with pytest.raises(StageUnavailable, match="No available kernel"):
        loop.refuse_early(a_run(refuses, 1))
    loop.refuse_early(a_run(loop.sdpa("MATH"), 1))


# Processes


STAGE_FILE = """
    import os
    import torch
    from stages import by_number
    from stages.contract import Stage, check_inputs
    STAGE = Stage(number={number}, name="{name}", title="{name}", idea="a test", options={options},
                  gradients={gradients})
    calls = []

    def attend(q, k, v, *, causal=False):
        calls.append(1)
        {body}
        return by_number(3).attend(q, k, v, causal=causal)
"""


def test_a_stage_without_a_mask_is_asked_row_by_row():
    q, k, v, dO = torch.randn(4, 2, 3, 7, 5, dtype=torch.float64).unbind()
    asked = []

    def maskless(q, k, v):
        asked.append((q.shape[2], k.shape[2]))
        return STAGE_3(q, k, v)

    answers = []
    for attend in (loop.row_by_row(maskless), STAGE_3):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = attend(*leaves, causal=True)
        answers.append((o.detach(), *torch.autograd.grad(o, leaves, dO)))
    for got, want in zip(*answers, strict=True):
        torch.testing.assert_close(got, want)
    assert asked == [(1, keys) for keys in range(1, 8)]


@pytest.mark.slow
def test_every_stage_with_gradients_can_be_trained_and_the_slow_ones_for_a_few_steps(capsys):
    problem = train_plan.make_problem("tiny", "float32", "cpu")
    infos = roster.describe_files(built_in_files())
    contestants = [train_plan.from_stage(stage, problem) for stage in infos]
    found = {one.stage: one for one in contestants if one.skip is None}
    here = [stage for stage in infos if stage.unavailable["cpu"] is None]
    assert sorted(found) == [stage.number for stage in here if stage.gradients]
    assert [number for number in sorted(found) if found[number].by_rows] == [0, 2]
    for number, said in ((0, "row by row"), (2, "row by row"), (7, "is interpreted")):
        assert train.default_steps([found[3], found[number]], "cpu") == 3
        assert said in capsys.readouterr().err
    assert train.default_steps([found[3]], "cpu") == 300
    assert capsys.readouterr().err == ""


def a_stage(folder, name, body="pass", number=90, options='("causal",)', gradients=True):
    path = folder / f"{name}.py"
    text = textwrap.dedent(STAGE_FILE)
    path.write_text(text.format(
        number=number, name=name, body=body, options=options, gradients=gradients
    ))  # fmt: skip
    return path


def train_all(folder, contestants, plan):
    """The records of a run, and what was told of it: (name, what) in order."""
    told = []
    env = environment.make_env(
        "cpu", plan.to_json(contestants), [x.declared for x in contestants], {}
    )
    with Writer.create(folder / "run.jsonl", env) as writer:
        records = trainer.run(
            contestants, plan, MEMORY, writer,
            lambda record: told.append((record["name"], len(record["losses"]))),
            lambda record, printed: told.append((record["name"], printed)),
        )  # fmt: skip
    assert read(folder / "run.jsonl", "train")[1] == records
    return records, told


@pytest.mark.slow
def test_each_contestant_fails_for_itself_and_a_good_one_gives_the_same_bits_elsewhere(tmp_path):
    bodies = {
        "dies": "os._exit(3) if len(calls) > 4 else print('here')",
        "turns_nan": "v = v * float('nan') if len(calls) > 2 else v",
    }
    contestants = [a_contestant(90, n, a_stage(tmp_path, n, body)) for n, body in bodies.items()]
    contestants += [
        a_contestant(91, "good", a_stage(tmp_path, "good")),
        a_contestant(92, "skipped", a_stage(tmp_path, "skipped"), skip="carries no gradients"),
        a_contestant(104, "sdpa_math", backend="MATH"),
        # torch's own names for it, and it has no kernel on a CPU
        a_contestant(102, "sdpa_efficient", backend="EFFICIENT_ATTENTION"),
    ]
    records, told = train_all(tmp_path, contestants, a_plan(6, seeds=(0, 1)))
    found = {}
    for record in records:
        found.setdefault(record["name"], []).append(record)
    statuses = {name: [record["status"] for record in some] for name, some in found.items()}
    assert statuses == {
        "dies": ["crashed"] * 2, "turns_nan": ["wrong"] * 2,
        "good": ["ok"] * 2, "skipped": ["skipped"] * 2, "sdpa_math": ["ok"] * 2,
        "sdpa_efficient": ["skipped"] * 2,
    }  # fmt: skip
    assert "exit code 3" in found["dies"][0]["reason"]
    assert "nan at step 2" in found["turns_nan"][0]["reason"]
    # what was known of a curve before it broke is kept
    assert [len(found[name][0]["losses"]) for name in ("dies", "turns_nan")] == [2, 1]
    assert found["turns_nan"][0]["losses"] == found["good"][0]["losses"][:1]
    for seed in (0, 1):
        assert found["good"][seed]["losses"] == curve(a_run(STAGE_3, 6), seed)
    assert ("dies", "here\n" * 4) in told
    assert ("good", 6) in told


@pytest.mark.slow
def test_stage_7_interpreted_takes_the_same_steps(tmp_path):
    path = first_file(7)
    stage = stages.load(path).STAGE
    if stage.mode("cpu") != "interpreted":
        pytest.skip("a GPU is there: Triton compiles")
    if reason := why_not(stage, "cpu"):
        pytest.skip(reason)
    declared = {"stage": 7, "name": stage.name, "title": stage.title}
    info = Trainee(7, stage.name, "interpreted", declared, path=path)
    [record], _ = train_all(tmp_path, [info], a_plan(2))
    assert (record["status"], record["reason"]) == ("ok", "")
    # three AdamW steps move weights by no more than 3 lr each: agreement is rounding's own
    assert record["losses"] == pytest.approx(curve(a_run(STAGE_3, 2), 0), rel=1e-5)


@pytest.fixture
def follow(tmp_path, monkeypatch):
    """The record of a training whose child says `messages`, one after the other; and what it is."""

    def run(*messages, steps=2, **declared):
        says = iter([{"event": "ready", "parameters": 5}, *messages])
        child = Mock(
            **{"receive.side_effect": says, "next_message.side_effect": says,
               "printed.return_value": ""}
        )  # fmt: skip
        monkeypatch.setattr(session, "Child", lambda *_: child)
        contestant = replace(a_contestant(90, "mine", tmp_path), **declared)
        with trainer.Training(contestant, a_plan(steps), MEMORY) as training:
            return training.train(0, lambda record: None), training

    return run


DONE = {"event": "done", "val_loss": 2.0, "unsaved": ""}


def losses(*values):
    return {"event": "losses", "losses": list(values)}


@pytest.mark.parametrize(
    "messages",
    [
        [losses(1.0), DONE],
        [losses(1.0, 2.0, 3.0)],  # and so on for ever: no end is waited for
        [losses(1.0, math.nan), DONE],
        [{"event": "losses"}, DONE],
        [losses(1.0, 2.0), {"event": "done"}],
        [losses(1.0, 2.0), DONE | {"val_loss": None}],
    ],
)
def test_figures_that_are_none_cost_the_contestant_that_sent_them(messages, follow):
    record, _ = follow(*messages)
    check_record(record)
    assert (record["status"], record["reason"]) == ("crashed", NO_MESSAGE)
    assert (record["losses"], record["val_loss"]) == ([], None)
    assert follow(losses(1.0), losses(2.0), DONE)[0]["status"] == "ok"


def test_only_what_is_not_interpreted_has_a_speed(follow):
    said = [losses(1.0)] * 2 * trainer.UNTIMED_STEPS
    for mode, timed in (("native", True), ("interpreted", False)):
        record, _ = follow(*said, DONE, steps=len(said), mode=mode)
        assert (record["tokens_per_s"] is not None) == timed, record


def test_a_model_that_can_not_be_written_costs_no_training(follow):
    messages = losses(1.0), losses(2.0), DONE | {"unsaved": "No space left on device"}
    record, training = follow(*messages)
    assert (record["status"], training.unsaved) == ("ok", "No space left on device")


@pytest.mark.slow
def test_a_clock_that_a_stage_has_changed_makes_no_speed(tmp_path):
    """Two layers, forward: a step takes 10 ms at least, whatever its process says."""
    body = "import time; time.sleep(0.005)"
    path = a_stage(tmp_path, "fast_clock", body)
    clock = "import time\nreal = time.perf_counter\ntime.perf_counter = lambda: real() / 1000\n"
    path.write_text(path.read_text() + clock)
    [record], _ = train_all(tmp_path, [a_contestant(90, "fast_clock", path)], a_plan(20))
    assert record["status"] == "ok", record["reason"]
    shape = SHAPES["tiny"]
    assert 0 < record["tokens_per_s"] < shape.batch * shape.block / 0.01


@pytest.mark.slow
def test_a_contestant_that_hangs_is_not_waited_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "STEP_LIMIT", 3.0)
    stage = a_contestant(90, "hangs", a_stage(tmp_path, "hangs", "import time; time.sleep(1000)"))
    records, _ = train_all(tmp_path, [stage], a_plan(2, seeds=(0, 1)))
    assert [record["status"] for record in records] == ["timeout", "skipped"]
    assert "seed 0 ended in a timeout" in records[1]["reason"]


# The command


def a_file(path, records):
    titles = {(r["stage"], r["name"]): r["name"] for r in records}
    infos = [{"stage": s, "name": n, "title": title} for (s, n), title in titles.items()]
    with Writer.create(path, environment.make_env("cpu", [], infos, {})) as writer:
        writer.append(*records)
    return path


@pytest.mark.slow
def test_the_command_trains_prints_and_plots(tmp_path, capsys):
    stages_ = ["--stage", 3, "--stage", 4, "--stage", a_stage(tmp_path, "mine")]
    stages_ += ["--stage", a_stage(tmp_path, "maskless", number=91, options="()")]
    out = tmp_path / "run.jsonl"
    done = in_turn("train", *stages_, "--device", "cpu", "--steps", 4, "--out", out)
    assert done.returncode == 0, done.stderr
    env, records = read(out, "train")
    found = {record["name"]: record for record in records}
    assert list(found) == [
        "sdpa_flash", "sdpa_math", "torch_three_gemm", "triton_lite", "mine", "maskless"
    ]  # fmt: skip
    assert [(plan["stage"], plan["seed"]) for plan in env["plan"]] == [
        (100, 0), (104, 0), (3, 0), (4, 0), (90, 0), (91, 0)
    ]  # fmt: skip
    torch.testing.assert_close(found["maskless"]["losses"], found["mine"]["losses"])
    assert found["triton_lite"]["status"] == "skipped"
    assert found["triton_lite"]["reason"] == "carries no gradients"
    trained = [found[name] for name in found if name != "triton_lite"]
    assert all(len(record["losses"]) == 4 for record in trained)
    assert found["torch_three_gemm"]["losses"] == found["mine"]["losses"] == curve(
        a_run(STAGE_3, 4), 0
    )  # fmt: skip
    assert out.with_name("run-plots").joinpath("loss.png").exists()
    assert run_here(capsys, "train", "--show", out)[:2] == (0, done.stdout)


# Views


@pytest.mark.slow
def test_show_gives_the_exit_code_and_the_plot_from_records_alone(tmp_path, capsys):
    backends = four_backends()
    good = [a_record(3, "good", level(3.001, 2.0), seed) for seed in range(3)]
    bad = [a_record(4, "bad", level(3.1, 2.0), seed) for seed in range(3)]
    bad += [a_record(5, "slow", level(3.0, 2.0), seed, mode="interpreted", tokens_per_s=None)
            for seed in range(3)]  # fmt: skip
    for name, records, code in (("good", good, 0), ("both", [*good, *bad], 1)):
        file = a_file(tmp_path / f"{name}.jsonl", [*records, *backends])
        found, printed, _ = run_here(capsys, "train", "--show", file)
        assert found == code
        assert (tmp_path / f"{name}-plots" / "loss.png").read_bytes().startswith(b"\x89PNG")
    rows = {line.split()[1]: line.split() for line in printed.splitlines() if " 3.0000 " in line}
    assert rows["good"][-2:] == ["1230", "ok"]  # a speed only where the losses are right
    assert rows["bad"][-2:] == ["-", "outside"] and rows["slow"][-2:] == ["-", "ok"]


def test_nothing_is_drawn_of_nothing(tmp_path):
    records = [a_record(3, "fell", [1.0], status="crashed", reason="why", losses=[])]
    assert not views.plot({"rungs": []}, records, tmp_path / "loss.png")
    assert list(tmp_path.iterdir()) == []


# The text


def test_the_text_is_what_its_tool_makes_of_its_commit(tmp_path):
    known = ["git", "-C", str(ROOT), "cat-file", "-e", f"{tool.COMMIT}^{{commit}}"]
    try:
        if subprocess.run(known, capture_output=True).returncode:
            pytest.skip("this clone doesn't have the commit")
    except FileNotFoundError:
        pytest.skip("no git here")
    out = tmp_path / "text"
    assert tool.main(["--out", str(out)]) == 0
    assert out.read_bytes() == loop.TEXT.read_bytes() == tool.OUT.read_bytes()
