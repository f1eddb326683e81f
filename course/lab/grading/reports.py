"""Write grades in forms besides the table: a report for each student, JUnit, Gradescope."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from course.lab.checks import Result
from course.lab.grading.grade import Row
from harness.records.units import clean

WORDS = {"ok": "passed", "wrong": "wrong", "skipped": "refused by the file's own STAGE"}


def report(row: Row, result: Result, points: Mapping[str, float]) -> str:
    """A student's report, Markdown: points for each check, what the first failure comes from."""
    lines = [head(row, points)]
    if row.verdict != "passed":
        first = next((mark.check for mark in result.marks if not mark.passed), None)
        where = f": the check *{first.name}*" if first and row.verdict != "cheated" else ""
        lines += ["", f"## What to look at first{where}", "", row.diagnosis or "see below", ""]
        lines += [f"    {clean(line)}" for line in result.case]
        if row.verdict == "cheated":
            lines += ["", "Points are given when the answers come from your own code alone."]
        else:
            twin = " --numpy" if "--numpy" in row.options else ""
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


def gradescope(rows: Sequence[Row], points: Mapping[str, float], reports: Path) -> str:
    """The rows as Gradescope's results.json: a test for each check.

    Gradescope asks for one submission at a time. With several, each test names its submission.
    """
    tests = []
    for row in rows:
        for name, got, status, said in cases(row, points):
            tests.append({
                "name": name if len(rows) == 1 else f"{row.submission}: {name}",
                "score": got,
                "max_score": points[name],
                "status": "passed" if status == "ok" else "failed",
                "output": said,
            })  # fmt: skip
    files = [reports / f"{row.submission}.md" for row in rows]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files if path.is_file())
    return json.dumps({
        "score": sum(row.points for row in rows),
        "execution_time": round(sum(row.seconds for row in rows)),
        "output": text,
        "output_format": "md",
        "visibility": "visible",
        "tests": tests,
    }, indent=1) + "\n"  # fmt: skip
