"""Write grades in forms besides the table: a report for each student, JUnit, Gradescope."""

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from course.lab import checks
from course.lab.grading.grade import Row
from course.lab.grading.gradebooks import Grade
from harness.records.units import clean

WORDS = {
    "ok": "passed", "wrong": "wrong", "skipped": "refused by the file's own STAGE",
    checks.NOT_TRIED: "not tried after a check that did not end",
}  # fmt: skip

PLACE = re.compile(r"\S+:\d+: ")  # may begin a diagnosis
UNKNOWN = ("no known mistake", "look at", "first tile")  # begin what is no name of a mistake


def report(row: Row, result: checks.Result, points: Mapping[str, float]) -> str:
    """A student's report, Markdown: points for each check, what the first failure comes from."""
    lines = [head(row, points)]
    if row.verdict != "passed":
        first = next((mark.check for mark in result.marks if not mark.passed), None)
        where = f": the check *{first.name}*" if first and row.verdict != "cheated" else ""
        lines += ["", f"## What to look at first{where}", "", row.diagnosis or "see below", ""]
        lines += [f"    {clean(line)}" for line in result.case]
        if row.verdict == "cheated":
            alone = "Points are given when the answers come from your own code alone"
            lines += ["", f"{alone}: take out lines that are left from a test, too."]
        else:
            twin = " --cpu" if "--cpu" in row.options else ""
            hint = f"`ladder lab hint {row.stage}{twin} --level 1` asks a question for each gap"
            lines += ["", f"{hint}; `ladder lab check FILE` runs these checks on your machine."]
    lines += ["", f"Made by attention-ladder {row.version}, seed {row.seed}."]
    return "\n".join(lines) + "\n"


def head(row: Row, points: Mapping[str, float]) -> str:
    """The part of a report that depends on what each check is worth: three blocks of lines."""
    lines = [f"# {row.submission}: stage {row.stage}, {row.verdict}", ""]
    lines += [f"{row.points:g} of {row.max_points:g} points.", ""]
    lines += ["| check | points | |", "|---|---|---|"]
    for name, got, status, _ in cases(row, points):
        lines.append(f"| {name} | {got:g} of {points[name]:g} | {WORDS.get(status, status)} |")
    return "\n".join(lines)


def renewed(text: str, row: Row, points: Mapping[str, float]) -> str:
    """Return the report `text` of a row that was kept, with the points of now."""
    *_, rest = text.split("\n\n", 3)
    return f"{head(row, points)}\n\n{rest}"


def cases(row: Row, points: Mapping[str, float]) -> list[tuple[str, float, str, str]]:
    """Return for each check of a row its name, its points, its status and a message."""
    found = []
    for name, most in points.items():
        if name in row.passed:
            found.append((name, most, "ok", ""))
        else:
            status = row.checks.get(name, row.verdict)
            status = row.verdict if status == "ok" else status
            said = f"{WORDS.get(status, status)}: {row.diagnosis}"
            found.append((name, 0.0, status, said))
    return found


def grades(rows: Iterable[Row]) -> dict[str, Grade]:
    """The rows as grades for a gradebook, by the submissions' names; none for one that cheated."""
    found = {}
    for row in rows:
        if row.verdict == "cheated":  # a person is to review it first
            continue
        said = f"{row.verdict}, {row.points:g} of {row.max_points:g} points. {row.diagnosis}"
        found[row.submission] = Grade(row.points, row.max_points, said.rstrip())
    return found


def of_class(rows: Sequence[Row], points: Mapping[str, float]) -> str:
    """A summary of a class, Markdown: how often each check failed, and each mistake was made."""
    verdicts = Counter(row.verdict for row in rows)
    listed = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    middle = statistics.median(row.points for row in rows)
    lines = [f"{len(rows)} submissions: {listed}."]
    lines += [f"Points: median {middle:g} of {rows[0].max_points:g}.", ""]
    tried = [row for row in rows if row.checks]
    for title, counts in (
        ("check, and how many fail it", {
            name: sum(row.checks.get(name, "ok") != "ok" for row in tried) for name in points
        }),
        ("first mistake, and how many made it", Counter(filter(None, map(mistake, tried)))),
    ):  # fmt: skip
        if any(counts.values()):
            lines += [f"| {title} | |", "|---|---|"]
            ordered = sorted(counts.items(), key=lambda each: -each[1])
            lines += [f"| {name} | {count} |" for name, count in ordered if count] + [""]
    if left := len(rows) - len(tried):
        were = "was" if left == 1 else "were"
        lines.append(f"{left} {were} not checked: the reports say why.")
    return "\n".join(lines).rstrip() + "\n"


def mistake(row: Row) -> str:
    """The name of the mistake that was recognised in a submission, '' where none was."""
    if row.verdict in ("passed", "cheated") or row.diagnosis.startswith(UNKNOWN):
        return ""
    return PLACE.sub("", row.diagnosis).partition(":")[0]


def junit(rows: Sequence[Row], points: Mapping[str, float]) -> str:
    """The rows as JUnit's XML: a suite for each submission, a case for each check."""
    root = ElementTree.Element("testsuites")
    for row in rows:
        known = cases(row, points)
        failed = sum(status != "ok" for _, _, status, _ in known)
        suite = ElementTree.SubElement(
            root, "testsuite", name=row.submission, tests=str(len(known)), failures=str(failed),
            errors="0", skipped="0", time=f"{row.seconds:g}",
        )  # fmt: skip
        for name, _, status, said in known:
            case = ElementTree.SubElement(
                suite, "testcase", classname=f"{row.submission}.stage{row.stage}", name=name
            )
            if status != "ok":
                ElementTree.SubElement(case, "failure", message=said, type=row.verdict)
    ElementTree.indent(root)
    return ElementTree.tostring(root, "unicode", xml_declaration=True) + "\n"


def gradescope(row: Row, points: Mapping[str, float], reports: Path) -> str:
    """A row as Gradescope's results.json: a test for each check."""
    tests = [
        {
            "name": name,
            "score": got,
            "max_score": points[name],
            "status": "passed" if status == "ok" else "failed",
            "output": said,
        }
        for name, got, status, said in cases(row, points)
    ]
    path = reports / f"{row.submission}.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return json.dumps({
        "score": row.points,
        "execution_time": round(row.seconds),
        "output": text,
        "output_format": "md",
        "visibility": "visible",
        "tests": tests,
    }, indent=1) + "\n"  # fmt: skip
