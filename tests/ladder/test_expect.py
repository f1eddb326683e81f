"""`ladder run --expect FILE`: a table that isn't as another machine's is found, row by row."""

import json

import pytest
from ladder_command import in_turn

ASKED = ("run", "--stages", "1,3", "--n", "8,9", "--d", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the records of a run, there.jsonl, and room for changed copies of it."""
    folder = tmp_path_factory.mktemp("expect")
    assert in_turn(*ASKED, "--out", "there.jsonl", cwd=folder).returncode == 0
    return folder


def expecting(folder, name, **changes):
    """`ladder run --expect`, of a copy whose last record has those changes."""
    env, *records = map(json.loads, (folder / "there.jsonl").read_text().splitlines())
    records[-1] |= changes
    lines = "\n".join(map(json.dumps, [env, *records]))
    (folder / f"{name}.jsonl").write_text(lines + "\n")
    out = f"{name}-here.jsonl"
    return in_turn(*ASKED, "--expect", f"{name}.jsonl", "--out", out, cwd=folder), folder / out


def test_the_same_statuses_are_as_expected(folder):
    done, _ = expecting(folder, "same")
    assert done.returncode == 0 and "Statuses as expected: 4 of 4." in done.stdout


def test_another_status_is_named_and_the_exit_code_is_1(folder):
    done, _ = expecting(folder, "other", status="wrong-by-design", reason="made up")
    assert done.returncode == 1 and "Statuses as expected: 3 of 4." in done.stdout
    assert "stage 3 torch_three_gemm, N = 9, d = 4" in done.stdout
    assert "ok, expected wrong-by-design" in done.stdout


def test_what_one_of_the_machines_skips_is_not_compared(folder):
    none = dict.fromkeys(("time_ms", "time_iqr_ms", "err_f64_max", "err_f64_rel", "peak_bytes"))
    done, _ = expecting(folder, "skipped", status="skipped", reason="made up", samples=0, **none)
    assert done.returncode == 0
    assert "Statuses as expected: 3 of 3; 1 skipped here or there." in done.stdout


def test_a_file_of_other_cells_is_refused_before_anything_is_measured(folder):
    done = in_turn(*ASKED[:-1], "5", "--expect", "there.jsonl", "--out", "none.jsonl", cwd=folder)
    assert done.returncode == 2 and "none of the 4 cells" in done.stderr
    assert not (folder / "none.jsonl").exists()
