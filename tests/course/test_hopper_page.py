"""The generated parts of stage 9's page, made of records that are made up."""

import json

import pytest
from made_up import cells_of, make_bench, make_bench_env, write_run

from course import suites
from course.report import hopper, sources, text
from harness.problems.problem import Problem

OURS = {"stage": 9, "name": "gluon_hopper"}
ANY = Problem(
    inputs="normal", seed=1, b=1, h=1, hk=1, nq=1, nk=1, d=16, dtype="float32", precision="ieee",
    causal=False, seqlens_k=None, device="cuda",
)  # fmt: skip


@pytest.fixture(autouse=True)
def records_are_made_up(tmp_path, monkeypatch):
    (tmp_path / "ceilings.jsonl").write_bytes((text.GPU / "ceilings.jsonl").read_bytes())
    monkeypatch.setattr(text, "GPU", tmp_path)


def test_a_climb_has_its_ideas_in_order_and_what_was_expected(tmp_path):
    assert hopper.climb("climb").startswith("Not measured yet")
    names = list(hopper.ideas())
    shown = ["mine", names[3], names[0]]  # in the order of their numbers; `mine` lacks no idea
    found = [OURS, *({"stage": 80 + i, "name": name} for i, name in enumerate(shown))]
    records = [
        make_bench(6, n=n, d=d) | who | {"time_ms": 2.0 + index, "flops": 400 * (2 + index) * 10**9}
        for d in (64, 128)
        for n in (1024, 4096)
        for index, who in enumerate(found)
    ]
    env = make_bench_env(records, plan=records)
    write_run(tmp_path / "climb.jsonl", env, records[:-1])
    header, rates, share, *rows = cells_of(hopper.climb("climb"))
    assert header[:2] == ["variant", "expected of the idea"] and rates[2:] == ["400 / 400"] * 2
    assert share[1] == "" and all("%" in x for x in share[2:])
    expected = [hopper.ideas()[names[0]][1], hopper.ideas()[names[3]][1], ""]
    assert [row[0] for row in rows] == [f"2, `{names[0]}`", f"5, `{names[3]}`", "`mine`"]
    assert [row[1] for row in rows] == expected
    assert rows[0][2:] == ["2.50x / 2.50x", "2.50x / -"]
    assert rows[2][2:] == ["1.50x / 1.50x", "1.50x / 1.50x"]


def test_a_climb_without_ideas_has_no_column_for_them(tmp_path):
    records = [
        make_bench(6) | OURS,
        make_bench(6) | {"stage": 80, "name": "mine"},
    ]
    write_run(tmp_path / "tried.jsonl", make_bench_env(records, plan=records), records)
    header, *rows = cells_of(hopper.climb("tried"))
    assert header == ["variant", "d = 64, none"]
    assert [row[0] for row in rows] == ["as shipped, TFLOP/s", "of one product alone", "`mine`"]


def test_what_an_idea_bought_is_the_least_and_the_most_of_all_problems(tmp_path):
    assert hopper.bought("hopper-variants", "fwd", 2).startswith("Not measured yet")
    name, (idea, expected) = next(iter(hopper.ideas().items()))
    times = {(64, 1024): 3.0, (64, 4096): 2.0, (128, 1024): 5.0, (128, 4096): 2.5}
    records = [
        make_bench(6, n=n, d=d, causal=causal) | who | {"time_ms": time if who != OURS else 2.0}
        for (d, n), time in times.items()
        for causal in (False, True)
        for who in (OURS, {"stage": 81, "name": name})
    ]
    write_run(tmp_path / "hopper-variants.jsonl", make_bench_env(records), records[:-1])
    _, row = cells_of(hopper.bought("hopper-variants", "fwd", 2))
    where = "d = 128, none, N = 1024"
    assert row == ["2", idea, expected, "1.00x", "2.50x", where]


def test_the_first_kernel_is_what_the_others_are_times_of(tmp_path):
    assert hopper.first().startswith("Not measured yet")
    start = {"stage": 90, "name": "first"}
    records = [
        make_bench(6, n=n, d=128) | who | {"time_ms": time, "flops": 300 * 10**9}
        for n in (1024, 4096)
        for who, time in ((start, 1.0), (OURS, 0.5))
    ]
    write_run(tmp_path / "hopper-first.jsonl", make_bench_env(records), records)
    header, *rows = cells_of(hopper.first())
    assert header[:2] == ["size", "first"] and header[2].startswith("#9")
    assert [row[1:] for row in rows] == [["300, 1.0x", "600, 2.00x"]] * 2


def test_the_docs_say_what_an_odd_problem_costs_stage_9(tmp_path):
    assert hopper.odd().startswith("Not measured yet")
    asked = suites.SUITES["hopper-odd"].problems(ANY)
    times = (0.2, 0.21, 0.19, 0.2, 0.22)  # even, another N, grouped heads, lengths of both N
    records = [
        make_bench(6, **json.loads(json.dumps(problem.to_json())))
        | OURS
        | {"time_ms": times[index % 5] / (1 + problem.causal)}
        for index, problem in enumerate(asked)
    ]
    write_run(tmp_path / "hopper-odd.jsonl", make_bench_env(records), records)
    _, *rows = cells_of(hopper.odd())
    assert len(rows) == 8
    slower = ["~1.05x", "~0.95x", "~1.00x", "~1.10x"]
    assert rows[0] == ["d = 64, none, N = 1024 and 1000", "200 us", *slower]
    assert rows[-1] == ["d = 128, causal, N = 4096 and 4095", "100 us", *slower]
    env = make_bench_env(records, plan=records)  # cut off, and without what others are held to
    write_run(tmp_path / "hopper-odd.jsonl", env, records[1:-1])
    _, *rows = cells_of(hopper.odd())
    assert rows[0] == ["d = 64, none, N = 1024 and 1000", *["-"] * 5]
    assert rows[-1][1:] == ["100 us", *slower[:-1], "-"]
    assert "Of 40 problems 2 are not measured" in hopper.odd()


def test_widths_have_a_row_for_each_mask_and_a_place_for_what_is_missing(tmp_path):
    assert hopper.other_widths("wide").startswith("Not measured yet")
    records = [
        make_bench(6, n=n, d=d, causal=causal) | who | {"time_ms": ms, "flops": 10**12}
        for d in (80, 256)
        for causal in (False, True)
        for n in (1024, 4096)
        for who, ms in ((OURS, 2.0), ({"stage": 101, "name": "sdpa_cudnn"}, 2.5))
    ]
    write_run(tmp_path / "wide.jsonl", make_bench_env(records, plan=records), records[:-3])
    header, *rows = cells_of(hopper.other_widths("wide"))
    assert header == ["d", "mask", "#9", "#9 over cuDNN"]
    assert rows[0] == ["80", "none", "**500** / **500**", "1.25x / 1.25x"]
    assert rows[-1] == ["256", "causal", "**500** / -", "- / -"]
    page = hopper.other_widths("wide")
    assert "Of 8 problems 1 is not measured" in page
    assert "wrong" not in page
    peer = {**records[1], "status": "wrong", "time_ms": None}
    write_run(tmp_path / "wide.jsonl", make_bench_env(records, plan=records), [records[0], peer])
    _, first, *_ = cells_of(page := hopper.other_widths("wide"))
    assert first[-1] == "wrong"
    assert "wrong: the peer's output is" in page


def test_the_docs_say_what_a_launch_takes_and_that_graphs_were_replayed(tmp_path):
    assert sources.launches("host").startswith("Not measured yet")
    problems = list(text.problems([1024]))
    records = [
        make_bench(6, n=1024, d=at["d"], causal=at["causal"]) | OURS | {"launch_ms": 0.036}
        for _, at in problems
    ]
    records[-1]["launch_ms"] = None
    write_run(tmp_path / "host.jsonl", make_bench_env(records, graph=True), records)
    header, row = cells_of(sources.launches("host"))
    assert header[1:] == [title for title, _ in problems]
    assert row[1:] == ["36 us", "36 us", "36 us", "-"]
    assert "replayed as CUDA graphs" in hopper.race("host")
