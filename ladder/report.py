"""`ladder report`: the lesson and the records of files as one HTML page."""

from pathlib import Path

from harness.records import checkout, files
from ladder import options
from ladder.measuring import open_results, writing
from ladder.options import UserError

BEGINS = b"<!doctype html>"  # what is written over is a page, not somebody's records


def report_command(file: options.Reported = None, out: options.Report = Path("report.html")) -> int:
    """Make one HTML page: the lesson, to play with, and the records."""
    with writing(out):
        if out.is_file() and out.stat().st_size and not out.read_bytes().startswith(BEGINS):
            raise UserError(f"--out: {out} is there already, and is no page: name another")
    if not file:
        checkout.need("ladder report", ", or name FILES")
    from course.page import drift, ladder_data, listings, page, vendored
    from course.page import records as shown

    # one file under two names was not measured twice
    given = {path.resolve(): path for path in file or drift.sources()}.values()
    records = {path: open_results(path, kind=None) for path in given}  # of foreign files, say so
    data = ladder_data.collect() | shown.collect(records) | listings.collect()
    data |= vendored.collect() | {"made_from": "" if file else drift.made_from()}
    with writing(out):
        files.write(out, page.make(data))
    files_read = "1 file" if len(records) == 1 else f"{len(records)} files"
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, {files_read} of records")
    return 0
