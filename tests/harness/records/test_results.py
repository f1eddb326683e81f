"""Records: the schema refuses what is no record, and the file loses nothing and hides nothing."""

import errno
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args

import pytest
from ladder_command import PATIENCE, ROOT, command, environ, measured
from made_up import make_cell, make_env, write_run

from harness.records import jsonl, schema, values
from harness.records.jsonl import WriteFailed, Writer, dump_line, read
from harness.records.schema import BadRecord, check_record, key

# fields added later, and what they are in older records
LATER = {each.name: each.default for each in fields(schema.Cell) if each.default is not MISSING}


def test_the_schema_has_the_statuses_of_the_design():
    """And, since a record made up by hand holds to it, no other fields than that."""
    assert set(values.rules(schema.Cell)) == set(make_cell())
    assert {
        "page_size",
        "rounds_ms",
        "launch_ms",
        "launch_configs",
        "products",
        "skip_ratio",
        "world",
        "x_one_gpu",
        "link_gb_s",
        "link_us",
    } == LATER.keys()
    assert set(get_args(schema.Status)) == {
        "ok", "wrong", "wrong-by-design", "skipped", "crashed", "timeout", "out-of-memory"
    }  # fmt: skip
    assert set(schema.FAILURES) == {"wrong", "crashed", "timeout", "out-of-memory"}


@pytest.mark.parametrize("field", sorted(make_cell().keys() - {"launch_configs"}))
def test_a_missing_an_extra_or_an_ill_typed_field_is_refused(field):
    cell = make_cell()
    check_record(cell)
    if field not in LATER:
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


def test_records_from_before_a_field_was_there_are_read_without_it(tmp_path):
    cell = make_cell(paired=True, rounds_ms=[1.0, 2.0], launch_configs={"a_kernel": {"M": 64}})
    assert {"rounds_ms", "launch_configs", "world"} <= LATER.keys()
    older = {name: value for name, value in cell.items() if name not in LATER}
    other = cell | {"nq": 2 * cell["nq"], "nk": 2 * cell["nk"]}
    path = write_run(tmp_path / "run.jsonl", make_env([cell]), [older, other])
    assert read(path)[1] == [older | LATER, other]


def test_an_older_comparison_is_read_as_cells_that_took_turns(tmp_path):
    """Its records were of a kind of their own, with fields that follow from others."""
    cells = [make_cell(paired=True), make_cell(4, "lite", paired=True, hbm_bytes=None)]
    today = ("err_stage3_max", "err_stage3_rel", "paired", "skip_ratio")
    older = [
        {name: value for name, value in cell.items() if name not in today and value is not None}
        | {"kind": "bench", "hbm_bytes": 1, "time_iqr_ms": None, "sm_clock_mhz": None,
           "seqlens_k": None, "tflops": 1.0, "tokens_per_s": 1.0, "speedup": {}, "warmup": 5,
           "repeat": 30}
        for cell in cells
    ]  # fmt: skip
    del older[1]["hbm_bytes"]  # the oldest of all
    older[1]["h"] = 2 * older[1]["h"]
    plan = [{name: x[name] for name in ("stage", "name", *schema.PROBLEM)} for x in cells]
    env = make_env(cells, arguments={"command": "bench"}, plan=plan)
    path = write_run(tmp_path / "bench.jsonl", env, [older[0], cells[1], older[1]])
    read_env, found = read(path)
    assert found == read(path, None)[1]
    assert [cell["kind"] for cell in found] == ["cell"] * 3
    assert found[0] == cells[0] | {"hbm_bytes": 1, "time_iqr_ms": None} | dict.fromkeys(
        ("err_stage3_max", "err_stage3_rel")
    )
    assert found[2]["hbm_bytes"] is None and found[2].keys() == cells[0].keys()
    schema.check_plan(read_env)
    assert [key(planned) for planned in read_env["plan"]] == [*map(key, found[:2])]


@pytest.mark.parametrize("rounds", [["1"], [True], [0.0], [-1.0], [math.nan], [1.0, math.inf], 1.0])
def test_rounds_that_are_no_times_are_refused(rounds):
    with pytest.raises(BadRecord, match="rounds_ms"):
        check_record({**make_cell(), "rounds_ms": rounds})


def test_the_env_line_is_held_to_its_schema_too():
    env = make_env([make_cell()])
    for field in env.keys() - {"versions"}:  # added later: older records have none
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
def test_garbage_at_the_end_is_passed_over(tmp_path, garbage):
    """In the middle it is refused: test_corrupt_files.py."""
    cells = [make_cell()]
    path = write_run(tmp_path / "run.jsonl", make_env(cells), cells)
    path.write_bytes(path.read_bytes() + garbage)
    assert read(path)[1] == cells


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
    path.write_bytes(2 * dump_line(env))
    for kind in ("cell", None):
        with pytest.raises(BadRecord, match="line 2 is of kind 'env'"):
            read(path, kind)


def test_a_cell_that_comes_twice_is_refused(tmp_path):
    cells = [make_cell(), make_cell(1, "raw_python"), make_cell()]
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(map(dump_line, (make_env(cells), *cells))))
    with pytest.raises(BadRecord, match="line 4 is the cell of line 2 once more"):
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


@pytest.fixture
def disk(monkeypatch):
    """A disk with a byte count `room` that takes at most 100 bytes in one go."""

    class Disk:
        room = 1 << 30

    def write(handle, data, really=os.write):
        if not Disk.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = really(handle, data[: min(100, Disk.room)])
        Disk.room -= done
        return done

    monkeypatch.setattr(jsonl.os, "write", write)
    return Disk


@pytest.mark.parametrize("lines", [0, 0.5, 1, 1.5, 2])
def test_a_full_disk_is_said_and_leaves_whole_lines_that_more_can_follow(tmp_path, disk, lines):
    cells = [make_cell(n=n) for n in (128, 256, 512, 640)]
    path = write_run(tmp_path / "run.jsonl", make_env(cells), cells[:1])
    with Writer.reopen(path) as writer:
        disk.room = int(lines * len(dump_line(cells[1])))
        said = f"{path} can't be written any more: No space left on device; what was"
        with pytest.raises(WriteFailed, match=re.escape(said)):
            writer.append(*cells[1:])
        kept = cells[: 1 + int(lines)]
        assert path.read_bytes().endswith(b"\n") and read(path)[1] == kept
        disk.room = 1 << 30  # somebody has made some
        writer.append(cells[3])
    assert read(path)[1] == [*kept, cells[3]]


def test_what_could_not_be_brought_to_the_disk_is_said_too(tmp_path, monkeypatch):
    def fsync(handle):
        raise OSError(errno.EIO, "Input/output error")

    cells = [make_cell()]
    path = write_run(tmp_path / "run.jsonl", make_env(cells), [])
    monkeypatch.setattr(jsonl.os, "fsync", fsync)
    with Writer.reopen(path) as writer, pytest.raises(WriteFailed, match="Input/output error"):
        writer.append(*cells)


def test_a_disk_without_room_for_the_first_line_gets_no_file(tmp_path, monkeypatch):
    def write_bytes(path, data, really=Path.write_bytes):
        really(path, data[:40])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(OSError, match="No space left"):
        Writer.create(tmp_path / "run.jsonl", make_env([]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no such limits")
def test_a_command_whose_file_is_full_says_so_and_shows_what_it_has(tmp_path):
    import resource

    asked = ("bench", "--stages", "3", "--causal", "off", "--d", "8", "--n", "8,16", "--repeat",
             "2", "--device", "cpu", "--inputs", "normal")  # fmt: skip
    measured(tmp_path, *asked)
    path = tmp_path / "full.jsonl"
    env, first, second = (tmp_path / "run.jsonl").read_bytes().splitlines(keepends=True)
    size = len(env) + len(first) + len(second) // 2
    done = subprocess.run(
        command(*asked, "--out", path), cwd=ROOT,
        # git status writes the checkout's index again, and would leave a torn one's lock
        env=environ(GIT_OPTIONAL_LOCKS="0"),
        capture_output=True, text=True, timeout=PATIENCE, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    said = done.stderr.splitlines()
    assert all(line.startswith(("[1/2] ", "[2/2] ")) for line in said[:-1])  # the progress
    assert said[-1].startswith(f"ladder: {path} can't be written any more: File too large; what")
    assert "three GEMMs" in done.stdout and f"records: {path}" in done.stdout
    assert [record["nk"] for record in read(path)[1]] == [8]
    assert path.read_bytes().count(b"\n") == 2 and path.read_bytes().endswith(b"\n")
    assert not path.with_suffix(".csv").exists()  # on a full disk, one error is enough


def test_one_writer_at_a_time(tmp_path):
    cells = [make_cell()]
    path = write_run(tmp_path / "run.jsonl", make_env(cells), cells)
    script = (
        "import sys\nfrom pathlib import Path\nfrom harness.records.jsonl import Writer\n"
        "try:\n    Writer.reopen(Path(sys.argv[1]))\nexcept BlockingIOError:\n    print('busy')\n"
        "else:\n    print('free')\n"
    )
    arguments = [sys.executable, "-c", script, path]
    with Writer.reopen(path):
        assert subprocess.check_output(arguments, cwd=ROOT, text=True) == "busy\n"
    assert subprocess.check_output(arguments, cwd=ROOT, text=True) == "free\n"


def test_the_key_is_the_stage_and_the_whole_problem():
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
