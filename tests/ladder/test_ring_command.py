"""`ladder ring` on a CPU: several processes compute one attention, checked and without a speed."""

import json
import subprocess

import pytest
from ladder_command import FAKES, PATIENCE, ROOT, by_name, command, environ, in_turn

from harness.records.jsonl import read

ASKED = ("ring", "--device", "cpu", "--warmup", "1", "--repeat", "2")
RIGHT = {"ring", "ring_in_order", "ring_in_turn", "ring_group", "gather", "ulysses", "one_gpu"}
ON_GPUS = {"ring_engine", "context_parallel_allgather", "context_parallel_alltoall"}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two commands at once: of 2 and of 3 ranks. Their files and what they printed, by ranks."""
    folder, started = tmp_path_factory.mktemp("ring"), {}
    naps = FAKES.write(folder, "naps")
    for world, more in (
        (2, ("--mode", "train", "--causal", "on", "--hk", "2", "--h", "4", "--stage", naps)),
        (3, ("--h", "6")),
    ):
        asked = (*ASKED, "--world", world, "--n", 48, *more, "--out", folder / f"{world}.jsonl")
        started[world] = subprocess.Popen(
            command(*asked), cwd=ROOT, env=environ(), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    found = {}
    for world, process in started.items():
        printed, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0 and "Traceback" not in printed, printed
        found[world] = folder / f"{world}.jsonl", printed
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_all_that_runs_here_is_right_and_shows_no_speed(two, world):
    path, printed = two[world]
    cells = by_name(path)
    assert cells.keys() == RIGHT | ON_GPUS | ({"naps"} if world == 2 else set())
    for alone in cells.pop("naps", ()):  # a user's own, for one process
        assert alone["status"] == "skipped" and alone["reason"].startswith("takes no ")
    for name, group in cells.items():
        assert [cell["causal"] for cell in group] == ([True] if world == 2 else [True, False]), name
        for cell in group:
            assert (cell["world"], cell["nk"], cell["paired"]) == (world, 48, True)
            assert cell["direction"] == ("train" if world == 2 else "fwd")
            assert cell["status"] == ("ok" if name in RIGHT else "skipped"), cell["reason"]
            assert cell["time_ms"] is cell["x_one_gpu"] is cell["link_gb_s"] is None
            assert cell["reason"].startswith("no speed" if name in RIGHT else "computes on a GPU")
    assert "no speed: these processes share the cores of one CPU" in printed


@pytest.mark.slow
def test_show_prints_the_records_again(two):
    path, _ = two[2]
    done = in_turn("show", path)
    assert done.returncode == 0 and "2 ranks" in done.stdout and "Ulysses" in done.stdout


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(two, tmp_path):
    lines = two[3][0].read_text().splitlines(keepends=True)
    path = tmp_path / "half.jsonl"
    path.write_text("".join(lines[:14]))  # the first problem's ten, and three of the second's
    done = in_turn("ring", "--resume", path)
    assert done.returncode == 0, done.stderr
    again = [(cell["name"], cell["causal"], cell["status"]) for cell in read(path)[1]]
    whole = [json.loads(line) for line in lines[1:]]
    assert again == [(cell["name"], cell["causal"], cell["status"]) for cell in whole]


def test_prediction_measures_nothing():
    done = in_turn("ring", "--predict", "--h", "128", "--hk", "8", "--d", "64,128")
    assert done.returncode == 0
    assert all(f"128 heads, 8 of keys, d = {d}" in done.stdout for d in (64, 128))
    assert "NVLink" in done.stdout and "1024" in done.stdout
