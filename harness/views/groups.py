"""Which records belong together, what they have in common, and what their stages are called."""

import json
from collections.abc import Callable, Collection, Sequence

from harness.problems.problem import PEERS_FROM, YARDSTICK, YARDSTICK_NAME
from harness.records.schema import LATER, PROBLEM, Record

Stage = tuple[int, str]  # number and name of a stage or peer
THREE = YARDSTICK, YARDSTICK_NAME
# what the records of a family have in common: b shrinks where N grows, in some runs
FAMILY = [field for field in PROBLEM if field not in ("b", "nq", "nk", "seed")]


def grouped(records: Sequence[Record], key: Callable[[Record], object]) -> list[list[Record]]:
    """Group records with equal keys, in the order in which the keys first occur."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps(key(record)), []).append(record)
    return list(groups.values())


def stage_of(record: Record) -> Stage:
    """Number and name of the stage of a record, or of a stage in the env line."""
    return record["stage"], record["name"]


def stages_of(records: Sequence[Record]) -> list[Stage]:
    """The stages and peers that have records, by number."""
    return sorted(set(map(stage_of, records)))


def ours(stages: Sequence[Stage]) -> list[Stage]:
    """The stages among stages and peers."""
    return [stage for stage in stages if stage[0] < PEERS_FROM]


def titles(env: Record) -> dict[Stage, str]:
    """Map (stage, name) to the title in the run's env line."""
    return {stage_of(stage): stage["title"] for stage in env["rungs"]}


def labels(env: Record) -> dict[Stage, str]:
    """Map (stage, name) to number and title: '3 torch, three GEMMs'."""
    return {stage: f"{stage[0]} {title}" for stage, title in titles(env).items()}


def numbers(stages: Collection[int]) -> str:
    """'stage 7' or 'stages 0, 1, 2'."""
    listed = ", ".join(map(str, sorted(stages)))
    return f"stage {listed}" if len(stages) == 1 else f"stages {listed}"


def by_problem(cells: Sequence[Record]) -> list[list[Record]]:
    """Group cells by problem, in the order of the problems' first cells; stages by number."""
    groups = grouped(cells, lambda cell: [cell[field] for field in PROBLEM])
    return [sorted(group, key=stage_of) for group in groups]


def families(cells: Sequence[Record]) -> list[list[Record]]:
    """Group cells that differ only in stage, N and batch size, or only in stage and Nk."""

    def key(cell: Record) -> list[object]:
        few = cell["nq"] != cell["nk"]
        return [*(cell[field] for field in FAMILY), [cell["nq"], cell["b"]] if few else None]

    return grouped(cells, key)


def sizes(cells: Sequence[Record]) -> list[int]:
    """The N of cells."""
    return sorted({cell["nk"] for cell in cells})


def find(cells: Sequence[Record], stage: Stage | None, n: int) -> Record | None:
    """The cell of a stage or peer at N, None where it has none."""
    return next((c for c in cells if stage_of(c) == stage and c["nk"] == n), None)


def few_rows(record: Record) -> bool:
    """Whether there are fewer queries than keys."""
    return bool(record["nq"] < record["nk"])


def shapes(records: Sequence[Record], *besides: str) -> list[list[Record]]:
    """Those in one piece that differ in their stage, or in what is named `besides`, alone."""
    whole = [record for record in records if record["page_size"] is None]
    fields = [field for field in PROBLEM if field not in besides]
    # an older plan may lack fields of a problem
    return grouped(whole, lambda record: [record.get(each, LATER.get(each)) for each in fields])


def title(cells: Sequence[Record], any_n: bool = False) -> str:
    """What the problems of cells have in common, in one line; without what is usual.

    `any_n`: it is the title of a family, without N also where there is only one.
    """
    first, ns = cells[0], {(cell["nq"], cell["nk"]) for cell in cells}
    nq, nk, b, h = (first[field] for field in ("nq", "nk", "b", "h"))
    tokens = sorted({cell["b"] * cell["nq"] for cell in cells})
    batch = f"b = {b}"
    if len({cell["b"] for cell in cells}) > 1:
        batch = "b N = " + "..".join(map(str, dict.fromkeys((tokens[0], tokens[-1]))))
    one = len(ns) == 1 and not any_n
    parts = (
        "" if nq == nk else f"Nq = {nq}",
        ("N" if nq == nk else "Nk") + f" = {nk}" if one else "",
        f"d = {first['d']}",
        "" if one and b == h == 1 else f"{batch}, h = {h}",
        "" if first["hk"] == h else f"hk = {first['hk']}",
        first["dtype"],
        "tf32" if first["precision"] == "tf32" else "",
        f"{first['inputs']} input",
        "causal" if first["causal"] else "",
        "" if first["seqlens_k"] is None else "padded",
        "" if first["direction"] == "fwd" else first["direction"],
        "" if first["world"] == 1 else f"{first['world']} ranks",
        first["device"],
    )
    return ", ".join(filter(None, parts))


def reasons(cells: Sequence[Record]) -> list[str]:
    """Why cells are not ok: one line per reason, with its stages, and N where there are several."""
    several = len({cell.get("nk") for cell in cells}) > 1  # of a model none has an N
    lines = []
    for same in grouped([c for c in cells if c["reason"]], lambda c: [c["status"], c["reason"]]):
        who = [
            f"#{own[0]['stage']}" + (f" at {listed(own)}" if several else "")
            for own in grouped(same, lambda cell: cell["stage"])
        ]
        between = "; " if several else ", "
        lines.append(f"{same[0]['status']} {between.join(who)}: {same[0]['reason']}")
    return lines


def listed(cells: Sequence[Record]) -> str:
    """The N of cells: '64, 128'."""
    return ", ".join(map(str, sizes(cells)))
