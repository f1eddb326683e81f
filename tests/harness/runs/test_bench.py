"""`ladder bench`: who is timed, against whom, and what becomes of stages that misbehave."""

import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import held
import pytest
import torch
from ladder_command import FAKES, in_turn
from made_up import make_stage_info, problem
from marks import quickly

from course.suites import SUITES
from course.suites import names as suite_names
from harness.isolation.judge import Judge, NoVerdict
from harness.isolation.messages import Out
from harness.isolation.roster import StageInfo, describe_files, read_stages
from harness.measures.samples import Series
from harness.problems import cost
from harness.records import jsonl
from harness.records.code import PEERS, built_in_files
from harness.runs import plan, process
from harness.runs.plan import (
    Cell,
    Limits,
    Sizes,
    make_problems,
    plan_comparisons,
    plan_tour,
    usual_stages,
)

PROBLEM = problem(b=2, h=2, hk=2, nq=32, nk=32, d=16)
LIMITS = Limits(budget=30.0, memory=1 << 30, warmup=2, rounds=6)
STAGE3, TRITON = (
    next(path for path in built_in_files() if path.name.startswith(name))
    for name in ("s03_", "s05_")
)

HEAD = """
import ctypes, time
from pathlib import Path
import stages
from stages.contract import Stage, StageUnavailable
STAGE = Stage(number={number}, name={name!r}, title={name!r}, idea="a fake", gradients={gradients},
              options=("causal",))
stage3 = stages.by_number(3).attend
LOG = Path(__file__).with_suffix(".calls")


def attend(q, k, v, **options):
    with LOG.open("a") as log:
        log.write("x")
    calls = LOG.stat().st_size
"""
# body of attend; `calls` counts them over all processes, this one included
RIGHT = "return stage3(q, k, v, **options)"


@pytest.fixture
def make_stage(tmp_path):
    """Write a fake stage: its name, the body of its attend, its number; more lines at the end."""

    def make(name, body=RIGHT, number=90, more="", gradients=True):
        path = tmp_path / f"{name}.py"
        head = HEAD.format(number=number, name=name, gradients=gradients)
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        path.write_text(f"{head}{lines}\n\n\n{more}\n")
        return path

    return make


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """The fakes here are taken for stages of the ladder, which share a process."""
    monkeypatch.setattr(StageInfo, "ours", True)


def written(folder, *names):
    """The files of stages of fakes.toml."""
    return [Path(FAKES.write(folder, name)) for name in names]


def calls_of(path):
    """How often a fake of `make_stage` was called."""
    return path.with_suffix(".calls").stat().st_size


def hold(*paths, problem=PROBLEM, limits=LIMITS, **more):
    """name -> record of a comparison between the stages in `paths`."""
    records = held.hold(*paths, problem=problem, limits=limits, **more)
    return {name: record for (name, _), record in records.items()}


def found(records):
    return {name: record["status"] for name, record in records.items()}


@pytest.mark.slow
def test_ratios_are_of_the_medians_of_one_process(make_stage):
    process = "import os\nprint('process', os.getpid(), flush=True)\n"
    own = make_stage("own", process + RIGHT)
    peers = [make_stage("quick", process + RIGHT, 110),
             make_stage("slow", f"{process}time.sleep(0.004)\n{RIGHT}", 111)]  # fmt: skip
    printed = []
    records = hold(STAGE3, own, *peers, printed=printed)
    assert set(found(records).values()) == {"ok"}
    times = {name: record["time_ms"] for name, record in records.items()}
    assert times["slow"] >= 4
    for name, record in records.items():
        assert record["flops"] == 4 * 2 * 2 * 32 * 32 * 16
        assert record["paired"] and record["time_ms"] == times[name]
        assert record["first_call_ms"] > 0 and 0 < record["err_f64_max"] < 1e-5
        # one process holds all: its resident set is nobody's
        assert record["peak_bytes"] is record["memory_meter"] is record["skip_ratio"] is None
    assert len({line for line in "".join(printed).splitlines() if "process" in line}) == 1


# what a tuned stage does, without a kernel: its launch is its choice's alone
TUNES = """
from types import SimpleNamespace
from stages.common import tuner
candidates = [{{"BLOCK_M": {m}, "num_warps": 4}}]
tuner.choose(SimpleNamespace(__name__="{kernel}"), candidates, None, q, ("ieee", 16), (32, 32))
"""


@pytest.mark.parametrize("direction", quickly(1, ["fwd", "train"]))
def test_a_record_holds_its_rounds_and_its_own_launch_configurations(make_stage, direction):
    """In turns, and of a stage alone."""
    names = {"ours": 32, "other": 64}
    stages = [make_stage(name, TUNES.format(kernel=name, m=m) + RIGHT) for name, m in names.items()]
    asked = replace(PROBLEM, direction=direction)
    records = hold(stages[0], STAGE3, stages[1], problem=asked)
    for record in records.values():
        assert len(record["rounds_ms"]) == record["samples"] == 6
        assert statistics.median(record["rounds_ms"]) == pytest.approx(record["time_ms"], rel=1e-5)
    assert records.pop("torch_three_gemm")["launch_configs"] is None
    for name, record in (*records.items(), *hold(stages[0], problem=asked).items()):
        own = {"BLOCK_M": names[name], "num_warps": 4}
        assert record["launch_configs"] == {name: own}


# name -> body, status, what the reason says, how often it is called; None: of no matter
FAIL_ALONE = {
    # called once, for its check
    "off": ("return 1.001 * stage3(q, k, v)", "wrong", "max error", 1),
    "nan": ("o = stage3(q, k, v)\no[0, 0, 0, 0] = float('nan')\nreturn o", "wrong", "NaN", 1),
    "short": ("return stage3(q, k, v)[..., :-1]", "wrong", "shape", 1),
    "writer": ("q.data += 1\nreturn stage3(q - 1, k, v)", "wrong", "changed its input q", 1),
    "resizer": (
        "o = stage3(q, k, v)\nv.resize_(1)\nreturn o", "wrong", "changed its input v", 1
    ),
    # a peer's ValueError says that it doesn't take the problem; ours were asked what they do
    "ours": ("raise ValueError('no such shape')", "crashed", "no such shape", 1),
    "absent": ("raise StageUnavailable('not on this machine')", "skipped", "this machine", 1),
    # after its warm-up: the rounds go on without it
    "faint": (f"if calls > 5:\n    raise MemoryError()\n{RIGHT}", "out-of-memory", "Memory", 6),
    "late": (f"if calls > 5:\n    raise RuntimeError('late')\n{RIGHT}", "crashed", "late", 6),
    # a buffer that is used again, answers kept by address
    "buffer": (
        "out = attend.__dict__.setdefault('out', q.clone())\nreturn out.copy_(stage3(q, k, v))",
        "wrong", "an output changed after it was returned", None,
    ),
    "keeps": (
        "kept = attend.__dict__\nif (v.data_ptr(), q.shape) not in kept:\n"
        "    kept[v.data_ptr(), q.shape] = v.clone()\n"
        "return stage3(q, k, kept[v.data_ptr(), q.shape])",
        "wrong", "after v changed", None,
    ),
}  # fmt: skip


def test_stages_that_fail_in_any_way_fail_alone_and_are_never_timed(make_stage):
    """The others are as if they had not been there, and have as many rounds as they were asked."""
    paths = [make_stage(name, body) for name, (body, *_) in FAIL_ALONE.items()]
    peer = make_stage("peer", "raise ValueError('no such shape')", 110)
    right = make_stage("right")
    records = hold(*paths, peer, right, STAGE3)
    assert found(records) == {
        "right": "ok", "torch_three_gemm": "ok", "peer": "skipped",
        **{name: status for name, (_, status, _, _) in FAIL_ALONE.items()},
    }  # fmt: skip
    for path, (name, (_, _, why, calls)) in zip(paths, FAIL_ALONE.items(), strict=True):
        assert why in records[name]["reason"]
        assert calls is None or calls_of(path) == calls, name
    assert records["off"]["err_f64_max"] > 1e-4  # how wrong it was is kept
    assert calls_of(right) > 1 + LIMITS.warmup + LIMITS.rounds


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["bwd", "train"])
def test_a_stage_that_writes_its_input_harms_nobody(make_stage, direction):
    """Calls that were prepared before it read where it wrote: the inputs are themselves again."""
    writer = make_stage("writer", "o = stage3(q, k, v)\nv.data.mul_(3)\nreturn o")
    problem = replace(PROBLEM, direction=direction)
    records = hold(STAGE3, writer, make_stage("right"), problem=problem)
    assert found(records) == {"torch_three_gemm": "ok", "writer": "wrong", "right": "ok"}


@pytest.mark.parametrize("call", [1, 6])
def test_a_stage_that_ends_its_process_fails_alone(make_stage, call):
    """At its first call, and in the middle of the rounds."""
    deadly = make_stage("deadly", f"if calls >= {call}:\n    ctypes.string_at(0)\n{RIGHT}")
    quick = make_stage("quick", number=110)
    records = hold(STAGE3, deadly, quick)
    assert found(records) == {"torch_three_gemm": "ok", "deadly": "crashed", "quick": "ok"}
    assert records["deadly"]["reason"] == "killed by SIGSEGV"
    assert len(records["torch_three_gemm"]["rounds_ms"]) == LIMITS.rounds


def test_two_that_can_not_be_together_are_both_out(make_stage):
    """Each is sound alone; nothing was measured of all together, so nothing is claimed."""
    body = f"import os\nos.environ['IN_HERE'] = os.environ.get('IN_HERE', '') + {{!r}}\n\
if {{!r}} in os.environ['IN_HERE']:\n    ctypes.string_at(0)\n{RIGHT}"
    cain = make_stage("cain", body.format("c", "a"))
    abel = make_stage("abel", body.format("a", "c"))
    records = hold(cain, abel)
    assert found(records) == {"cain": "crashed", "abel": "crashed"}
    assert "sound alone, but of all in one process: killed by SIGSEGV" in records["cain"]["reason"]


@pytest.mark.slow
def test_a_stage_that_hangs_fails_alone(tmp_path):
    hangs = written(tmp_path, "hangs")[0]
    records = hold(hangs, STAGE3, limits=replace(LIMITS, budget=8.0))
    assert found(records) == {"hangs": "timeout", "torch_three_gemm": "ok"}
    assert "budget of 8 s" in records["hangs"]["reason"]


def test_a_stage_too_slow_for_the_rounds_is_named_beforehand(make_stage):
    slow = make_stage("slow", f"time.sleep(0.5)\n{RIGHT}")
    limits = replace(LIMITS, rounds=100, budget=40.0)
    records = hold(slow, STAGE3, limits=limits)
    assert found(records) == {"slow": "timeout", "torch_three_gemm": "ok"}
    assert "102 calls do not fit in its budget of 40 s" in records["slow"]["reason"]
    assert calls_of(slow) == 2  # its check, and one warm-up call


# what the stages that follow must not find
MEDDLES = f"""import torch
torch.set_num_threads(3)
torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)
{RIGHT}"""
LOOKS = f"""import torch
found = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
if calls <= 2:  # its check, and its first call to warm up
    assert found == (1, True, torch.float32), found
{RIGHT}"""


def test_no_stage_is_told_of_what_another_did(make_stage):
    """Neither that it was interpreted, nor by what it sets in their process."""
    meddles, looks = make_stage("meddles", MEDDLES), make_stage("looks", LOOKS)
    peer = PEERS / "p104_sdpa_math.py"
    records = hold(TRITON, meddles, looks, peer, STAGE3)
    assert set(found(records).values()) == {"ok"}, [each["reason"] for each in records.values()]
    modes = {name: record["mode"] for name, record in records.items()}
    native = dict.fromkeys(("meddles", "looks", "sdpa_math", "torch_three_gemm"), "native")
    assert modes == {"triton_online": "interpreted"} | native
    assert records["triton_online"]["reason"] == process.INTERPRETED


# loaded once to be described; then it waits until another one is loaded as well
WAITS = """
def times(name):
    path = Path(__file__).with_name(name + ".loads")
    return len(path.read_text()) if path.exists() else 0

with Path(__file__).with_suffix(".loads").open("a") as file:
    file.write("x")
until = time.monotonic() + 30.0
while times({own!r}) == 2 and times({other!r}) < 2:
    assert time.monotonic() < until, "the other one is not loaded"
    time.sleep(0.01)
"""


def test_users_files_are_loaded_at_the_same_time(make_stage, monkeypatch):
    """Each has a process of its own."""
    monkeypatch.setattr(StageInfo, "ours", False)
    one, two = (
        make_stage(own, more=WAITS.format(own=own, other=other))
        for own, other in (("one", "two"), ("two", "one"))
    )
    assert found(hold(one, two)) == {"one": "ok", "two": "ok"}
    # else one gives up waiting, and both are tried alone
    assert {path.with_suffix(".loads").read_text() for path in (one, two)} == {"xx"}


# never loads while the other one does
DISTURBED = """
import os, psutil

def loads(name):
    path = Path(__file__).with_name(name + ".loads")
    return path.exists() and psutil.pid_exists(int(path.read_text() or os.getpid()))

Path(__file__).with_suffix(".loads").write_text(str(os.getpid()))
time.sleep(1.0)
while loads({other!r}):
    time.sleep(0.01)
Path(__file__).with_suffix(".loads").unlink()
"""


@pytest.mark.slow
def test_files_that_are_late_only_beside_each_other_are_loaded_one_after_another(
    make_stage, monkeypatch
):
    monkeypatch.setattr(StageInfo, "ours", False)
    monkeypatch.setattr(process, "LEAST_LOAD", 3.0)
    one, two = (
        make_stage(own, more=DISTURBED.format(other=other))
        for own, other in (("one", "two"), ("two", "one"))
    )
    limits = replace(LIMITS, budget=3.0)
    assert found(hold(one, two, limits=limits)) == {"one": "ok", "two": "ok"}


def test_the_share_of_skipped_tiles_is_recorded_where_a_stage_counts_it(make_stage):
    """One that raises or gives no share keeps its time all the same."""
    ratio = "def skip_ratio(q, k, v, *, causal=False, seqlens_k=None):\n    return {}"
    answers = {"causal": "0.25 if causal else 0.5", "absurd": "7.0", "raises": "1 / 0"}
    paths = [make_stage(name, more=ratio.format(answer)) for name, answer in answers.items()]
    problem = replace(PROBLEM, causal=True)
    records = hold(*paths, STAGE3, problem=problem)
    assert set(found(records).values()) == {"ok"}
    shares = {name: record["skip_ratio"] for name, record in records.items()}
    assert shares == {"causal": 0.25, "absurd": None, "raises": None, "torch_three_gemm": None}
    deadly = make_stage("deadly", more=ratio.format("ctypes.string_at(0)"))
    records = hold(deadly, STAGE3)
    assert found(records) == {"deadly": "crashed", "torch_three_gemm": "ok"}


def test_without_an_oracle_no_stage_is_timed(make_stage):
    class Blind(Judge):
        def open(self):
            raise NoVerdict("out-of-memory", "can't be checked: too large")

    right = make_stage("right")
    records = hold(right, STAGE3, judge=Blind)
    assert set(found(records).values()) == {"out-of-memory"}
    assert {record["reason"] for record in records.values()} == {"can't be checked: too large"}
    assert not right.with_suffix(".calls").exists()


# ---- what is planned


def make_fake(number, options=("causal",), refused=None, **declared):
    """A stage that refuses what `refused` says, a dtype each, on any device."""
    made = make_stage_info(number, options=options, **declared)
    return replace(made, refused={at: own | (refused or {}) for at, own in made.refused.items()})


LADDER = [
    make_fake(3, gradients=True), make_fake(4, exact_up_to=16), make_fake(5, options=()),
    make_fake(6), make_fake(7, gradients=True), make_fake(8, unavailable={"cpu": "no"}),
    make_fake(9, gradients=True, refused={"float32": "half precision only"}),
    make_fake(100, gradients=True), make_fake(101, refused={"float32": "no"}),
]  # fmt: skip


def numbers(stages):
    return [stage.number for stage in stages]


@pytest.mark.parametrize(
    ("directions", "expected"),
    [(["fwd"], [3, 6, 100, 101]), (["bwd"], [3, 7, 100, 101]), (["train"], [3, 7, 100, 101]),
     (["fwd", "train"], [3, 6, 7, 100, 101])],
)  # fmt: skip
def test_unless_told_stage_3_the_newest_that_fits_and_the_peers_compete(directions, expected):
    problems = [replace(PROBLEM, direction=direction) for direction in directions]
    assert numbers(usual_stages(LADDER, problems)) == expected


def test_what_is_made_for_this_generation_of_gpus_competes_forward_and_backward():
    both = [PROBLEM, replace(PROBLEM, direction="train")]
    ladder = [stage for stage in LADDER if stage.number != 9]
    hopper = replace(make_fake(9, gradients=True), only_major=9)
    assert numbers(usual_stages([*ladder, hopper], [PROBLEM])) == [3, 100, 101, 9]
    assert numbers(usual_stages([*ladder, hopper], both)) == [3, 100, 101, 9]
    assert numbers(usual_stages([*ladder, hopper], both[1:])) == [3, 100, 101, 9]
    elsewhere = replace(hopper, unavailable=dict.fromkeys(("cpu", "cuda"), "not its generation"))
    assert numbers(usual_stages([*ladder, elsewhere], both)) == [3, 6, 7, 100, 101]


@pytest.mark.parametrize(
    ("h", "nq", "nk", "fills"),
    [(1, 8192, 8192, False), (1, 8448, 8448, True), (32, 64, 64, False), (32, 320, 320, True),
     (32, 320, 321, False)],
)  # fmt: skip
def test_what_splits_the_keys_joins_the_newest_where_rows_fill_no_gpu(h, nq, nk, fills):
    ladder = [replace(make_fake(n), splits_keys=n == 8) for n in (3, 6, 8, 100)]
    problem = replace(PROBLEM, device="cuda", b=1, h=h, hk=h, nq=nq, nk=nk)
    many = replace(problem, h=64, hk=64, nq=512, nk=512)
    assert numbers(usual_stages(ladder, [problem, many])) == [3, 6, *[8] * (not fills), 100]
    cells = plan_comparisons(ladder, [problem, many], ())
    assert [cell.problem for cell in cells if cell.stage.number == 8] == [problem] * (not fills)
    assert 8 not in numbers(usual_stages(ladder, [replace(problem, device="cpu")]))


def test_the_usual_compete_where_they_fit_and_those_asked_for_everywhere():
    problems = [PROBLEM, replace(PROBLEM, causal=True), replace(PROBLEM, direction="train")]
    some = [stage for stage in LADDER if stage.number in (3, 5, 6, 7, 101)]

    def planned(named):
        cells = plan_comparisons(some, problems, named)
        return [(c.problem, numbers(c.stages)) for c in plan.group(cells, LIMITS)]

    usual = [[3, 5, 6, 7], [3, 6, 7], [3, 7]]
    assert planned(()) == [*zip(problems, usual, strict=True)]
    everywhere = planned([stage.path for stage in some])
    assert everywhere == [(problem, [3, 5, 6, 7, 101]) for problem in problems]
    assert plan_comparisons([LADDER[2]], problems[1:], ()) == []
    # one that declares itself wrong there takes no part unless it is asked for
    assert numbers(usual_stages(LADDER[:2], [PROBLEM])) == [3]
    assert plan_comparisons(LADDER[1:2], [PROBLEM], ()) == []


def test_the_work_a_token_stays_the_same():
    sizes = Sizes(tokens=16384, hidden=2048)
    assert [sizes.of(n, 64) for n in (512, 4096, 16384)] == [(32, 32), (4, 32), (1, 32)]
    assert sizes.of(16384, 128) == (1, 16)
    assert Sizes(tokens=1, hidden=1, b=2, h=4).of(8192, 64) == (2, 4)
    for n, d in ((16385, 64), (512, 96), (512, 4096)):
        with pytest.raises(ValueError, match=r"16384 tokens|a divisor of 2048"):
            sizes.of(n, d)


def test_problems_come_by_direction_mask_and_d_and_n_last():
    sizes = Sizes(tokens=64, hidden=64)
    problems = make_problems(PROBLEM, ["fwd", "bwd"], [False, True], [16, 32], [8, 64], sizes)
    shapes = [(p.direction, p.causal, p.d, p.nk) for p in problems]
    assert len(shapes) == len(set(shapes)) == 16
    assert shapes[:5] == [("fwd", False, 16, 8), ("fwd", False, 16, 64), ("fwd", False, 32, 8),
                          ("fwd", False, 32, 64), ("fwd", True, 16, 8)]  # fmt: skip
    assert all(
        p.nq == p.nk and p.b * p.nk == 64 and p.h * p.d == p.hk * p.d == 64 for p in problems
    )


@pytest.mark.parametrize("name", [x for x in suite_names("bench") if x[0] == "0"])
def test_the_suites_have_the_sources_shapes(name):
    problems = SUITES[name].problems(PROBLEM)
    name, bf16, _ = name.partition("-bf16")
    dtypes = {(p.dtype, p.precision) for p in problems}
    assert dtypes == ({("bfloat16",) * 2} if bf16 else {("float16",) * 2})
    assert {p.causal for p in problems} == {0, 1}
    if name == "004":
        assert {p.nk for p in problems} == {512, 1024, 2048, 4096, 8192, 16384}
        assert {p.d for p in problems} == {64, 128}
        assert {(p.b * p.nk, p.h * p.d) for p in problems} == {(16384, 2048)}
    else:
        assert {p.nk for p in problems} == {512, 1024, 2048, 4096, 8192}
        assert {(p.b, p.h, p.d) for p in problems} == {(2, 4, 64)}
    directions = {"001-train": {"fwd", "bwd", "train"}, "001-memory": {"fwd", "train"}}
    assert {p.direction for p in problems} == directions.get(name, {"fwd"})


# ---- the command

QUICK = ("--device", "cpu", "--n", "16,32", "--repeat", 3, "--warmup", 1)


def test_the_command_records_shows_and_writes_csv(tmp_path, make_stage):
    """Exit code 0: a peer that refuses or is wrong is no failure. Then the views, from the file."""
    peer = make_stage("rival", number=110)
    body = "if q.shape[2] == 16:\n    raise ValueError('too short')\nreturn 1.001 * stage3(q, k, v)"
    refuses = make_stage("refuses", body, 111)
    out = tmp_path / "bench.jsonl"
    done = in_turn("bench", *QUICK, "--mode", "fwd,train", "--causal", "off", "--inputs", "normal",
                  "--stages", "3,rival,111", "--stage", peer, "--stage", refuses,
                  "--out", out)  # fmt: skip
    assert done.returncode == 0, done.stderr
    env, records = jsonl.read(out)
    assert env["arguments"]["stages"] == "3,rival,111" and str(tmp_path) not in out.read_text()
    assert [(r["direction"], r["nk"], r["stage"]) for r in records] == [
        (direction, n, stage)
        for direction in ("fwd", "train") for n in (16, 32) for stage in (3, 110, 111)
    ]  # fmt: skip
    assert {r["status"] for r in records if r["stage"] != 111} == {"ok"}
    assert [r["status"] for r in records if r["stage"] == 111] == ["skipped", "wrong"] * 2
    assert {(r["b"] * r["nk"], r["h"] * r["d"]) for r in records} == {(256, 32)}
    assert "[4/4]" in done.stderr and "Traceback" not in done.stderr
    written = out.with_suffix(".csv").read_text()
    assert written.count("\n") == 1 + len(records)
    for path in (peer, refuses, out.with_suffix(".csv")):
        path.unlink()
    there = {path.name for path in tmp_path.iterdir()}
    table = in_turn("bench", "--show", out)
    assert table.returncode == 0, table.stderr
    assert {path.name for path in tmp_path.iterdir()} == there  # who looks leaves nothing behind
    lines = [line for line in done.stdout.splitlines() if not line.startswith("csv: ")]
    assert table.stdout.splitlines() == lines


def test_hopeless_is_what_takes_long_at_a_fast_rate(make_stage):
    [native] = describe_files([make_stage("mine")])
    interpreted = replace(native, modes={**native.modes, "cpu": "interpreted"})
    flops = cost.flops(PROBLEM)

    stranger = replace(native, options=(), unavailable=dict.fromkeys(native.unavailable, "gone"))

    def reason(stage, calls, device="cpu"):
        problem = replace(PROBLEM, device=device)
        limits = Limits(warmup=1, rounds=calls - 1)
        return plan.why_too_long([Cell(each, problem) for each in (stranger, stage)], limits)

    most = int(plan.PATIENCE * plan.THREAD_RATE / flops)
    assert reason(native, most) is None
    assert "10 minutes" in reason(native, most + 1)
    assert "2 hours" in reason(native, 12 * most)
    assert reason(native, 12 * most, "cuda") is None
    assert reason(interpreted, 12 * most) is None  # it is called once


@pytest.mark.parametrize(
    ("ms", "launches", "rows"),
    [(0.01, 20, 5), (2.5, 16, 5), (8.0, 5, 5), (25.0, 2, 4), (60.0, 2, 1), (5000.0, 2, 1)],
)
def test_fewer_launches_are_timed_where_calls_take_long(ms, launches, rows):
    """Five rows of two would take the budget of calls that take seconds."""
    asked = []

    def ask(message, *kinds, **limits):
        asked.append(message)
        return Out("crashed", "made up", refused=False)

    given = plan.Comparison([Cell(make_stage_info(90), PROBLEM)], LIMITS)
    outcome = process.Outcome(given.cells[0].stage, PROBLEM)
    with process.ComparisonProcess(given, [outcome], None, print) as one:
        one.session, one.left, one.credible = SimpleNamespace(ask=ask, end=list), {0: 1.0}, {0}
        one.series = {0: Series(None, "cuda")}
        one.series[0].samples_ms = [ms]
        with pytest.raises(process.Dropped):
            one.finish_one(0)
    assert [(finish.launches, finish.rows) for finish in asked] == [(launches, rows)]


def test_bad_problems_are_refused_before_stages_are_loaded(monkeypatch, capsys):
    from ladder import app, bench

    monkeypatch.setattr(bench, "stages_and_device", lambda *_: pytest.fail("too late"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as ended:
        app.main(["bench", "--n", "512", "--tokens", "256", "--h", "3"])
    assert ended.value.code == 2 and "--n: got 512, expected at most" in capsys.readouterr().err


# ---- the peers that share a module


def test_sdpa_on_one_backend_answers_as_stage_3_or_says_that_it_will_not():
    """On a CPU torch has the flash backend and no efficient one."""
    from torch.nn.attention import SDPBackend

    import stages
    from harness.peers.sdpa import attend_on
    from stages.contract import Stage, StageUnavailable

    options = ("causal", "gqa")
    stage = Stage(number=190, name="peer", title="Peer", idea="torch's own", options=options)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 40, 16, generator=generator) for heads in (4, 2, 2))
    for causal in (False, True):
        o = attend_on(SDPBackend.FLASH_ATTENTION, stage, q, k, v, causal)
        expected = stages.by_number(3).attend(q.double(), k.double(), v.double(), causal=causal)
        assert (o - expected).abs().max() < 8 * torch.finfo(torch.float32).eps * v.abs().max()
    with pytest.raises(StageUnavailable, match="Peer does not take this problem"):
        attend_on(SDPBackend.EFFICIENT_ATTENTION, stage, q, k, v, False)
    with pytest.raises(ValueError, match="causal: got Nq = 39, Nk = 40"):
        attend_on(SDPBackend.FLASH_ATTENTION, stage, q[:, :, 1:], k, v, True)


@pytest.mark.parametrize("path", sorted(PEERS.glob("p*.py")), ids=lambda path: path.stem)
def test_a_peers_file_stands_alone(path):
    """Loaded as any stage's file; asked for what it has no kernel for, or right where it has."""

    import stages

    module = stages.load(path)
    assert int(path.stem[1:4]) == module.STAGE.number >= 100
    assert path.stem[5:] == module.STAGE.name
    x = torch.zeros(1, 1, 4, 8, dtype=torch.float64)
    if "float64" in module.STAGE.dtypes:
        assert torch.equal(module.attend(x, x, x), x)
    else:
        with pytest.raises(ValueError, match="q: got dtype float64"):
            module.attend(x, x, x)


@pytest.fixture(scope="module")
def everyone():
    """All stages and the peers that run here."""
    return read_stages()


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [PROBLEM, replace(PROBLEM, causal=True), replace(PROBLEM, h=4, hk=2, causal=True),
     replace(PROBLEM, direction="train", h=4, hk=2), replace(PROBLEM, direction="bwd", causal=True),
     replace(PROBLEM, dtype="float64", precision="float64", direction="train", causal=True),
     replace(PROBLEM, dtype="float16", precision="float16", direction="train"),
     replace(PROBLEM, dtype="bfloat16", precision="bfloat16", causal=True)],
    ids=lambda asked: f"{asked.dtype}-{asked.direction}-{asked.hk}-{asked.causal}",
)  # fmt: skip
def test_the_math_backend_takes_part_on_a_cpu_too(everyone, asked):
    """There without being asked for, and right."""
    pair = ("torch_three_gemm", "sdpa_math")
    paths = [stage.path for stage in usual_stages(everyone, [asked]) if stage.name in pair]
    records = hold(*paths, problem=asked)
    assert found(records) == dict.fromkeys(pair, "ok"), records


@pytest.mark.slow
def test_the_tour_of_a_cpu_has_no_peers(everyone):
    """`ladder bench` compares; the tour shows the ladder, and peers in a GPU's part alone."""
    names = {cell.stage.name for cell in plan_tour(everyone, PROBLEM)}
    assert "torch_three_gemm" in names and "sdpa_math" not in names
    there = [replace(stage, unavailable={"cuda": None}) for stage in everyone]
    names = {cell.stage.name for cell in plan_tour(there, replace(PROBLEM, device="cuda"))}
    assert {"torch_three_gemm", "sdpa_math"} <= names
