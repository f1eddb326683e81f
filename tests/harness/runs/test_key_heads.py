"""`--hk` and `--seqlens` of `ladder run` and `ladder bench`: grouped heads, and padded keys."""

import pytest
from ladder_command import RUN, by_name, in_turn

from harness.problems import cost
from harness.problems.problem import Problem
from harness.records.jsonl import read

GROUPED = ("--n", "8,16", "--d", 8, "--h", 4, "--hk", 2)
PADDED = ("--n", "16,24", "--d", 8, "--b", 2, "--seqlens", "5,16")


@pytest.mark.parametrize("direction", ["fwd", pytest.param("train", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("options", "asked", "reason"),
    [
        (GROUPED, {"h": 4, "hk": 2, "b": 1, "seqlens_k": None}, "takes no gqa"),
        (PADDED, {"h": 1, "hk": 1, "b": 2, "seqlens_k": [5, 16]}, "takes no seqlens_k"),
    ],
)
def test_stages_take_it_or_say_that_they_do_not(tmp_path, options, asked, reason, direction):
    out = tmp_path / "run.jsonl"
    done = in_turn("run", "--stages", "0,3,7", *options, "--mode", direction, "--device",
                   "cpu", "--paired", "--out", out)  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, cells = read(out)
    assert {cell["stage"] for cell in cells} == {0, 3, 7}
    for cell in cells:
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
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import stages\nfrom stages.contract import Stage\n"
        'STAGE = Stage(number=95, name="mine", title="mine", idea="mine",'
        ' options=("seqlens_k", "gqa"))\n'
        "def attend(q, k, v, *, seqlens_k=None):\n    return stages.by_number(3).attend(q, k, v)\n"
    )
    out = tmp_path / "run.jsonl"
    for options, status, code in ((PADDED, "wrong", 1), (GROUPED, "ok", 0)):
        done = in_turn(*RUN, "--stages", 3, *options, "--stage", mine, "--out", out)
        assert done.returncode == code
        assert {cell["status"] for cell in by_name(out)["mine"]} == {status}
        out.unlink()


@pytest.mark.slow
def test_a_run_is_resumed_as_it_was_begun(tmp_path):
    out = tmp_path / "run.jsonl"
    arguments = ("run", "--stages", 3, *PADDED, "--h", 2, "--hk", 1)
    done = in_turn(*arguments, "--out", out)
    assert done.returncode == 0, done.stderr
    whole = out.read_bytes()
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))  # one of its two cells
    done = in_turn("run", "--resume", out)
    assert done.returncode == 0, done.stderr
    first, second = read(out)[1]
    assert (first["nk"], second["nk"]) == (16, 24)
    assert second["seqlens_k"] == [5, 16] and (second["h"], second["hk"]) == (2, 1)


@pytest.mark.slow
def test_the_rounds_of_a_bench_take_both(tmp_path):
    out = tmp_path / "bench.jsonl"
    done = in_turn("bench", "--device", "cpu", "--n", 16, "--d", 8, "--b", 2, "--h", 4, "--hk", 2,
                   "--seqlens", "5,16", "--mode", "fwd,train", "--repeat", 3, "--warmup", 1,
                   "--out", out)  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = read(out)[1]
    for record in records:
        assert (record["b"], record["h"], record["hk"], record["nk"]) == (2, 4, 2, 16)
        assert record["seqlens_k"] == [5, 16] and record["status"] == "ok"
    # who takes no lengths takes no part unless asked for
    assert {r["stage"] for r in records} == {3, 6, 7}
    text = " ".join(done.stdout.split())
    assert "hk = 2, float32" in text and "padded: 5, 16 valid keys" in text
    asked = in_turn("bench", "--device", "cpu", "--n", 16, "--b", 1, "--h", 2, "--hk", 1, "--d", 8,
                    "--causal", "off", "--stages", "3,5,104", "--repeat", 3, "--out",
                    tmp_path / "asked.jsonl")  # fmt: skip
    assert asked.returncode == 0, asked.stderr
    statuses = {r["stage"]: r["status"] for r in read(tmp_path / "asked.jsonl")[1]}
    assert statuses == {3: "ok", 5: "skipped", 104: "ok"}


@pytest.mark.slow
def test_the_batch_may_follow_from_the_tokens(tmp_path):
    """A length for each of the 256 / 128 entries, the device left to the machine."""
    done = in_turn("bench", "--n", 128, "--tokens", 256, "--d", 8, "--h", 1, "--seqlens", "3,128",
                   "--dtype", "float32", "--stages", 3, "--causal", "off", "--repeat", 3, "--out",
                   tmp_path / "bench.jsonl")  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_memory_is_measured_after_a_warm_up_that_takes_the_lengths(tmp_path):
    """What a stage sets up once is no call's memory, on a padded problem as on any other."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import stages\nfrom stages.contract import Stage\n"
        'STAGE = Stage(number=95, name="mine", title="mine", idea="mine", options=("seqlens_k",))\n'
        "kept = []\n"
        "def attend(q, k, v, **options):\n"
        "    o = stages.by_number(3).attend(q, k, v, **options)\n"
        '    kept[:] = kept or [b"x" * (40 << 20)]\n'
        "    return o\n"
    )
    for options in ((), ("--seqlens", "16,16")):
        out = tmp_path / f"{len(options)}.jsonl"
        done = in_turn(*RUN, "--stages", 3, "--n", 16, "--b", 2, *options, "--stage", mine,
                       "--device", "cpu", "--out", out)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert by_name(out)["mine"][0]["peak_bytes"] < 20 << 20
