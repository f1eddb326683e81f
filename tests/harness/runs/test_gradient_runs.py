"""`ladder run --mode bwd|train`: what is planned, what is found wrong, and what is resumed."""

import json

import pytest
from ladder_command import RUN, YARDSTICK, by_name, fakes, in_turn

from harness.records.jsonl import read

QUICK = ("--n", "24", "--d", "8", "--budget", "20", "--memory", "400M")

# name -> how the reason begins
WRONG = {
    "grad_swaps": "dk: max error",
    "grad_without_dv": "dv: there is none, no gradient reaches v",
    "grad_ignores_do": "dq: max error",
    "grad_of_half_dk": "dk: max error",
    "grad_wrong_shape": "dk: got [1, 1, 24, 7] but expected shape compatible with [1, 1, 24, 8]",
    "grad_two_of_three": "dq, dk, dv: ",
    "grad_nan": "dv: 1 of 192 outputs are NaN or infinite",
    "grad_writes_to_do": "changed its input dO",
    "grad_writes_to_v": "changed its input v",
    "grad_remembers_inputs": "its output after v and dO changed is not the new v and dO's: dq: ",
    "grad_claimed": "o: does not require grad",
    "grad_of_a_list": "o: returned list, expected a tensor",
    "grad_too_tall": "o: returned shape (1, 1, 25, 8), expected (1, 1, 24, 8)",
}


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["bwd", "train"])
def test_stages_with_wrong_gradients_are_wrong_with_the_tensor_named(tmp_path, direction):
    """Each names the tensor; the honest ones before, between and after are unharmed."""
    out = tmp_path / "run.jsonl"
    names = (*WRONG, "grad_right", "grad_remembers")
    done = in_turn(
        *RUN, "--mode", direction, "--stages", "0,2,3", *QUICK, *fakes(*names), "--out", out
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    cells = {name: cell for name, [cell] in by_name(out).items()}
    assert all(cell["direction"] == direction for cell in cells.values())
    for name, reason in WRONG.items():
        cell = cells.pop(name)
        assert (cell["status"], cell["time_ms"]) == ("wrong", None), name
        assert cell["reason"].startswith(reason), f"{name}: {cell['reason']}"
    remembers = cells.pop("grad_remembers")
    # in a graph of its own each time, as training has it, there is nothing to remember
    if direction == "bwd":
        assert remembers["status"] == "wrong"
        assert remembers["reason"].startswith(
            "its output after dO changed is not the new dO's: dq: "
        )
    else:
        cells["grad_remembers"] = remembers
    assert {"scalar_autograd", "cpp_value_graph", YARDSTICK, "grad_right"} <= cells.keys()
    for name, cell in cells.items():
        assert (cell["status"], cell["reason"]) == ("ok", ""), name
        assert cell["time_ms"] > 0 and cell["samples"] >= 1
        assert cell["peak_bytes"] >= 0 and cell["first_call_ms"] > 0
        assert 0 < cell["err_f64_max"] < 1e-5 and 0 < cell["err_f64_rel"] < 1e-5
    assert cells[YARDSTICK]["err_stage3_max"] == cells[YARDSTICK]["err_stage3_rel"] == 0


def test_the_errors_are_the_largest_of_all_outputs(tmp_path):
    """Half of dk is an error of a half, whatever dq and dv are."""
    out = tmp_path / "run.jsonl"
    in_turn(*RUN, "--mode", "bwd", "--stages", 3, *QUICK, *fakes("grad_of_half_dk"),
           "--out", out)  # fmt: skip
    [cell] = by_name(out)["grad_of_half_dk"]
    assert cell["err_f64_rel"] == pytest.approx(0.5, rel=1e-5)
    assert cell["err_stage3_rel"] == pytest.approx(0.5, rel=1e-5)
    assert cell["err_f64_max"] > 0.01


def test_a_forward_run_of_a_stage_with_wrong_gradients_is_ok(tmp_path):
    out = tmp_path / "run.jsonl"
    done = in_turn(*RUN, "--stages", 3, *QUICK, *fakes("grad_swaps"), "--out", out)
    assert done.returncode == 0, done.stderr
    assert [cell["status"] for cell in by_name(out)["grad_swaps"]] == ["ok"]


@pytest.mark.slow
def test_only_stages_with_gradients_are_planned_and_named_ones_say_why_they_are_skipped(tmp_path):
    """A stage of one's own is named by its file."""
    plain, named = tmp_path / "plain.jsonl", tmp_path / "named.jsonl"
    small = ("--n", "4", "--d", "4")
    done = in_turn(*RUN, "--mode", "train", *small, *fakes("modest"), "--out", plain)
    assert done.returncode == 0, done.stderr
    cells = by_name(plain)
    assert {"scalar_autograd", "cpp_value_graph", YARDSTICK, "modest"} <= cells.keys()
    assert not {"raw_python", "triton_lite", "triton_online"} & cells.keys()
    assert (cells["modest"][0]["status"], cells["modest"][0]["reason"]) == (
        "skipped", "carries no gradients",
    )  # fmt: skip
    done = in_turn("run", "--mode", "bwd", "--stages", "1,3", *small, "--out", named)
    assert done.returncode == 0, done.stderr
    cells = by_name(named)
    assert cells.keys() == {"raw_python", YARDSTICK}
    assert [cell["reason"] for cell in cells["raw_python"]] == ["carries no gradients"]
    assert "skipped #1: carries no gradients" in done.stdout
    assert "bwd time" in done.stdout and ", bwd, cpu" in done.stdout


@pytest.mark.slow
def test_ratios_in_turns_are_those_of_the_direction(tmp_path):
    out = tmp_path / "run.jsonl"
    done = in_turn(
        *RUN, "--mode", "bwd", "--stages", "0,1,3", "--n", 8, "--d", 4, "--paired",
        *fakes("grad_swaps"), "--out", out,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    cells = by_name(out)
    assert [cell["paired"] for cell in cells[YARDSTICK]] == [False, True]
    for name in ("scalar_autograd", YARDSTICK):
        assert [cell["status"] for cell in cells[name]] == ["ok", "ok"]
    assert [cell["status"] for cell in cells["raw_python"]] == ["skipped", "skipped"]
    assert [cell["status"] for cell in cells["grad_swaps"]] == ["wrong", "skipped"]


@pytest.mark.slow
def test_a_run_is_resumed_in_its_direction(tmp_path):
    path = tmp_path / "run.jsonl"
    arguments = ("run", "--mode", "bwd", "--stages", "3", "--n", "8,16", "--d", "4")
    assert in_turn(*arguments, "--out", path).returncode == 0
    first, *cells = path.read_bytes().splitlines(keepends=True)
    assert json.loads(first)["arguments"]["mode"] == "bwd"
    path.write_bytes(first + cells[0])
    done = in_turn("run", "--resume", path)
    assert done.returncode == 0, done.stderr
    found = read(path)[1]
    assert [cell["nk"] for cell in found] == [8, 16]
    assert {cell["direction"] for cell in found} == {"bwd"}
    path.write_bytes(first + cells[0])
    done = in_turn("run", "--resume", path, "--mode", "train")
    assert done.returncode == 2
    assert done.stderr.startswith("ladder: --resume: --mode was bwd")


@pytest.mark.slow
def test_one_key_has_no_gradient_but_v_s(tmp_path):
    """dq and dk are 0, and stages compute the rounding of what cancels: honest all the same."""
    out = tmp_path / "run.jsonl"
    done = in_turn("run", "--mode", "train", "--stages", "0,2,3", "--n", 1, "--nq", 5,
                  "--out", out)  # fmt: skip
    assert done.returncode == 0, done.stdout
    for name, [cell] in by_name(out).items():
        assert cell["status"] == "ok", name
        assert cell["err_f64_rel"] < 1e-5
