"""Names of the command line that have changed: the old ones work as before, and no help shows them.

Old commands are in ladder/hidden.py.
"""

from collections.abc import Sequence

from harness.records.schema import Record
from ladder.options import UserError

# command -> an option's old name -> its name
RENAMED = {
    "run": {"--direction": "--mode"},
    "lab": {"--numpy": "--cpu"},
    "bench": {"--impl": "--stages", "--plots": "--plot"},
}
WITH_SHOW = ("bench", "train", "generate")  # with --show, each is a command of ladder/hidden.py
MASKED = ("run", "bench", "trace")  # of which a --causal without a value means on


def as_now(words: Sequence[str]) -> list[str]:
    """A command and its options, `words` of the command line, in today's words."""
    command, *given = words
    names = [word.partition("=")[0] for word in given]
    if "--show" in names and command in WITH_SHOW:
        return [f"{command} --show", *given]
    for old, new in RENAMED.get(command, {}).items():
        if old in names and new in names:
            raise UserError(f"{old}: it is the old name of {new}; leave it away")
        given = [new + word[len(old) :] if name == old else word
                 for name, word in zip(names, given, strict=True)]  # fmt: skip
    if command in MASKED:
        following = [*given[1:], "--"]
        given = [
            "--causal=on" if word == "--causal" and after.startswith("-") else word
            for word, after in zip(given, following, strict=False)
        ]
    return [command, *given]


def arguments(kept: Record) -> Record:
    """The arguments in the env line of a run, by today's names, without those of older defaults."""
    named = {"direction": "mode", "impl": "stages"}
    known = {name: value for name, value in kept.items() if name not in named}
    known |= {named[name]: kept[name] for name in named if kept.get(name) is not None}
    if isinstance(known.get("causal"), bool):
        known["causal"] = "on" if known["causal"] else "off"
    if isinstance(known.get("nq"), int):
        known["nq"] = str(known["nq"])
    usual = [name for name in ("mode", "causal") if name in known and known[name] is None]
    return {name: value for name, value in known.items() if name not in usual}
