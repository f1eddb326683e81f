"""The libraries of others that are a part of the page, and their licences, which it shows."""

import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "web" / "vendor"


def libraries() -> list[dict[str, str]]:
    """What vendored.toml says of each library, its terms as text."""
    listed = tomllib.loads((FOLDER / "vendored.toml").read_text(encoding="utf-8"))["library"]
    return [each | {"terms": (FOLDER / each["terms"]).read_text(encoding="utf-8")}
            for each in listed]  # fmt: skip


def collect() -> dict[str, Any]:
    """What the page shows of them, under the key 'libraries'."""
    shown = ("title", "version", "licence", "terms")
    return {"libraries": [{name: each[name] for name in shown} for each in libraries()]}
