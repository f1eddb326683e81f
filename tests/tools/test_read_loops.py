"""The loops of stage 9 and of a variant are compiled and counted, for a GPU that isn't here."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import make_variants
import pytest
import read_loops

from harness.records.jsonl import read

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["none.py", ROOT / "stages" / "s06_triton_flash2.py"])
def test_a_file_that_is_no_stage_in_gluon_is_refused(file, tmp_path):
    out = tmp_path / "loops.jsonl"
    with pytest.raises(SystemExit, match=re.escape(f"read_loops: {file}")):
        read_loops.main([Path(file)], [64], out)
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no wheel of triton")
def test_a_polynomial_saves_exponentials_and_costs_instructions(cubins, tmp_path, monkeypatch):
    """Stage 9's own kernel is one of those that tests/stages/test_cubins.py compiles."""
    made, out = tmp_path / "variants", tmp_path / "loops.jsonl"
    make_variants.write(made, 9)
    words = made / "polynomial", "--d", "64", "--out", out
    monkeypatch.setattr(sys, "argv", [read_loops.__file__, *map(str, words)])
    monkeypatch.setattr(sys, "path", [*sys.path])  # it appends to it
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cubins))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    runpy.run_path(read_loops.__file__, run_name="__main__")
    env, (shipped, other) = read(out, "loop")
    assert [rung["name"] for rung in env["rungs"]] == [shipped["name"], other["name"]]
    assert (shipped["stage"], shipped["groups"], shipped["spills"]) == (9, 2, 0)
    assert shipped["registers"] <= shipped["given"]
    # 64 x 128 scores, a quarter of them without the unit; each instruction is 32 threads wide
    assert shipped["exponentials"] - other["exponentials"] == 64 * 128 // 4 // 128
    assert other["instructions"] > shipped["instructions"]
    known, records = read(ROOT / "results" / "cpu" / "hopper-loops.jsonl", "loop")
    if known["triton"] == env["triton"]:  # the committed ones are what the pinned version makes
        assert [record for record in records if record["d"] == 64 and record["name"] in
                (shipped["name"], other["name"])] == [shipped, other]  # fmt: skip
