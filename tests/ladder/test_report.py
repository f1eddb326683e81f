"""`ladder report`: what it makes; test_errors.py has what it refuses."""

from ladder_command import ROOT, run_here

TOUR = ROOT / "results" / "cpu" / "tour.jsonl"


def test_it_makes_one_file_that_names_no_other(capsys, tmp_path):
    """And writes a page over a page."""
    out = tmp_path / "report.html"
    for _ in range(2):
        code, said, _ = run_here(capsys, "report", TOUR, "--out", out)
        assert code == 0 and said.startswith(f"{out}: ")
    page = out.read_text(encoding="utf-8")
    assert "<!-- put" not in page and page.count("<script") == 3
    assert not any(f'{name}="http' in page for name in ("src", "href"))
