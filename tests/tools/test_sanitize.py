"""The sanitizer's problems reach the loads without a mask; its records hold what each part said."""

import sys
from pathlib import Path

import pytest
import sanitize
import torch
from ladder_command import gone

import stages
from harness.records.code import built_in_files

ROOT = Path(__file__).parents[2]
HALF, FULL = ("float16", "float16"), ("float32", "ieee")


def configurations(d, dtype, precision):
    """Those of every tuned kernel for a head dimension and a dtype."""
    forward, training = stages.by_number(6), stages.by_number(7)
    dtype = getattr(torch, dtype)
    yield from forward.candidates(d, dtype, precision)
    for kernel in training.TILES:
        yield from training.candidates(kernel, d, dtype, precision)


@pytest.mark.parametrize("kind", [HALF, FULL], ids=lambda kind: kind[0])
def test_every_configuration_meets_tiles_that_are_whole_and_tiles_that_are_not(kind):
    assert kind[0] in sanitize.DTYPES
    for d in (64, 128):
        assert all(d in sizes for sizes in sanitize.SIZES.values())
        for config in configurations(d, *kind):
            tiles = [(shape["nq"] % config["BLOCK_M"], shape["nk"] % config["BLOCK_N"])
                     for shape in (sanitize.SHAPES["ragged"], sanitize.SHAPES["even"])]  # fmt: skip
            assert 0 not in tiles[0] and tiles[1] == (0, 0), config
            assert config["BLOCK_D"] == d


def test_every_stage_meets_every_problem_once():
    parts = sanitize.parts("memcheck")
    assert len(parts) == len(set(parts)) == 6 * (3 + 2 + 2)
    declared = [stages.load(path).STAGE for path in built_in_files()]
    compiled = {stage.number for stage in declared if "triton" in stage.needs}
    assert {stage for stage, *_ in parts} == compiled == {4, 5, 6, 7, 8, 9}
    gluon = {stage.number for stage in declared if "gluon" in stage.needs}
    assert sanitize.parts("racecheck") == [part for part in parts if part[0] not in gluon]
    assert {(shape, d) for _, shape, d in parts} == {
        ("ragged", 59), ("ragged", 64), ("ragged", 128), ("even", 64), ("even", 128),
        ("few", 64), ("few", 128),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [HALF[0], FULL[0]])
def test_few_rows_are_split_and_pages_are_smaller_and_larger_than_tiles(dtype):
    split, at = stages.by_number(8), sanitize.SHAPES["few"]
    for d in sanitize.SIZES["few"]:
        q = torch.empty(at["b"], at["h"], at["nq"], d, dtype=getattr(torch, dtype))
        for hk in (at["h"], at["h"] // 2):
            parts, config = split.plan(q, hk, at["nk"])
            assert parts > 1
            assert min(sanitize.PAGE_SIZES) < config["BLOCK_N"] < max(sanitize.PAGE_SIZES)


def said(line, errors, code=0):
    return f"{line}\n========= ERROR SUMMARY: {errors} errors\n", code, 1.25


def test_a_record_adds_up_what_the_parts_found():
    record = sanitize.make_record(
        "memcheck", "1", [said("stage 7: done", 0), said("stage 4: done", 0)]
    )
    assert record["ran"] == ["stage 4: done", "stage 7: done"]
    assert (record["errors"], record["summary"]) == (0, "ERROR SUMMARY: 0 errors")
    assert record["seconds"] == 2.5
    record = sanitize.make_record("memcheck", "1", [said("", 0), said("", 3), said("", 4)])
    assert record["errors"] == 7
    assert "3 errors" in record["summary"] and "4 errors" in record["summary"]


@pytest.mark.parametrize("broken", [("Device not supported\n", 1, 0.5), said("stage 7", 0, code=1)])
def test_a_part_that_did_not_end_well_leaves_no_count(broken):
    assert sanitize.make_record("memcheck", "1", [said("", 0), broken])["errors"] is None


@pytest.mark.skipif(sys.platform != "linux", reason="finds descendants in /proc")
def test_a_part_that_hangs_is_ended_with_what_it_has_started(tmp_path, monkeypatch):
    pid, program = tmp_path / "pid", tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\nsleep 1000 & echo $! > '{pid}'\nwait\necho 0 errors\n")
    program.chmod(0o755)
    monkeypatch.setattr(sanitize, "program", lambda: str(program))
    monkeypatch.setattr(sanitize, "LIMIT", 1.0)
    ran = sanitize.sanitize("memcheck", (4, "even", 64))
    assert sanitize.make_record("memcheck", "1", [ran])["errors"] is None
    assert gone(int(pid.read_text()))
