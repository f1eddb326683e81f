"""Python's times are taken in turns, and each call has a record."""

from pathlib import Path

import host_times
import pytest

import stages
from harness.measures import timing
from harness.records.jsonl import read


@pytest.fixture
def tool(monkeypatch):
    less = {"LAUNCHES": 2, "WARMUP": 1, "ROUNDS": 2, "H": 2, "NK": 16, "D": 16, "TRAIN": (1, 16)}
    for name, value in less.items():
        monkeypatch.setattr(host_times, name, value)
    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    return host_times


def test_each_call_has_a_record(tool, tmp_path):
    out, three = tmp_path / "host.jsonl", Path(str(stages.by_number(3).__file__))
    tool.main([7, 8], [2], "cpu", three, out)
    env, records = read(out, "host")
    assert [rung["stage"] for rung in env["rungs"]] == [7, 8, 3]
    of = [(record["stage"], record["call"], record["page_size"]) for record in records]
    assert of == [
        (3, "attend", None), (7, "attend", None), (8, "attend", None), (8, "attend_paged", 16),
        (8, "append", 16), (8, "append_many", 16), (3, "backward", None), (7, "backward", None),
    ]  # fmt: skip
    for record in records:
        assert record["direction"] == ("bwd" if record["call"] == "backward" else "fwd")
    for first, rest in ((records[0], records[:6]), (records[6], records[6:])):
        assert {record["reference_ms"] for record in rest} == {first["launch_ms"]}


def test_they_take_turns_and_the_fastest_round_counts(tool, monkeypatch):
    times, asked = iter([5.0, 2.0, 3.0, 4.0]), []
    monkeypatch.setattr(
        timing, "time_launches", lambda call, n: asked.append(call()) or next(times)
    )
    assert tool.in_turns({"a": lambda: "a", "b": lambda: "b"}) == {"a": 3.0, "b": 2.0}
    assert asked == ["a", "b", "a", "b"]


def test_it_says_why_it_can_not_measure_and_leaves_no_file(tool, tmp_path):
    out = tmp_path / "host.jsonl"
    three = Path(str(stages.by_number(3).__file__))
    with pytest.raises(SystemExit, match=r"stage 9: .*GPU"):
        tool.main([9], [1], "cpu", three, out)
    assert not out.exists()
    out.touch()
    with pytest.raises(SystemExit, match=r"is there already"):
        tool.main([3], [1], "cpu", three, out)
    assert not out.read_bytes()
