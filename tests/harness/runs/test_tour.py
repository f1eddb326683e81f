"""`ladder run` without any option is the tour: what a newcomer sees, and no more than fits."""

import json
import os
import subprocess

import pytest
from ladder_command import environ, in_turn
from made_up import make_cell, make_env

from harness.isolation.roster import describe_files, read_stages
from harness.problems.problem import Problem
from harness.records.code import STAGES
from harness.runs.plan import plan_tour
from ladder.closing import closing
from ladder.run import DEFAULTS, make_cells

ASKED = {
    "tour": {},
    "described": {"n": "8,16", "nq": "1", "seed": 5},
    "far": {"n": "4096"},
    "real": {"inputs": "real", "n": "64"},
    "several": {"n": "8", "nq": "1,8", "causal": "both", "mode": "fwd,train"},
    "train": {"mode": "train"},
    "named": {"n": "8", "mode": "bwd", "stages": "all that there are"},
}


@pytest.fixture(scope="module")
def plans():
    """name in ASKED -> the cells that `ladder run` plans on a CPU, as the env line has them."""
    stages = [stage for stage in read_stages() if stage.number < 100]
    planned = {
        name: make_cells({**DEFAULTS, **asked}, stages, "cpu") for name, asked in ASKED.items()
    }
    return {name: [cell.to_json() for cell in cells] for name, cells in planned.items()}


@pytest.fixture
def planned(plans):
    return plans["tour"]


def test_the_tour_is_the_designs(planned):
    # stages from 6 on, once they are there, are the GPU's
    got = {(c["inputs"], c["d"], c["nk"], c["stage"]) for c in planned if c["stage"] <= 5}
    small = {("normal", 16, n, stage) for n in (8, 16, 32, 64) for stage in range(6)}
    large = {("normal", 64, n, stage) for n in (64, 128, 256, 512, 1024) for stage in (3, 4, 5)}
    real = {("real", 32, n, stage) for n in (128, 256, 512) for stage in (3, 4, 5)}
    far = {("normal", 64, n, stage) for n in (2048, 4096) for stage in (3, 4, 5)}
    assert got >= small | large | real | far
    # stage 2 may go on to where stage 3 leaves it behind
    assert {(n <= 256, stage) for _, _, n, stage in got - small - large - real - far} <= {(True, 2)}
    # there 4 and 5 are those in torch: interpreted ones would take minutes
    names = {c["name"] for c in planned if c["nk"] > 1024 and c["stage"] in (4, 5)}
    assert names == {"torch_lite", "torch_online"}
    assert len(planned) == len({json.dumps(cell) for cell in planned})


@pytest.mark.parametrize(("device", "up_to"), [("cpu", 64), ("cuda", 16384)])
def test_stage_8_takes_the_whole_tour_of_a_gpu_and_the_small_part_of_a_cpus(device, up_to):
    """A tour has one head, which it splits; interpreted, the parts take long."""
    [stage] = describe_files([STAGES / "s08_triton_split_kv"])
    base = Problem("normal", 0, 1, 1, 1, 1, 1, 1, "float32", "ieee", False, None, device)
    assert max(cell.problem.nk for cell in plan_tour([stage], base)) == up_to


def test_the_tour_is_one_seed_and_plain_otherwise(planned):
    for cell in planned:
        assert (cell["b"], cell["h"], cell["hk"]) == (1, 1, 1)
        assert cell["nq"] == cell["nk"]
        assert (cell["dtype"], cell["precision"], cell["direction"]) == ("float32", "ieee", "fwd")
        assert (cell["causal"], cell["seqlens_k"], cell["device"]) == (False, None, "cpu")
        assert not cell["paired"]
    assert len({cell["seed"] for cell in planned}) == 1


def test_a_described_problem_is_one_cell_a_stage_and_n(plans):
    cells = plans["described"]
    assert len(cells) == 2 * len({(cell["stage"], cell["name"]) for cell in cells})
    assert {(c["nk"], c["nq"], c["d"], c["seed"], c["inputs"]) for c in cells} == {
        (8, 1, 64, 5, "normal"), (16, 1, 64, 5, "normal")
    }  # fmt: skip
    assert {cell["stage"] for cell in cells} >= set(range(6))
    # asked for by name is tried, whatever a stage calls worth its while
    assert {cell["stage"] for cell in plans["far"]} >= set(range(6))


def test_real_inputs_have_their_own_width(plans):
    assert {(cell["d"], cell["nk"]) for cell in plans["real"]} == {(32, 64)}


def test_each_mode_mask_and_number_of_queries_is_a_problem_of_its_own(plans):
    cells = plans["several"]
    asked = {(mode, causal, nq) for mode in ("fwd", "train") for causal in (False, True)
             for nq in (1, 8)}  # fmt: skip
    assert {(c["direction"], c["causal"], c["nq"]) for c in cells} == asked
    taught = {mode: {c["stage"] for c in cells if c["direction"] == mode} for mode, *_ in asked}
    assert taught["train"] < taught["fwd"] and 1 not in taught["train"]  # which has no gradients
    assert {c["stage"] for c in plans["train"]} <= taught["train"]
    assert {c["direction"] for c in plans["train"]} == {"train"}
    assert {c["stage"] for c in plans["named"]} == taught["fwd"]


# ---- how it ends


def sized(n, **changes):
    return {"nq": n, "nk": n, "flops": 4 * n * n * 64, **changes}


def ended(*cells):
    """The closing lines of a run of `cells`; stage 4 is declared exact up to 64 keys."""
    env = make_env(cells)
    for stage in env["rungs"]:
        stage["exact_up_to"] = 64 if stage["stage"] == 4 else None
        stage["few_queries"] = stage["stage"] == 8
    return closing(env | {"plan": cells}, cells)


def test_the_fastest_is_found_at_one_problem_among_exact_rows_alone():
    small = [make_cell(1, "raw_python", **sized(64, time_ms=1.0)),
             make_cell(3, "torch_three_gemm", **sized(64, time_ms=2.0))]  # fmt: skip
    # stage 3 alone at a larger problem is compared with nobody
    large = make_cell(3, "torch_three_gemm", **sized(512, time_ms=0.1))
    first = ended(*small, large)[0]
    assert "1 raw_python, 1 ms and 3 MB, ~2x as fast as 3 torch_three_gemm (3 MB)" in first
    assert "N = 64, d = 64" in first and "interpreted" not in first
    faster = {"time_ms": 0.01}
    for stage, changes in (
        (4, {}),  # exact here, and not at any N
        (5, {"mode": "interpreted"}), (5, {"status": "wrong"}), (5, {"status": "timeout"}),
        (100, {}),  # a peer
    ):  # fmt: skip
        rival = make_cell(stage, "rival", **sized(64, **faster, **changes))
        line = ended(*small, large, rival)[0]
        assert "1 raw_python, 1 ms" in line
        assert ("(interpreted, so not compared: stage 5)" in line) == ("mode" in changes)
    assert "5 rival, 10 us" in ended(*small, make_cell(5, "rival", **sized(64, **faster)))[0]
    fused = [make_cell(n, "fused", **sized(64, time_ms=0.01 * n)) for n in (6, 7)]
    assert "~33x as fast as 3 torch_three_gemm" in ended(*small, *fused)[0]
    assert "~1.7x as fast as 6 fused" in ended(*fused, small[1] | {"time_ms": 0.035})[0]
    assert "none" in ended(make_cell(5, "rival", **sized(64, status="wrong")))[0]


def test_a_stage_that_did_not_run_is_not_called_interpreted():
    """A stage that needs a GPU of one generation is skipped on a CPU, in whichever mode."""
    ran = [make_cell(3, "torch_three_gemm", **sized(64, time_ms=1.0)),
           make_cell(5, "online", **sized(64, time_ms=9.0, mode="interpreted"))]  # fmt: skip
    left_out = make_cell(
        9,
        "hopper",
        **sized(64, time_ms=None, mode="interpreted", status="skipped", reason="no GPU"),
    )
    first, _, third = ended(*ran, left_out)
    assert "(interpreted, so not compared: stage 5)" in first and "stage 9 (no GPU)" in third


def test_where_it_broke_is_in_the_records():
    cells = [
        make_cell(4, "lite", **sized(n, status="ok" if n <= 64 else "wrong-by-design",
                                     err_f64_max=error))
        for n, error in ((32, 1e-7), (64, 2e-7), (128, 0.5), (512, 2.25))
    ]  # fmt: skip
    assert ended(*cells)[1] == (
        "Where it broke: 4 lite is exact up to N = 64, wrong at N = 128, the next measured: off by "
        "0.5 there, by 2.2 at N = 512."
    )
    other = make_cell(4, "lite", **sized(96, status="timeout"))
    assert "is exact up to N = 64, wrong at N = 128, the next measured" in ended(*cells, other)[1]
    assert ended(*cells[:2])[1] == "Where it broke: nowhere."
    crash = make_cell(5, "online", **sized(64, status="crashed"))
    assert "failed, and not on purpose: stage 5" in ended(*cells, crash)[1]


def test_what_was_skipped_or_spared_is_said_with_the_reason():
    cells = [make_cell(3, "yardstick", **sized(n)) for n in (64, 1024)]
    cells += [make_cell(stage, f"s{stage}", **sized(64)) for stage in (0, 1)]
    cells.append(make_cell(7, "training", **sized(512)))
    none = [make_cell(stage, f"s{stage}", **sized(1024, status="skipped", reason="no triton"))
            for stage in (4, 5)]  # fmt: skip
    line = ended(*cells, *none)[2]
    assert line == (
        "Skipped: stages 4, 5 (no triton); stages 0, 1 above N = 64, stage 7 above N = 512 (too "
        "slow here)."
    )
    decoding = make_cell(8, "split", **sized(64))
    assert ended(*cells, decoding)[2] == (
        "Skipped: stages 0, 1 above N = 64, stage 7 above N = 512 (too slow here); stage 8 above "
        "N = 64 (made for few query rows)."
    )
    assert ended(*cells[:2])[2] == "Skipped: nothing."


@pytest.mark.slow
def test_the_tour_ends_with_what_was_seen_and_what_is_next(tmp_path):
    """Here of two stages, so that it is short."""
    done = in_turn("run", "--stages", "3,4", "--device", "cpu", "--out", tmp_path / "tour.jsonl")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[-5:]] == [
        "Fastest exact stage", "Where it broke", "Skipped", "Next, what mends stage 4",
        "Stage by stage",
    ]  # fmt: skip
    typed = lines[-2].partition(": ")[2]  # works as it is, in a shell that has no ladder
    bare = {**environ(), "PATH": os.defpath}
    shown = subprocess.run(typed, shell=True, env=bare, capture_output=True, text=True)
    assert shown.returncode == 0 and "m_new" in shown.stdout, shown.stderr


def test_a_stage_that_the_tour_has_no_problem_for_is_named(tmp_path):
    """That of several ranks, and a peer that stands beside it only where it is asked for."""
    asked = "run", "--stages", "1,10,104", "--device", "cpu", "--out"
    done = in_turn(*asked, tmp_path / "tour.jsonl")
    assert done.returncode == 0 and "no problem for stages 10, 104" in done.stderr
    assert "mends" not in done.stdout, "stage 4 wasn't seen"
    named = in_turn(*asked, tmp_path / "named.jsonl", "--n", 8)
    assert named.returncode == 0 and "no problem" not in named.stderr


@pytest.mark.slow
def test_a_run_of_a_problem_ends_with_its_records(tmp_path):
    for options in (("--n", 8), ("--n", 8, "--stages", 3)):
        out = tmp_path / f"{len(options)}.jsonl"
        done = in_turn("run", "--stages", 3, *options, "--out", out)
        assert done.stdout.splitlines()[-1].startswith("records: ")
