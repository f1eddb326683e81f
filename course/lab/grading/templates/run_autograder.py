#!/usr/bin/env python3
"""Grade one submission with `ladder lab grade`. For Python 3.8 and later, without any package.

In $AUTOGRADER (/autograder) lie source/, the unpacked zip, and submission/, the student's files;
results/results.json is written. Where the machine can't grade, there is none: Gradescope says then
that the autograder has failed, and nobody gets 0. On GitHub its points go to the workflow, too.
"""

import base64
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(os.environ.get("AUTOGRADER", "/autograder"))
SOURCE, SUBMISSION, RESULTS = ROOT / "source", ROOT / "submission", ROOT / "results"
REPORT = RESULTS / "results.json"


def grade() -> int:
    """Write results.json; returns the exit code: 0 where it is there."""
    settings = json.loads((SOURCE / "settings.json").read_text())
    RESULTS.mkdir(parents=True, exist_ok=True)
    if REPORT.exists():
        REPORT.unlink()
    names = [path.name for path in SUBMISSION.iterdir() if not path.name.startswith((".", "__"))]
    if folder := settings["folder"]:
        wanted, given = " and ".join(folder), SUBMISSION
        fits = {*folder} <= {*names}
    else:
        python = [name for name in names if name.endswith(".py")]
        wanted, given = "one .py file", SUBMISSION / (python or [""])[0]
        fits = len(python) == 1
    if not fits:
        said = f"Hand in {wanted}; got {', '.join(sorted(names)) or 'nothing'}."
        test = {"name": "the files", "score": 0, "max_score": 1, "status": "failed"}
        REPORT.write_text(json.dumps({"score": 0, "output": said, "tests": [test]}))
        return 0
    points = SOURCE / "points.toml"
    return subprocess.run(
        [
            str(SOURCE / "ladder" / ".venv" / "bin" / "ladder"), "lab", "grade", str(given),
            *settings["options"], *(["--points", str(points)] if points.exists() else []),
            "--out", str(RESULTS / "grades.csv"), "--gradescope", str(REPORT),
        ]
    ).returncode  # fmt: skip


def tell_classroom(output: str) -> None:
    """Append the result to a step's output, as GitHub Classroom's reporter takes it."""
    result = json.loads(REPORT.read_text())
    tests = [
        {
            "name": test["name"],
            "status": "pass" if test["status"] == "passed" else "fail",
            "score": test["score"],
            "message": test.get("output", result.get("output", "")),
            "line_no": 0,
        }
        for test in result["tests"]
    ]
    told = {
        "status": "pass" if all(test["status"] == "pass" for test in tests) else "fail",
        "max_score": sum(test["max_score"] for test in result["tests"]),
        "tests": tests,
    }
    line = base64.b64encode(json.dumps(told).encode()).decode()
    with pathlib.Path(output).open("a") as file:
        file.write(f"result={line}\n")


code = grade()
if code == 0 and os.environ.get("GITHUB_OUTPUT"):
    tell_classroom(os.environ["GITHUB_OUTPUT"])
sys.exit(code)
