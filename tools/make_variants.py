"""Write stage 6, 8 or 9 in other ways, each with one thing changed, so that it can be measured.

    python tools/make_variants.py build/variants
    ladder run --stages 6 --stage build/variants/grid_1d.py ... --n 4096 --paired
    python tools/make_variants.py build/parts --stage 8
    ladder bench --suite decode --stages 8 --stage build/parts/parts_1.py ...
    python tools/make_variants.py build/hopper --stage 9
    ladder bench --stages 9 --stage build/hopper/in_turn.py ... --dtype bfloat16 --n 1024,4096,16384

tools/variants.toml says what each one is, and what it changes. Of stage 8 there are also parts_N:
the keys in N parts, or one for each tile, whatever the cost model says.

A variant is the shipped file with some text replaced, each found exactly once: it can't fall behind
the stage unnoticed, and what it changes is all that it changes. A helper beside the stage that it
changes, too, is `inlined`: its text first takes the place of its import.
"""

import argparse
import re
import tomllib
from pathlib import Path
from typing import Any

from harness.records.code import first_file, label

HERE = Path(__file__).parent
FILES = {number: first_file(number) for number in (6, 8, 9)}
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def read() -> dict[int, dict[str, dict[str, Any]]]:
    """stage -> name -> a variant's number, title and changes."""
    found = tomllib.loads((HERE / "variants.toml").read_text(encoding="utf-8"))
    model = found["8"].pop("parts")  # what all of parts_N have in common
    parts = {
        f"parts_{n}": {
            "number": 80 + index,
            "title": f"in {n} parts",
            "changes": [[old, new.replace("N_PARTS", str(n))] for old, new in model["changes"]],
        }
        for index, n in enumerate(PARTS)
    }
    found["8"] = parts | found["8"]
    return {int(number): variants for number, variants in found.items()}


VARIANTS = read()


def variant(name: str) -> str:
    """The text of a variant; ValueError where the stage no longer has a text that it replaces."""
    [(stage, made)] = [(stage, known[name]) for stage, known in VARIANTS.items() if name in known]
    file = FILES[stage]
    text = file.read_text(encoding="utf-8")
    # a variant is one file: what the stage's first file imports from its folder stays the stage's
    text = text.replace("\nfrom .", f"\nfrom stages.{label(file)}.")
    title = text.partition('    title="')[2].partition('"')[0]
    own = [
        [f"    number={stage},", f"    number={made['number']},"],
        [f'    name="{label(file).removesuffix(".py")[4:]}"', f'    name="{name}"'],
        [f'    title="{title}"', f'    title="{made["title"]}"'],
    ]
    if helper := made.get("inlined"):
        own.append(inlined(helper, text))
    for old, new in own + made["changes"]:
        if text.count(old) != 1:
            raise ValueError(f"{name}: {text.count(old)} x in {label(file)}, expected 1: {old!r}")
        text = text.replace(old, new)
    return text


def inlined(helper: str, text: str) -> list[str]:
    """The line of `text` that imports from a file beside the stage, and that file's text."""
    [line] = re.findall(rf"^from stages\.{helper} import .*\n", text, re.MULTILINE)
    file = HERE.parent / "stages" / (helper.replace(".", "/") + ".py")
    return [line, file.read_text(encoding="utf-8")]


def write(folder: Path, number: int = 6) -> list[Path]:
    """Write every variant of stage 6, 8 or 9 to `folder`, and say where.

    Raises OSError where `folder` can't be made or written to, as where it is a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in VARIANTS[number]:
        path = folder / f"{name}.py"
        path.write_text(variant(name), encoding="utf-8")
        paths.append(path)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int, choices=tuple(FILES), default=6)
    given = parser.parse_args()
    try:
        print(*write(given.folder, given.stage), sep="\n")
    except OSError as error:
        raise SystemExit(
            f"make_variants: {given.folder}: {error.strerror}; give another folder"
        ) from None
