"""Whatever a stage's file does, its own cells say so, and the others are measured."""

import csv
import io
import re
import statistics
import subprocess
import sys

import pytest
from hostile import FAILS, HARMLESS, write
from ladder_command import ROOT, YARDSTICK, by_name, environ, in_turn

KERNELS = ("drops_the_tail", "relu", "drops_low_scores", "a_little_in_l", "no_max")
HANG = ("stops_siblings", "slow_clock", "hangs_at_import")
# a budget that decides nothing, however busy the machine; where nobody answers, one to wait for
LIMITS = ("--budget", "60", "--memory", "600M")
HASTY = ("--budget", "4")
RUN = ("run", "--stages", "3", "--n", "1,33", "--d", "16", *LIMITS)


def held(done, out, *names):
    """name -> its cells; the yardstick's are all ok, and nothing went wrong in the parent."""
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    cells = by_name(out)
    assert cells.keys() == {YARDSTICK, *names}
    assert {cell["status"] for cell in cells[YARDSTICK]} == {"ok"}, cells[YARDSTICK]
    assert len({len(of_one) for of_one in cells.values()}) == 1
    return cells


@pytest.mark.slow
def test_wrong_kernels_fail_with_the_inputs_that_a_file_is_asked_with(tmp_path):
    """No --inputs: normal and peaky; each wrong kernel is seen with one of them."""
    out = tmp_path / "run.jsonl"
    done = in_turn(*RUN, *write(tmp_path, *KERNELS, "honest"), "--out", out)
    cells = held(done, out, *KERNELS, "honest")
    assert {cell["inputs"] for cell in cells["honest"]} == {"normal", "peaky"}
    assert {cell["status"] for cell in cells["honest"]} == {"ok"}
    assert not [name for name in KERNELS if {c["status"] for c in cells[name]} == {"ok"}]


def test_all_inputs_have_real_ones_where_they_reach(tmp_path):
    for d, expected in ((32, ["normal", "peaky", "real"]), (16, ["normal", "peaky"])):
        out = tmp_path / f"{d}.jsonl"
        done = in_turn("run", "--stages", 3, "--n", 8, "--d", d, "--inputs", "all", "--out", out)
        assert done.returncode == 0
        assert [cell["inputs"] for cell in by_name(out)[YARDSTICK]] == expected
    out = tmp_path / "bench.jsonl"
    arguments = ("--stages", 3, "--n", 8, "--tokens", 8, "--d", 16, "--causal", "off")
    done = in_turn("bench", *arguments, "--repeat", 2, "--inputs", "all", "--out", out)
    assert done.returncode == 0
    lines = [line for line in out.read_text().splitlines() if '"bench"' in line[:20]]
    assert re.findall(r'"inputs": ?"(\w+)"', "".join(lines)) == ["normal", "peaky"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hang", [True, False], ids=["hang", "answer or end"])
def test_each_fails_by_itself(tmp_path, hang):
    """And an honest one after them all is measured."""
    others = (*KERNELS, "stops_the_server")
    names = [name for name in FAILS if name not in others and (name in HANG) == hang]
    out = tmp_path / "run.jsonl"
    files = (*write(tmp_path, *names), *write(tmp_path, "honest", number=91))
    if hang:
        names.append("stops_the_server")  # the last of all: the command ends though nobody calls
        files += (*write(tmp_path, "stops_the_server", number=92),)
    limits = HASTY if hang else ()
    done = run(*RUN, "--n", 33, "--inputs", "normal", *limits, *files, "--out", out)
    cells = held(done, out, *names, "honest")
    assert {cell["status"] for cell in cells["honest"]} == {"ok"}
    at_33 = {name: cells[name][-1]["status"] for name in names}
    assert done.returncode == 1 and "ok" not in at_33.values(), at_33


@pytest.mark.slow
def test_each_fails_in_gradients_too(tmp_path):
    names = (
        "words_ok", "by_one_element", "by_hash_of_v", "by_shape_slowly", "lazy", "fast_clock",
        "quick_in_a_timer", "slow_clock", "contiguous_assumed", "contiguous_demanded",
    )  # fmt: skip
    out = tmp_path / "run.jsonl"
    files = (*write(tmp_path, *names), *write(tmp_path, "honest", number=91))
    options = (*RUN, "--n", 33, "--inputs", "normal", "--mode", "train", *HASTY)
    done = in_turn(*options, *files, "--out", out, briefly=False)  # clocks are looked at
    cells = held(done, out, *names, "honest")
    assert {cell["status"] for cell in cells["honest"]} == {"ok"}
    assert "ok" not in {cells[name][-1]["status"] for name in names}


@pytest.mark.slow
def test_the_harmless_are_ok_and_their_prints_are_cut_and_their_own(tmp_path):
    out = tmp_path / "run.jsonl"
    done = in_turn(*RUN, "--inputs", "normal", *write(tmp_path, *HARMLESS), "--out", out)
    cells = held(done, out, *HARMLESS)
    assert {cell["status"] for of_one in cells.values() for cell in of_one} == {"ok"}
    strangers = [line for line in done.stderr.splitlines() if "| stranger" in line]
    assert all(line.startswith("leaves_a_stranger |") for line in strangers)
    # of 50 million letters
    assert max(map(len, done.stderr.splitlines())) < 100_000
    ends = subprocess.run(["pgrep", "-f", "echo stranger"], capture_output=True, text=True)
    assert ends.stdout == ""


@pytest.mark.slow
def test_in_turns_a_file_has_its_own_process_and_slows_no_other(tmp_path):
    names = ("slows_torch", "honest", "kills_siblings", "talks")
    out = tmp_path / "run.jsonl"
    options = ("run", "--stages", "3", "--n", "64", "--d", "16", *LIMITS, "--inputs", "normal")
    files = write(tmp_path, *names, number=3)
    done = in_turn(*options, *files, "--paired", "--out", out, briefly=False)
    cells = held(done, out, *names)
    ours, slow, honest = (cells[name][1] for name in (YARDSTICK, "slows_torch", "honest"))
    assert (slow["status"], honest["status"]) == ("ok", "ok")
    assert slow["time_ms"] > 2 > ours["time_ms"]
    assert len(ours["rounds_ms"]) == len(slow["rounds_ms"])
    assert "own" in slow["reason"] and "process of its own" in done.stdout
    words = [line for line in done.stderr.splitlines() if "words of talks" in line]
    assert len(words) >= 2 and all(line.startswith("talks | ") for line in words)
    # number = 3 makes nobody the yardstick
    shown = in_turn("table", out, "--format", "csv").stdout
    rows = {(row["name"], row["paired"]): row for row in csv.DictReader(io.StringIO(shown))}
    ratio = float(rows["slows_torch", "True"]["vs_stage3"])
    rounds = zip(ours["rounds_ms"], slow["rounds_ms"], strict=True)
    assert ratio == pytest.approx(statistics.median(x / y for x, y in rounds))


@pytest.mark.slow
def test_in_bench_each_costs_itself_only(tmp_path):
    names = ("words_ok", "kills_siblings", "by_one_element", "nan_clock", "slow_clock", "honest")
    out = tmp_path / "bench.jsonl"
    arguments = ("--stages", "3", "--n", "64", "--tokens", "64", "--causal", "off", "--repeat", "5")
    done = in_turn(
        "bench", *arguments, "--inputs", "normal", *HASTY, *write(tmp_path, *names),
        "--out", out,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    text = out.read_text()
    status = dict(re.findall(r'"kind": ?"bench".*?"name": ?"(\w+)".*?"status": ?"([\w-]+)"', text))
    assert status.keys() == {YARDSTICK, *names}
    assert [name for name, said in status.items() if said == "ok"] == [YARDSTICK, "honest"], status


@pytest.mark.slow
def test_what_is_held_before_the_call_is_seen(tmp_path):
    path = tmp_path / "keeps.py"
    write(tmp_path, "honest")
    text = (tmp_path / "honest.py").read_text().replace('"honest"', '"keeps"')
    path.write_text(
        text + "\nheld = []\n\n\ndef attend(q, k, v, **more):\n"
        "    held or held.append(b'1' * (300 << 20))\n"
        "    return three(q, k, v, **more)\n"
    )
    out = tmp_path / "run.jsonl"
    options = ("run", "--stages", "3", "--n", "64", "--inputs", "normal")
    in_turn(*options, "--stage", path, "--out", out)
    assert by_name(out)["keeps"][0]["peak_bytes"] > 300 << 20
    assert by_name(out)[YARDSTICK][0]["peak_bytes"] < 50 << 20


def test_a_kernel_of_another_file_is_seen_to_be_interpreted(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "borrows.py"
    write(tmp_path, "honest")
    text = (tmp_path / "honest.py").read_text().replace('"honest"', '"borrows"')
    path.write_text(f"{text}\nfrom stages.s05_triton_online import attend\n")
    out = tmp_path / "run.jsonl"
    arguments = ("run", "--stages", 3, "--n", 8, "--inputs", "normal", "--device", "cpu")
    in_turn(*arguments, "--stage", path, "--out", out)
    [cell] = by_name(out)["borrows"]
    assert (cell["status"], cell["mode"], cell["samples"]) == ("ok", "interpreted", 1)


def run(*arguments):
    """`ladder ARGUMENTS` in a process of its own, with a fork server that a stage may end."""
    return subprocess.run(
        [sys.executable, "-m", "harness", *map(str, arguments)],
        cwd=ROOT, env=environ(), capture_output=True, text=True, timeout=590, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
