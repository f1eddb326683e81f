"""`ladder run --mode bwd|train`: what is planned, and what is found wrong."""

import pytest
from ladder_command import RUN, YARDSTICK, fakes, measured

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
    names = (*WRONG, "grad_right", "grad_remembers")
    asked = (*RUN, "--mode", direction, "--stages", "0,2,3", *QUICK)
    _, found = measured(tmp_path, *asked, *fakes(*names), code=1)
    cells = {name: cell for name, [cell] in found.items()}
    assert all(cell["direction"] == direction for cell in cells.values())
    # of half of dk the error is a half, whatever dq and dv are
    half = cells["grad_of_half_dk"]
    assert half["err_f64_rel"] == pytest.approx(0.5, rel=1e-5) and half["err_f64_max"] > 0.01
    assert half["err_stage3_rel"] == pytest.approx(0.5, rel=1e-5)
    expected = {**WRONG}
    if direction == "bwd":  # training has a graph of its own each time: nothing to remember
        expected["grad_remembers"] = "its output after dO changed is not the new dO's: dq: "
    for name, reason in expected.items():
        cell = cells.pop(name)
        assert (cell["status"], cell["time_ms"]) == ("wrong", None), name
        assert cell["reason"].startswith(reason), f"{name}: {cell['reason']}"
    assert {"scalar_autograd", "cpp_value_graph", YARDSTICK, "grad_right"} <= cells.keys()
    for name, cell in cells.items():
        assert (cell["status"], cell["reason"]) == ("ok", ""), name
        assert cell["time_ms"] > 0 and cell["samples"] >= 1
        assert cell["peak_bytes"] >= 0 and cell["first_call_ms"] > 0
        assert 0 < cell["err_f64_max"] < 1e-5 and 0 < cell["err_f64_rel"] < 1e-5
    assert cells[YARDSTICK]["err_stage3_max"] == cells[YARDSTICK]["err_stage3_rel"] == 0


@pytest.mark.slow
def test_a_forward_run_of_a_stage_with_wrong_gradients_is_ok(tmp_path):
    _, cells = measured(tmp_path, *RUN, "--stages", 3, *QUICK, *fakes("grad_swaps"))
    assert [cell["status"] for cell in cells["grad_swaps"]] == ["ok"]


@pytest.mark.slow
def test_only_stages_with_gradients_are_planned_and_named_ones_say_why_they_are_skipped(tmp_path):
    """A stage of one's own is named by its file."""
    small = ("--n", "4", "--d", "4")
    _, cells = measured(tmp_path, *RUN, "--mode", "train", *small, *fakes("modest"))
    assert {"scalar_autograd", "cpp_value_graph", YARDSTICK, "modest"} <= cells.keys()
    assert not {"raw_python", "triton_lite", "triton_online"} & cells.keys()
    assert [(cell["status"], cell["reason"]) for cell in cells["modest"]] == [
        ("skipped", "carries no gradients")
    ]
    done, cells = measured(tmp_path, "run", "--mode", "bwd", "--stages", "1,3", *small)
    assert cells.keys() == {"raw_python", YARDSTICK}
    assert [cell["reason"] for cell in cells["raw_python"]] == ["carries no gradients"]
    assert "skipped #1: carries no gradients" in done.stdout
    assert "bwd time" in done.stdout and ", bwd, cpu" in done.stdout


@pytest.mark.slow
def test_ratios_in_turns_are_those_of_the_direction(tmp_path):
    asked = (*RUN, "--mode", "bwd", "--stages", "0,1,3", "--n", 8, "--d", 4, "--paired")
    _, cells = measured(tmp_path, *asked, *fakes("grad_swaps"), code=1)
    assert [cell["paired"] for cell in cells[YARDSTICK]] == [False, True]
    statuses = {name: [cell["status"] for cell in of_one] for name, of_one in cells.items()}
    assert statuses == {
        "scalar_autograd": ["ok", "ok"], YARDSTICK: ["ok", "ok"],
        "raw_python": ["skipped", "skipped"], "grad_swaps": ["wrong", "skipped"],
    }  # fmt: skip


@pytest.mark.slow
def test_one_key_has_no_gradient_but_v_s(tmp_path):
    """dq and dk are 0, and stages compute the rounding of what cancels: honest all the same."""
    _, found = measured(
        tmp_path, "run", "--mode", "train", "--stages", "0,2,3", "--n", 1, "--nq", 5
    )
    for name, [cell] in found.items():
        assert cell["status"] == "ok" and cell["err_f64_rel"] < 1e-5, name
