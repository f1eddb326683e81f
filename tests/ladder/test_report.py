"""`ladder report`: what it makes, and what it says of files that it can't show."""

import pytest
from ladder_command import ROOT, run_here

TOUR = ROOT / "results" / "cpu" / "tour.jsonl"


@pytest.fixture
def report(capsys, tmp_path):
    """`ladder report ARGUMENTS --out FILE`: exit code, stdout, stderr, the file."""

    def run(*arguments):
        out = tmp_path / "report.html"
        return *run_here(capsys, "report", *arguments, "--out", out), out

    return run


def test_it_makes_one_file_that_names_no_other(report):
    code, said, _, out = report(TOUR)
    assert code == 0 and said.startswith(f"{out}: ")
    page = out.read_text(encoding="utf-8")
    assert "<!-- put" not in page and page.count("<script") == 3
    assert not any(f'{name}="http' in page for name in ("src", "href"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"kind": "env"}\n', "line 1 is not a record of ours"),
        (TOUR.read_text()[:4000] + "\n", "is not a record of ours"),
        ("a,b\n1,2\n", "line 1 is not a record of ours"),
        ("", "no whole line"),
    ],
)
def test_a_truncated_or_foreign_file_is_named(report, tmp_path, text, named):
    file = tmp_path / "records.jsonl"
    file.write_text(text)
    code, said, error, out = report(TOUR, file)
    assert (code, said) == (2, "") and not out.exists()
    assert str(file) in error and named in error and error.count("\n") == 1


def test_no_other_file_is_written_over(capsys, tmp_path):
    kept, page = tmp_path / "kept.jsonl", tmp_path / "page.html"
    kept.write_bytes(TOUR.read_bytes())
    code, _, error = run_here(capsys, "report", kept, "--out", kept)
    assert code == 2 and "kept.jsonl is there already, and is no page" in error
    assert kept.read_bytes() == TOUR.read_bytes()
    for _ in range(2):  # a page is
        assert run_here(capsys, "report", kept, "--out", page)[0] == 0


def test_a_file_that_is_not_there_is_named(report, tmp_path):
    code, _, error, out = report(tmp_path / "none.jsonl")
    assert code == 2 and "none.jsonl" in error and not out.exists()
