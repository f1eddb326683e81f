"""Write stage 6, 8 or 9 in other ways, each with one thing changed, so that it can be measured.

    python tools/make_variants.py build/variants
    ladder run --stages 6 --stage build/variants/grid_1d.py ... --n 4096 --paired
    python tools/make_variants.py build/parts --stage 8
    ladder bench --suite decode --stages 8 --stage build/parts/parts_1 ...
    python tools/make_variants.py build/hopper --stage 9
    ladder bench --stages 9 --stage build/hopper/in_turn ... --dtype bfloat16 --n 1024,4096,16384

tools/variants.toml says what each one is, and what it changes. Of stage 8 there are also parts_N:
the keys in N parts, or one for each tile, whatever the cost model says.

A variant is the shipped stage with some text replaced, each found exactly once: it can't fall
behind the stage unnoticed, and what it changes is all that it changes. Of stages 8 and 9, which are
folders, it is a folder.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from course.edits import changed, texts_of, write_texts  # noqa: E402

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


def variant(name: str) -> dict[str, str]:
    """File name -> text of a variant; ValueError where the stage lacks a text that it replaces."""
    number = stage_of(name)
    made = VARIANTS[number][name]
    first = next(iter(texts_of(number).values()))  # another file may declare a version of the stage
    declared = re.search(r"^    number=.*,\n    name=.*,\n    title=.*,$", first, re.MULTILINE)
    if declared is None:
        raise ValueError(f"stage {number}: expected its number, name and title, each on a line")
    own = f'    number={made["number"]},\n    name="{name}",\n    title="{made["title"]}",'
    return changed(number, [(declared[0], own), *made["changes"]], name)


def stage_of(name: str) -> int:
    """The stage that a variant is made of."""
    [number] = [number for number, known in VARIANTS.items() if name in known]
    return number


def write(folder: Path, number: int = 6) -> list[Path]:
    """Write every variant of stage 6, 8 or 9 to `folder`, and say where.

    Raises OSError where `folder` can't be made or written to, as where it is a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in VARIANTS[number]:
        paths.append(write_texts(number, variant(name), folder, name))
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int, choices=tuple(VARIANTS), default=6)
    given = parser.parse_args()
    try:
        print(*write(given.folder, given.stage), sep="\n")
    except OSError as error:
        raise SystemExit(
            f"make_variants: {given.folder}: {error.strerror}; give another folder"
        ) from None
