"""Whatever a stage's file does, its own cells say so, and the others are measured."""

import csv
import io
import statistics
import subprocess

import pytest
from ladder_command import HERE, YARDSTICK, by_name, fakes, in_turn, ladder, measured
from stage_files import Table

HOSTILE = Table(HERE / "hostile.toml")
HARMLESS = [name for name, entry in HOSTILE.entries.items() if entry.get("harmless")]
FAILS = [name for name in HOSTILE.entries if name not in HARMLESS]
KERNELS = ("drops_the_tail", "relu", "drops_low_scores", "a_little_in_l", "no_max")
HANG = ("stops_siblings", "slow_clock", "hangs_at_import")
NORMAL = ("--inputs", "normal")
# a budget that decides nothing, however busy the machine; where nobody answers, one to wait for
LIMITS = ("--budget", "60", "--memory", "600M")
HASTY = ("--budget", "4")
RUN = ("run", "--stages", "3", "--n", "1,33", "--d", "16", *LIMITS)


def statuses(cells, *names):
    """name -> the statuses of its cells; the honest's and the yardstick's are all ok."""
    found = {name: [cell["status"] for cell in cells[name]] for name in cells}
    assert found.keys() == {YARDSTICK, *names}
    assert len({len(of_one) for of_one in found.values()}) == 1
    assert {*found[YARDSTICK], *found.get("honest", ["ok"])} == {"ok"}, found
    return found


@pytest.mark.slow
def test_wrong_kernels_fail_with_the_inputs_that_a_file_is_asked_with(tmp_path):
    """No --inputs: normal and peaky; each wrong kernel is seen with one of them."""
    files = HOSTILE.options(tmp_path, *KERNELS, "honest")
    _, cells = measured(tmp_path, *RUN, *files, code=1)
    found = statuses(cells, *KERNELS, "honest")
    assert {cell["inputs"] for cell in cells["honest"]} == {"normal", "peaky"}
    assert not [name for name in KERNELS if {*found[name]} == {"ok"}]


def test_all_inputs_have_real_ones_where_they_reach(tmp_path):
    asked = ("--stages", 3, "--n", 8, "--inputs", "all")
    bench = ("bench", *asked, "--tokens", 8, "--causal", "off", "--repeat", 2)
    two = ["normal", "peaky"]
    for arguments, expected in ((("run", *asked, "--d", 32), [*two, "real"]),
                                (("run", *asked, "--d", 16), two),
                                ((*bench, "--d", 16), two)):  # fmt: skip
        _, cells = measured(tmp_path, *arguments)
        assert [cell["inputs"] for cell in cells[YARDSTICK]] == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hang", [True, False], ids=["hang", "answer or end"])
def test_each_fails_by_itself(tmp_path, hang):
    """In a process of its own, with a fork server that a stage may end. An honest one comes last.

    After that one only the stage that stops the server: the command ends though nobody calls.
    """
    others = (*KERNELS, "stops_the_server")
    names = [name for name in FAILS if name not in others and (name in HANG) == hang]
    out = tmp_path / "run.jsonl"
    files = (*HOSTILE.options(tmp_path, *names), *HOSTILE.options(tmp_path, "honest", number=91))
    if hang:
        names.append("stops_the_server")
        files += (*HOSTILE.options(tmp_path, "stops_the_server", number=92),)
    limits = HASTY if hang else ()
    done = ladder(*RUN, "--n", 33, *NORMAL, *limits, *files, "--out", out, timeout=590)
    found = statuses(by_name(out), *names, "honest")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert not [name for name in names if found[name][-1] == "ok"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "names"),
    [((*RUN, "--n", 33, "--mode", "train"),
      ("words_ok", "by_one_element", "by_hash_of_v", "by_shape_slowly", "lazy", "fast_clock",
       "quick_in_a_timer", "slow_clock", "contiguous_assumed", "contiguous_demanded")),
     (("bench", "--stages", "3", "--n", "64", "--tokens", "64", "--causal", "off", "--repeat", 5),
      ("words_ok", "kills_siblings", "by_one_element", "nan_clock", "slow_clock"))],
    ids=["gradients", "bench"],
)  # fmt: skip
def test_each_costs_itself_only_in_gradients_and_in_bench_too(tmp_path, arguments, names):
    files = (*HOSTILE.options(tmp_path, *names), *HOSTILE.options(tmp_path, "honest", number=91))
    # clocks are looked at
    _, cells = measured(tmp_path, *arguments, *NORMAL, *HASTY, *files, code=1, briefly=False)
    found = statuses(cells, *names, "honest")
    assert not [name for name in names if "ok" in found[name]]


@pytest.mark.slow
def test_the_harmless_are_ok_and_their_prints_are_cut_and_their_own(tmp_path):
    asked = *RUN, *NORMAL, "--h", "2"  # which a library may read as its own --help
    done, cells = measured(tmp_path, *asked, *HOSTILE.options(tmp_path, *HARMLESS))
    found = statuses(cells, *HARMLESS)
    assert {status for of_one in found.values() for status in of_one} == {"ok"}
    strangers = [line for line in done.stderr.splitlines() if "| stranger" in line]
    assert all(line.startswith("leaves_a_stranger |") for line in strangers)
    # of 50 million letters
    assert max(map(len, done.stderr.splitlines())) < 100_000
    ends = subprocess.run(["pgrep", "-f", "echo stranger"], capture_output=True, text=True)
    assert ends.stdout == ""


@pytest.mark.slow
def test_in_turns_a_file_has_its_own_process_and_slows_no_other(tmp_path):
    names = ("slows_torch", "honest", "kills_siblings", "talks")
    options = ("run", "--stages", "3", "--n", "64", "--d", "16", *LIMITS, *NORMAL)
    files = HOSTILE.options(tmp_path, *names, number=3)
    done, cells = measured(tmp_path, *options, *files, "--paired", code=1, briefly=False)
    statuses(cells, *names)
    ours, slow = (cells[name][1] for name in (YARDSTICK, "slows_torch"))
    assert slow["status"] == "ok" and slow["time_ms"] > 2 > ours["time_ms"]
    assert len(ours["rounds_ms"]) == len(slow["rounds_ms"])
    assert "own" in slow["reason"] and "process of its own" in done.stdout
    words = [line for line in done.stderr.splitlines() if "words of talks" in line]
    assert len(words) >= 2 and all(line.startswith("talks | ") for line in words)
    # number = 3 makes nobody the yardstick
    shown = in_turn("table", tmp_path / "run.jsonl", "--format", "csv").stdout
    rows = {(row["name"], row["paired"]): row for row in csv.DictReader(io.StringIO(shown))}
    ratio = float(rows["slows_torch", "True"]["vs_stage3"])
    rounds = zip(ours["rounds_ms"], slow["rounds_ms"], strict=True)
    assert ratio == pytest.approx(statistics.median(x / y for x, y in rounds))


def test_what_is_held_before_the_call_and_who_is_interpreted_is_seen(tmp_path):
    """Also where another file's kernel is."""
    pytest.importorskip("triton")
    options = ("run", "--stages", 3, "--n", 8, *NORMAL, "--device", "cpu")
    _, cells = measured(tmp_path, *options, *fakes("keeps", "borrows"))
    assert cells["keeps"][0]["peak_bytes"] > 300 << 20
    assert cells[YARDSTICK][0]["peak_bytes"] < 50 << 20
    [cell] = cells["borrows"]
    assert (cell["status"], cell["mode"], cell["samples"]) == ("ok", "interpreted", 1)
