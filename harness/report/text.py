"""What the generated parts of README and docs are made with: records found, Markdown tables."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.records.syntax import digest, digest_of_version
from harness.views.table import markdown_row

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
GPU = RESULTS / "h200"

Record = Mapping[str, Any]


def rows(header: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    """A Markdown table, its first column to the left and the others to the right."""
    lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    lines += [markdown_row(row) for row in body]
    return "\n".join(lines)


def find(cells: Sequence[Record], **fields: object) -> Record:
    """The one record with those fields. Raises KeyError where there is none, or more."""
    found = [c for c in cells if all(c[name] == value for name, value in fields.items())]
    if len(found) != 1:
        raise KeyError(f"{len(found)} records with {fields}")
    return found[0]


def there(cells: Sequence[Record]) -> list[tuple[int, str]]:
    """The stages that have cells, lowest first."""
    return sorted({(cell["stage"], cell["name"]) for cell in cells})


def edited_since(env: Record) -> list[int]:
    """The built-in stages in a file of records whose code is no longer what was measured."""
    edited = []
    planned = {cell["stage"] for cell in env["plan"]}  # a suite may measure some of the stages
    for stage in env["rungs"]:
        if planned and stage["stage"] not in planned:
            continue
        path = ROOT / "stages" / f"s{stage['stage']:02d}_{stage['name']}.py"
        if not path.is_file() or "sha256" not in stage:  # a trainer's contestant has none
            continue
        measured = stage.get("syntax_sha256") or digest_of_version(path, stage["sha256"])
        if measured != digest(path.read_text(encoding="utf-8")):
            edited.append(stage["stage"])
    return sorted(edited)


def machine(env: Record) -> str:
    """Where a file was measured, in a line, and which stages have been edited since."""
    where = env["device_name"]
    if env["device"] == "cpu":
        where += f", {env['cores']} cores"
    versions = [f"torch {env['torch']}"] + [f"Triton {env['triton']}"] * bool(env["triton"])
    said = f"Measured on: {where}; {', '.join(versions)}; {env['date'][:10]}"
    if edited := edited_since(env):
        said += f"; stage{'s' * (len(edited) > 1)} {', '.join(map(str, edited))} edited since"
    return f"{said}."
