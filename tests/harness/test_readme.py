"""README's tables are made from the committed records, and can't drift from them."""

import re

import pytest
import torch
from made_up import make_cell

import stages
from harness import readme
from harness.results import FAILURES, read


def test_readme_is_what_the_records_say():
    text = readme.README.read_text()
    assert readme.generate(text) == text, "run `ladder readme`"


def test_a_changed_figure_is_found():
    text = readme.README.read_text()
    changed = text.replace("**3.04x**", "**9.04x**")
    assert changed != text
    assert readme.generate(changed) == text


@pytest.mark.parametrize("name", list(readme.PARTS))
def test_a_part_without_its_markers_is_an_error(name):
    text = readme.README.read_text().replace(f"<!-- end {name} -->", "")
    with pytest.raises(ValueError, match=name):
        readme.generate(text)


def test_pictures_are_there():
    shown = re.findall(r'(?:\]\(|src=")(docs/figures/[\w-]+\.png)', readme.README.read_text())
    assert len(shown) >= 5
    for path in shown:
        assert (readme.ROOT / path).read_bytes().startswith(b"\x89PNG")


def test_a_record_that_is_missing_or_double_is_an_error():
    cells = [make_cell(), make_cell(n=64)]
    assert readme.find(cells, nk=64)["nk"] == 64
    with pytest.raises(KeyError):
        readme.find(cells, nk=7)
    with pytest.raises(KeyError):
        readme.find(cells, stage=3)


def test_programs_are_counted_with_the_rungs_own_tiles():
    """The occupancy table's rows a program are those that rung 5 launches with at d = 64."""
    config = stages.by_number(5).launch_config
    assert config(64, torch.float32, "ieee")["BLOCK_M"] == 32
    assert config(64, torch.float32, "tf32")["BLOCK_M"] == 128
    assert config(64, torch.float16, "ieee")["BLOCK_M"] == 128
    lines = readme.occupancy().splitlines()
    assert lines[2] == "| 1024 | 32 | 8 | 1024 | 256 |"


@pytest.mark.parametrize("path", sorted(readme.RESULTS.glob("*/t*.jsonl")), ids=lambda p: p.name)
def test_committed_runs_are_whole_and_hold_no_failure(path):
    env, cells = read(path)
    assert len(cells) == len(env["plan"])
    assert [c for c in cells if c["status"] in FAILURES and c["stage"] >= 3] == []


def test_what_must_show_on_the_gpu():
    """The issue's own figures: rung 5 against stage 3 with 32 heads in fp16, memory, errors."""
    _, cells = read(readme.GPU / "table-4.2.jsonl")
    for n, factor in ((1024, 2.1), (2048, 1.6), (4096, 3.6)):
        at = {"nk": n, "h": 32, "precision": "float16", "paired": True}
        three, five = (readme.find(cells, stage=s, **at) for s in (3, 5))
        assert three["time_ms"] / five["time_ms"] > factor
        single = {"nk": n, "h": 1, "precision": "ieee", "paired": False}
        three, five = (readme.find(cells, stage=s, **single) for s in (3, 5))
        assert three["peak_bytes"] / five["peak_bytes"] >= n / 32
    _, cells = read(readme.GPU / "table-4.3.jsonl")
    lite = [c["err_stage3_max"] for c in cells if c["stage"] == 4 and c["precision"] == "ieee"]
    assert lite == sorted(lite)
    for cell in (c for c in cells if c["stage"] == 5):
        assert cell["err_stage3_max"] < (3e-3 if cell["precision"] == "tf32" else 1e-5)
