"""Records: the schema refuses what is no record, and the file loses nothing and hides nothing."""

import json
import math
import re
import subprocess
import sys

import pytest
from ladder_command import ROOT
from made_up import make_cell, make_env, write_run

from harness import results
from harness.results import BadRecord, Writer, check_record, dump_line, key, read

# design.md, "What one cell (rung x problem) reports"; `hk`, `seed` and the like are among them
DESIGN = [
    "stage",
    "name",
    "inputs",
    "seed",
    "b",
    "h",
    "hk",
    "nq",
    "nk",
    "d",
    "dtype",
    "causal",
    "seqlens_k",
    "device",
    "mode",
    "status",
    "reason",
    "time_ms",
    "time_iqr_ms",
    "samples",
    "first_call_ms",
    "peak_bytes",
    "memory_meter",
    "precision",
    "err_stage3_max",
    "err_stage3_rel",
    "err_f64_max",
    "err_f64_rel",
    "flops",
    "hbm_bytes",
    "direction",
    "paired",
]


def test_the_schema_has_the_fields_of_the_design():
    assert set(results.CELL) == {"kind", "sm_clock_mhz", *DESIGN}
    assert set(results.STATUSES) == {
        "ok", "wrong", "wrong-by-design", "skipped", "crashed", "timeout", "out-of-memory"
    }  # fmt: skip
    assert set(results.FAILURES) == {"wrong", "crashed", "timeout", "out-of-memory"}


@pytest.mark.parametrize("field", ["kind", *DESIGN])
def test_a_missing_an_extra_or_an_ill_typed_field_is_refused(field):
    cell = make_cell()
    check_record(cell)
    without = {name: value for name, value in cell.items() if name != field}
    with pytest.raises(BadRecord, match=field):
        check_record(without)
    with pytest.raises(BadRecord, match=f"unknown field '{field}2'"):
        check_record({**cell, f"{field}2": 1})
    # no field takes a dict, and none that takes a number takes a truth value
    for strange in ({}, {"a": 1}) if cell[field] is True or cell[field] is False else ({}, True):
        with pytest.raises(BadRecord, match=field):
            check_record({**cell, field: strange})


@pytest.mark.parametrize(
    ("field", "value"),
    [("status", "fine"), ("mode", "fast"), ("memory_meter", "eye"), ("device", "tpu"),
     ("dtype", "float8"), ("inputs", "mine"), ("direction", "up"), ("precision", "half"),
     ("time_ms", "1"), ("stage", 3.0), ("peak_bytes", 1.5), ("kind", "row")],
)  # fmt: skip
def test_a_value_that_is_none_of_the_few_is_refused(field, value):
    with pytest.raises(BadRecord, match=field):
        check_record({**make_cell(), field: value})


def test_the_env_line_is_held_to_its_schema_too():
    env = make_env([make_cell()])
    for field in env:
        with pytest.raises(BadRecord):
            check_record({name: value for name, value in env.items() if name != field})
    for strange in ({"host": "mine"}, {"user": "me"}, {"path": "/home"}):
        with pytest.raises(BadRecord, match="unknown field"):
            check_record({**env, **strange})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_never_written(tmp_path, value):
    cells = [make_cell()]
    path = write_run(tmp_path / "run.jsonl", make_env(cells), cells)
    before = path.read_bytes()
    with Writer.reopen(path) as writer, pytest.raises(ValueError, match="JSON compliant"):
        writer.append({**make_cell(n=256), "time_ms": value})
    assert path.read_bytes() == before


def test_a_line_is_one_line_of_ascii_whatever_the_reason_says():
    line = dump_line(make_cell(status="crashed", reason="two\nlines \u2028 and \x1b[31m \ud800"))
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert line.isascii() and b"\x1b" not in line
    assert json.loads(line)["reason"].startswith("two\nlines")


@pytest.mark.parametrize(
    "garbage",
    [b"garbage", b"", b"null", b"[]", b'{"kind": "cell"}', b'{"kind": "env"}', b"\xff\xfe",
     b'{"kind": "cell", "stage": 3'],
)  # fmt: skip
def test_garbage_in_the_middle_is_refused_and_at_the_end_passed_over(tmp_path, garbage):
    cells = [make_cell(), make_cell(n=256)]
    path = write_run(tmp_path / "run.jsonl", make_env(cells), cells)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], garbage, lines[2]]) + b"\n")
    with pytest.raises(BadRecord, match=re.escape(f"{path}: line 3")):
        read(path)
    path.write_bytes(b"\n".join(lines[:2]) + b"\n" + garbage)
    assert read(path)[1] == cells[:1]


def test_an_env_line_comes_first_and_once(tmp_path):
    cells = [make_cell()]
    env = make_env(cells)
    path = tmp_path / "run.jsonl"
    path.write_bytes(dump_line(cells[0]))
    with pytest.raises(BadRecord, match="line 1"):
        read(path)
    path.write_bytes(dump_line(env) + dump_line(cells[0]) + dump_line(env))
    with pytest.raises(BadRecord, match="line 3"):
        read(path)


def test_what_is_written_is_read(tmp_path):
    cells = [make_cell(), make_cell(1, "raw_python", status="crashed", time_ms=None, reason="ä")]
    env = make_env(cells)
    path = tmp_path / "new" / "run.jsonl"
    with Writer.create(path, env) as writer:
        for count, cell in enumerate(cells, start=1):
            writer.append(cell)
            # each is on the disk at once, not when the run ends
            assert len(read(path)[1]) == count
    assert read(path) == (env, cells)
    assert [file.name for file in path.parent.iterdir()] == ["run.jsonl"]
    with pytest.raises(FileExistsError):
        Writer.create(path, env)
    assert read(path) == (env, cells)


def test_one_writer_at_a_time(tmp_path):
    cells = [make_cell()]
    path = write_run(tmp_path / "run.jsonl", make_env(cells), cells)
    script = (
        "import sys\nfrom pathlib import Path\nfrom harness.results import Writer\n"
        "try:\n    Writer.reopen(Path(sys.argv[1]))\nexcept BlockingIOError:\n    print('busy')\n"
        "else:\n    print('free')\n"
    )
    arguments = [sys.executable, "-c", script, path]
    with Writer.reopen(path):
        assert subprocess.check_output(arguments, cwd=ROOT, text=True) == "busy\n"
    assert subprocess.check_output(arguments, cwd=ROOT, text=True) == "free\n"


def test_the_key_is_the_rung_and_the_whole_problem():
    cell = make_cell()
    others = [
        {"stage": 4}, {"name": "mine"}, {"inputs": "peaky"}, {"seed": 2}, {"b": 2}, {"h": 2},
        {"hk": 2}, {"nq": 1}, {"nk": 1}, {"d": 1}, {"dtype": "float16"}, {"precision": "tf32"},
        {"causal": True}, {"seqlens_k": [3]}, {"device": "cuda"}, {"direction": "bwd"},
        {"paired": True},
    ]  # fmt: skip
    keys = {key(cell), *(key({**cell, **other}) for other in others)}
    assert len(keys) == 1 + len(others)
    assert key({**cell, "status": "wrong", "time_ms": 5.0, "reason": "x"}) == key(cell)
