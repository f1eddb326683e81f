"""Put the page together: one HTML file with styles, modules and data, which loads nothing.

web/index.html lists the sections in their order. A section names a module of web/, and this module
exports `mount(element, data)`: it fills the section's `.mount` from the data that `make` is given.

The modules import each other by relative paths, so that node runs them as they are. In the page
each is a data: URL under its bare name in an import map, since a file opened from disk may load no
module from another file. The page's Content-Security-Policy allows no request at all.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.views.look import DARK, LIGHT, Look, mark

WEB = Path(__file__).parent / "web"
IMPORT = re.compile(r'(\bfrom |\bimport )"\./([^"]+)\.js"')
START = 'import "main";'
INKS = ("ink", "soft", "faint", "ground", "orange")  # of a Look


def make(data: Mapping[str, Any]) -> str:
    """Return the page's HTML. `data`, what JSON can hold, goes to each module's `mount`.

    data["stages"] lists the stages and peers, each a dict with its "number": they get a colour.
    """
    modules = json.dumps({"imports": imports()})
    parts = {
        "policy": policy(modules, START),
        "style": colours([stage["number"] for stage in data["stages"]]) + styles(),
        "modules": modules,
        "start": START,
        # "</script>" in a text would end the element, "<!--<script>" would keep it open
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    page, *others = re.split(r"<!-- put (\w+) here -->", text("index.html"))
    return page + "".join(
        parts[name] + rest for name, rest in zip(others[::2], others[1::2], strict=True)
    )


def text(name: str) -> str:
    """The text of a file in web/."""
    return (WEB / name).read_text(encoding="utf-8")


def styles() -> str:
    """The style sheets, the shell's first."""
    names = (path.name for path in sorted(WEB.glob("*.css"), reverse=True))
    return "".join(map(text, names))


def imports() -> dict[str, str]:
    """Map each module's bare name, 'player' or 'vendor/plot', to its data: URL."""
    found = {}
    for path in sorted(WEB.rglob("*.js")):
        name = path.relative_to(WEB).with_suffix("").as_posix()
        code = IMPORT.sub(r'\1"\2"', path.read_text(encoding="utf-8"))
        found[name] = "data:text/javascript;base64," + base64.b64encode(code.encode()).decode()
    return found


def policy(*scripts: str) -> str:
    """The Content-Security-Policy: these inline scripts, what is in the page, and no request."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
    return (
        f"default-src 'none'; script-src data: {allowed}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def colours(numbers: list[int]) -> str:
    """The colours of docs' figures as CSS variables: --ink, ..., and --stage-N of each stage."""
    both = [f"--{name}:light-dark({of(LIGHT, name)},{of(DARK, name)})" for name in INKS]
    stages = [f"--stage-{number}:{mark(number).colour}" for number in numbers]
    return f":root{{{';'.join(both + stages)}}}\n"


def of(look: Look, name: str) -> str:
    """A colour of a look by its name."""
    colour: str = getattr(look, name)
    return colour
