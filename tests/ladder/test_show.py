"""`ladder show` of records of every kind, and the old words that do the same."""

import csv
import io
import json
import re

import pytest
from ladder_command import ROOT, in_turn
from made_up import make_cell, make_env, write_run

from harness.records.jsonl import read
from ladder import old

H200 = ROOT / "results" / "h200"
CPU = ROOT / "results" / "cpu"
CEILINGS = H200 / "ceilings.jsonl"
# a committed record of each kind -> what its tables hold; a plot of it
RECORDS = {
    "h200/table-4.4": ("vs before", "time.png"),
    "h200/bench-steps": ("3 torch, three GEMMs", "latency.png"),
    "h200/train": ("off by", "loss.png"),
    "h200/generate": ("bytes/token,", "generate.png"),
    "h200/model-float32": ("MiniLM, 16 tokens", None),
    "h200/ceilings": ("float16 product, 8192^3", None),
    "h200/io": ("moved/pred.", "traffic.png"),
    "h200/hopper-timeline": ("tile_cycles", "timeline.png"),
    "h200/sanitizer": ("racecheck", None),
    "h200/hopper-product": ("product_ms", None),
    "cpu/hopper-loops": ("registers", None),
    "cpu/pitfalls": ("rows_wrong", None),
}


def shown(*words, cwd=ROOT, code=0):
    """What `ladder WORDS` prints."""
    done = in_turn(*words, cwd=cwd)
    assert (done.returncode, done.stderr) == (code, ""), done.stderr
    return done.stdout


@pytest.mark.parametrize("name", RECORDS)
def test_records_of_each_kind_are_shown(name, tmp_path):
    said, picture = RECORDS[name]
    file = ROOT / "results" / f"{name}.jsonl"
    plot = () if picture is None else ("--plot", tmp_path)
    assert said in shown("show", file, *plot)
    if picture is not None:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    records = read(file, None)[1]
    assert len(json.loads(shown("show", file, "--format", "json"))) == len(records)
    rows = list(csv.DictReader(io.StringIO(shown("show", file, "--format", "csv"))))
    assert len(rows) == len(records)
    lines = shown("show", file, "--format", "markdown").splitlines()
    assert any(re.fullmatch(r"\|(-+:?\|)+", line) for line in lines)


def test_the_table_of_generate_fits_80_columns_with_each_heading_whole():
    file = H200 / "generate.jsonl"
    _, *lines = shown("show", file).splitlines()
    first = next(at for at, line in enumerate(lines) if line.split()[0] == "256")
    assert max(len(line.rstrip()) for line in lines[: first + 3]) <= 80
    ends = [found.end() for found in re.finditer(r"\S+( MB)?", lines[first])]
    parts = [[line[start:end].strip() for line in lines[:first]]
             for start, end in zip([0, *ends], ends)]  # fmt: skip
    heads = shown("show", file, "--format", "markdown").splitlines()[2].strip("| ").split(" | ")
    assert [" ".join(filter(None, each)) for each in parts] == heads


def test_several_files_are_shown_one_after_the_other():
    first, second = H200 / "sanitizer.jsonl", H200 / "ceilings.jsonl"
    together = shown("show", first, second)
    assert together == f"{first}\n\n{shown('show', first)}{second}\n\n{shown('show', second)}"


def test_the_roofline_has_its_table_and_its_picture(tmp_path):
    words = ("show", H200 / "tour.jsonl", "--roofline", tmp_path, "--ceilings", CEILINGS, "--dark")
    assert "% of the roof" in shown(*words)
    assert [path.name for path in tmp_path.iterdir()] == ["roofline-dark.png"]


def test_ceilings_are_for_shares_of_the_matrix_rate():
    file = H200 / "bench-004.jsonl"
    assert "of the measured matrix" in shown("show", file, "--ceilings", CEILINGS)
    assert "of the measured matrix" not in shown("show", file)


# ---- the old words


def test_a_table_of_old_is_what_show_prints(tmp_path):
    cells = [make_cell()]
    run = write_run(tmp_path / "run.jsonl", make_env(cells), cells)
    for options in ((), ("--format", "csv"), ("--format", "markdown")):
        assert shown("table", run, *options) == shown("show", run, *options)


def test_plots_of_old_are_named_one_a_line(tmp_path):
    plots = tmp_path / "plots"
    said = shown("plot", CPU / "masks.jsonl", "--out", plots).splitlines()
    assert sorted(said) == sorted(map(str, plots.iterdir())) and len(said) == 3


@pytest.mark.slow
def test_bench_show_of_old_writes_its_csv_and_plots(tmp_path):
    file, table = H200 / "bench-steps.jsonl", tmp_path / "t.csv"
    said = shown("bench", "--show", file, "--out", table, "--plots", tmp_path / "plots",
                 f"--ceilings={CEILINGS}")  # fmt: skip
    assert said.startswith(shown("show", file, "--ceilings", CEILINGS))
    assert f"records: {file}\ncsv:     {table}\nplots:   {tmp_path}" in said
    assert table.read_text() == shown("show", file, "--format", "csv")
    assert shown("bench", f"--show={file}").startswith(shown("show", file))


@pytest.mark.parametrize(
    ("typed", "now"),
    [("run --direction bwd --n 8", "run --mode bwd --n 8"),
     ("run --direction=bwd", "run --mode=bwd"),
     ("bench --impl 3 --plots p", "bench --stages 3 --plot p"),
     ("run --causal --n 8", "run --causal=on --n 8"), ("run --causal", "run --causal=on"),
     ("trace --causal", "trace --causal=on"), ("run --causal both", "run --causal both"),
     ("train --show f", "train --show --show f"), ("lab start 5", "lab start 5")],
)  # fmt: skip
def test_old_words_are_read_as_todays(typed, now):
    assert " ".join(old.as_now(typed.split())) == now


@pytest.mark.parametrize(
    ("kept", "today"),
    [({"direction": "bwd", "causal": True, "nq": 4}, {"mode": "bwd", "causal": "on", "nq": "4"}),
     ({"direction": "fwd", "causal": False, "nq": None},
      {"mode": "fwd", "causal": "off", "nq": None}),
     ({"mode": None, "causal": None, "impl": "3,5", "stages": None}, {"stages": "3,5"}),
     ({"mode": "fwd,bwd", "causal": "both", "impl": None, "stages": "3"},
      {"mode": "fwd,bwd", "causal": "both", "stages": "3"})],
)  # fmt: skip
def test_arguments_of_older_files_are_read_by_todays_names(kept, today):
    assert old.arguments(kept) == today == old.arguments(today)
