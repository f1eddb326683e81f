"""`ladder report`: the lesson and the records of files as one HTML page."""

from pathlib import Path

from harness.records import checkout, files
from harness.records.environment import ROOT, own_files
from ladder import options
from ladder.measuring import open_results, writing

RESULTS = ROOT / "results"


def report_command(file: options.Reported = None, out: options.Report = Path("report.html")) -> int:
    """Make one HTML page: the lesson, to play with, and the records."""
    if not file:
        checkout.need("ladder report", ", or name FILES")
    given = file or own_files("**/*.jsonl", RESULTS)
    records = {path: open_results(path, kind=None) for path in given}  # of foreign files, say so
    from course.page import ladder_data, listings, page, vendored
    from course.page import records as shown

    data = ladder_data.collect() | shown.collect(records) | listings.collect()
    data |= vendored.collect()
    with writing(out):
        files.write(out, page.make(data))
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, {len(records)} files of records")
    return 0
