"""What the page's lesson shows of the ladder itself: its stages, and figures of its code."""

from typing import Any

from harness.records.code import built_in_files, peer_files, read_declared


def collect() -> dict[str, Any]:
    """The data of the lesson's modules, by key; all of it JSON can hold."""
    return {"stages": stages()}


def stages() -> list[dict[str, Any]]:
    """Number, name, title and idea of each stage and peer, as its file declares them."""
    declared = map(read_declared, [*built_in_files(), *peer_files()])
    fields = ("number", "name", "title", "idea")
    return [{field: each.get(field) for field in fields} for each in declared]
