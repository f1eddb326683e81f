"""Print the commands that make records of `ladder run` and `ladder bench` again.

    python tools/retake.py results/h200/hopper.jsonl results/h200/splits.jsonl
    python tools/retake.py results/h200/hopper.jsonl --folder build/retaken | sh
    python tools/retake.py --edited results/h200/*.jsonl > build/jobs  # for tools/lanes.py

They are read from the env lines: the arguments, and the variants that took part, which are written
first (tools/make_variants.py). The new files get the old names, in --folder. A comment says how
many problems a record has: on an H200 a contest of five takes 10 to 20 seconds for each. --edited
leaves out records of which no stage was edited since.
"""

import argparse
import shlex
from pathlib import Path

import make_variants

from course.report.text import edited_since
from harness.records.code import FIRST, ROOT, files_of, first_file
from harness.records.jsonl import read
from ladder import bench, old, run

COMMANDS = {"bench": bench.DEFAULTS, "run": run.DEFAULTS}


def stage_files(names: list[str], folder: Path) -> tuple[list[str], list[str]]:
    """The commands that write the variants among `names`, and the options that name all files.

    A name that is neither a variant's nor that of a file of stage 9 is left out, with a comment.
    """
    written, options = [], []
    versions = {path.stem: str(path.relative_to(ROOT)) for path in files_of(9)}
    for name in names:
        if name in versions:
            options += ["--stage", versions[name]]
            continue
        stage = next((n for n, known in make_variants.VARIANTS.items() if name in known), None)
        if stage is None:
            written.append(f"# without {name}: no variant of tools/make_variants.py has that name")
            continue
        place = folder / f"variants-{stage}"
        command = shlex.join(
            ["python", "tools/make_variants.py", str(place), "--stage", str(stage)]
        )
        written += [command] if command not in written else []
        # a stage in a folder has its variants in folders
        file = f"{name}.py" if first_file(stage).name != FIRST else name
        options += ["--stage", str(place / file)]
    return written, options


def commands(path: Path, folder: Path) -> list[str]:
    """The commands that make the record in `path` again, the last one into `folder`.

    Raises ValueError where neither `ladder run` nor `ladder bench` made it.
    """
    env, _ = read(path, None)
    given = old.arguments(env["arguments"])
    command = given.get("command", "run")
    if command not in COMMANDS or "text" in given:
        raise ValueError("made by neither ladder run nor ladder bench: see the page that shows it")
    before, words = stage_files(given.get("stage", []), folder)
    for name, usual in COMMANDS[command].items():
        value = given.get(name, usual)
        if value is True:
            words.append(f"--{name}")
        elif value != usual or (name == "inputs" and not given.get("suite")):
            # --inputs has another default with --stage
            words += [f"--{name}", str(value)]
    out = folder / path.name
    return [*before, shlex.join(["ladder", command, *words, "--out", str(out)])]


def problems(path: Path) -> int:
    """How many problems a record was planned to have, whichever stages take part."""
    env, _ = read(path, None)
    without = [[x for x in each.items() if x[0] not in ("stage", "name")] for each in env["plan"]]
    return len({str(each) for each in without})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--folder", type=Path, default=Path("build/retaken"))
    parser.add_argument("--edited", action="store_true")
    given = parser.parse_args()
    lines = [shlex.join(["mkdir", "-p", str(given.folder)])]
    for path in given.records:
        if given.edited and not edited_since(read(path, None)[0]):
            continue
        try:
            lines += [f"# {path}: {problems(path)} problems", *commands(path, given.folder)]
        except (OSError, ValueError) as error:
            if not given.edited:
                raise SystemExit(f"retake: {path}: {error}") from None
            lines.append(f"# {path}: {error}")
    print(*lines, sep="\n")
