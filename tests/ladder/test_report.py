"""`ladder report`: what it makes; test_errors.py has what it refuses."""

from ladder_command import ROOT, run_here

from ladder import report

TOUR = ROOT / "results" / "cpu" / "tour.jsonl"


def test_it_makes_one_file_that_names_no_other(capsys, tmp_path):
    """It may be written over a page; a file of records that is given twice is shown once."""
    out, again = tmp_path / "report.html", TOUR.parent / ".." / TOUR.parent.name / TOUR.name
    out.write_text("<!doctype html>")
    code, said, _ = run_here(capsys, "report", TOUR, again, "--out", out)
    assert code == 0 and said.startswith(f"{out}: ") and "1 file of records" in said
    assert out.read_bytes().startswith(report.BEGINS)  # so it may be written over, too
    page = out.read_text(encoding="utf-8")
    assert "<!-- put" not in page and page.count("<script") == 3
    assert not any(f'{name}="http' in page for name in ("src", "href"))
