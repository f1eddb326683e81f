"""Stages that tests hand in as files, each made from an entry of a TOML table.

An entry has `about`, a sentence, and `code`. Its file begins with that sentence, the table's `head`
(imports) and `STAGE`, with the number `stage` (else 90) and what the entry, or else the table,
`declares`. What [bases] has under the entry's `base` comes next, then its code, and an `attend`
of one line that gives what the entry `returns`. Where there is that, or an `attend` in the code,
the base's is called `honest`. In all of it each of `changes` replaces a text that is found exactly
once.
"""

import tomllib
from pathlib import Path

from course.edits import replace_each

# what a stage of the ladder says of itself, and so whoever stands in for it
DECLARES = {
    0: 'devices=("cpu",), gradients=True, ',
    1: 'devices=("cpu",), ',
    3: "gradients=True, ",
    5: 'needs=("triton",), ',
    7: 'needs=("triton",), gradients=True, options=("causal",), ',
    8: 'needs=("triton",), ',
}
LAST = "def attend(q, k, v):"


class Table:
    """The entries of a TOML file, by name."""

    def __init__(self, path):
        self.entries = tomllib.loads(path.read_text(encoding="utf-8"))
        self.head = self.entries.pop("head")
        self.bases = self.entries.pop("bases", {})
        self.declares = self.entries.pop("declares", "")

    def text(self, name, number=None):
        """The file of the entry `name`; `number`: another number for its stage."""
        entry = self.entries[name]
        code, base = entry.get("code", ""), self.bases.get(entry.get("base"), "")
        if "returns" in entry:
            code += f"{LAST}\n    return {entry['returns']}\n"
        if "def attend(" in code or "\nattend = " in code:
            base = base.replace(LAST, LAST.replace("attend", "honest"))
        own, about = entry.get("stage", 90), entry["about"]
        words = f"number={number or own}, name={name!r}, title={name!r}, idea={about!r}, "
        words += DECLARES.get(own, "") + entry.get("declares", self.declares)
        text = f'"""{about}"""\n{self.head}\nSTAGE = Stage({words})\n\n\n{base}{code}'
        return replace_each(text, entry.get("changes", ()), name)

    def write(self, folder, name, number=None):
        """The path of the entry `name`, written to `folder`."""
        path = Path(folder) / f"{name}.py"
        path.write_text(self.text(name, number), encoding="utf-8")
        return path

    def options(self, folder, *names, number=None):
        """--stage options for the entries `names`, written to `folder`."""
        return [x for name in names for x in ("--stage", str(self.write(folder, name, number)))]
