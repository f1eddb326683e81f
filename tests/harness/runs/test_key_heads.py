"""`--hk` and `--seqlens` of `ladder run` and `ladder bench`: grouped heads, and padded keys."""

from itertools import chain

import pytest
from ladder_command import RUN, fakes, measured
from marks import quickly

from harness.problems import cost
from harness.problems.problem import Problem

GROUPED = ("--n", "8,16", "--d", 8, "--h", 4, "--hk", 2)
PADDED = ("--n", "16,24", "--d", 8, "--b", 2, "--seqlens", "5,16")


@pytest.mark.parametrize("direction", quickly(1, ["fwd", "train"]))
@pytest.mark.parametrize(
    ("options", "asked", "reason"),
    [
        (GROUPED, {"h": 4, "hk": 2, "b": 1, "seqlens_k": None}, "takes no gqa"),
        (PADDED, {"h": 1, "hk": 1, "b": 2, "seqlens_k": [5, 16]}, "takes no seqlens_k"),
    ],
)
def test_stages_take_it_or_say_that_they_do_not(tmp_path, options, asked, reason, direction):
    asked_for = ("run", "--stages", "0,3,7", *options, "--mode", direction, "--device", "cpu")
    done, cells = measured(tmp_path, *asked_for, "--paired")
    assert {cell["stage"] for [cell, *_] in cells.values()} == {0, 3, 7}
    for cell in chain(*cells.values()):
        assert {name: cell[name] for name in asked} == asked
        assert cell["flops"] == cost.flops(Problem.from_json(cell))
        if cell["stage"] == 0 and not cell["paired"]:
            assert (cell["status"], cell["reason"].startswith(reason)) == ("skipped", True)
        if cell["stage"] != 0 and not cell["paired"]:
            assert (cell["status"], cell["reason"]) == ("ok", "")
    assert ("hk = 2" in done.stdout) == (asked["hk"] == 2)
    assert ("padded: 5, 16 valid keys" in done.stdout) == (asked["b"] == 2)


def test_a_stage_that_reads_past_the_valid_keys_is_wrong(tmp_path):
    """The judge's oracle knows the lengths."""
    for options, status, code in ((PADDED, "wrong", 1), (GROUPED, "ok", 0)):
        mine = fakes("ignores_lengths")
        _, cells = measured(tmp_path, *RUN, "--stages", 3, *options, *mine, code=code)
        assert {cell["status"] for cell in cells["ignores_lengths"]} == {status}


@pytest.mark.slow
def test_the_rounds_of_a_bench_take_both(tmp_path):
    bench = ("bench", "--device", "cpu", "--n", 16, "--d", 8, "--hk", 2, "--h", 4, "--repeat", 3)
    padded = ("--b", 2, "--seqlens", "5,16", "--mode", "fwd,train")
    done, cells = measured(tmp_path, *bench, *padded)
    for record in chain(*cells.values()):
        assert (record["b"], record["h"], record["hk"], record["nk"]) == (2, 4, 2, 16)
        assert record["seqlens_k"] == [5, 16] and record["status"] == "ok"
    # who takes no lengths takes no part unless asked for
    assert {record["stage"] for [record, *_] in cells.values()} == {3, 6, 7}
    text = " ".join(done.stdout.split())
    assert "hk = 2, float32" in text and "padded: 5, 16 valid keys" in text
    _, cells = measured(tmp_path, *bench, "--b", 1, "--causal", "off", "--stages", "3,5,104")
    statuses = {record["stage"]: record["status"] for [record, *_] in cells.values()}
    assert statuses == {3: "ok", 5: "skipped", 104: "ok"}
    # the batch may follow from the tokens: a length for each of the 256 / 128 entries
    tokens = ("--n", 128, "--tokens", 256, "--d", 8, "--h", 1, "--seqlens", "3,128")
    asked = ("--dtype", "float32", "--stages", 3, "--causal", "off", "--repeat", 3)
    _, cells = measured(tmp_path, "bench", *tokens, *asked)  # the device is left to the machine
    assert {cell["status"] for cell in chain(*cells.values())} == {"ok"}


@pytest.mark.slow
def test_memory_is_measured_after_a_warm_up_that_takes_the_lengths(tmp_path):
    """What a stage sets up once is no call's memory, on a padded problem as on any other."""
    asked = (*RUN, "--stages", 3, "--n", 16, "--b", 2, "--device", "cpu")
    for options in ((), ("--seqlens", "16,16")):
        _, cells = measured(tmp_path, *asked, *options, *fakes("sets_up_once"))
        assert cells["sets_up_once"][0]["peak_bytes"] < 20 << 20
