"""`ladder run` without any option is the tour: what a newcomer sees, and no more than fits."""

import json
import subprocess
import sys

import pytest
from ladder_command import PATIENCE, ROOT, environ

PLAN = """
import json, sys
from harness.commands.run import DEFAULTS, make_cells
from harness.isolation.roster import read_stages

if __name__ == "__main__":
    stages = [stage for stage in read_stages() if stage.number < 100]
    for asked in json.loads(sys.argv[1]):
        cells = make_cells({**DEFAULTS, **asked}, stages, "cpu")
        print(json.dumps([cell.to_json() for cell in cells]))
"""


ASKED = {
    "tour": {},
    "described": {"n": "8,16", "nq": 1, "seed": 5},
    "far": {"n": "4096"},
    "real": {"inputs": "real", "n": "64"},
}


@pytest.fixture(scope="module")
def plans():
    """name in ASKED -> the cells that `ladder run` plans on a CPU, as the env line has them."""
    done = subprocess.run(
        [sys.executable, "-c", PLAN, json.dumps(list(ASKED.values()))],
        cwd=ROOT,
        env=environ(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(ASKED, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture
def tour(plans):
    return plans["tour"]


def test_the_tour_is_the_designs(tour):
    # stages from 6 on, once they are there, are the GPU's
    got = {(c["inputs"], c["d"], c["nk"], c["stage"]) for c in tour if c["stage"] <= 5}
    small = {("normal", 16, n, stage) for n in (8, 16, 32, 64) for stage in range(6)}
    large = {("normal", 64, n, stage) for n in (64, 128, 256, 512, 1024) for stage in (3, 4, 5)}
    real = {("real", 32, n, stage) for n in (128, 256, 512) for stage in (3, 4, 5)}
    assert got >= small | large | real
    # stage 2 may go on to where stage 3 leaves it behind
    assert {(n <= 256, stage) for _, _, n, stage in got - small - large - real} <= {(True, 2)}
    assert len(tour) == len({json.dumps(cell) for cell in tour})


def test_the_tour_is_one_seed_and_plain_otherwise(tour):
    for cell in tour:
        assert (cell["b"], cell["h"], cell["hk"]) == (1, 1, 1)
        assert cell["nq"] == cell["nk"]
        assert (cell["dtype"], cell["precision"], cell["direction"]) == ("float32", "ieee", "fwd")
        assert (cell["causal"], cell["seqlens_k"], cell["device"]) == (False, None, "cpu")
        assert not cell["paired"]
    assert len({cell["seed"] for cell in tour}) == 1


def test_a_described_problem_is_one_cell_a_stage_and_n(plans):
    cells = plans["described"]
    assert len(cells) == 2 * len({cell["stage"] for cell in cells})
    assert {(c["nk"], c["nq"], c["d"], c["seed"], c["inputs"]) for c in cells} == {
        (8, 1, 64, 5, "normal"), (16, 1, 64, 5, "normal")
    }  # fmt: skip
    assert {cell["stage"] for cell in cells} >= set(range(6))
    # asked for by name is tried, whatever a stage calls worth its while
    assert {cell["stage"] for cell in plans["far"]} >= set(range(6))


def test_real_inputs_have_their_own_width(plans):
    assert {(cell["d"], cell["nk"]) for cell in plans["real"]} == {(32, 64)}
