"""What the page's lesson shows of the ladder itself: its stages, and figures of its code."""

import ast
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from course.report.course import CLUSTER
from harness.problems.problem import ITEMSIZE
from harness.problems.ring_cost import Machine
from harness.records.code import built_in_files, first_file, peer_files, read_declared
from harness.records.environment import ROOT
from harness.records.jsonl import read
from harness.views import rings

SPLIT_KV, RING = 8, 10  # the stages that split keys, and that send them round a ring
COMMON = ROOT / "stages" / "common"
H200_MULTIPROCESSORS = 132  # stages/common/fit.py has it, too, and imports torch
GLOSSARY = ROOT / "docs" / "glossary.md"
TERMS = (
    "FLOP", "GEMM", "Gluon", "GQA", "Head", "IEEE", "Kernel", "Matrix unit", "Multiprocessor",
    "Paired", "Peer", "Program", "Rank", "Roofline", "SDPA", "Split products", "TF32", "Tile",
    "Warp", "Zigzag",
)  # fmt: skip
# terms that only the page uses without a word
OWN_TERMS = {
    "B, H, Hk, Nq, Nk, d": "The numbers of texts in a batch, of query heads, of heads of keys and "
    "values, of queries, of keys, and of columns of a head. N is both, where Nq = Nk. The records "
    "write b, h and hk.",
    "float64 rule": "An output is exact, and its record ok, if its error against stage 3 in "
    "float64 is at most twice that of stage 3 in the problem's own precision, or three times for "
    "gradients, plus a floor for rounding.",
    "Quartiles": "Of sorted numbers, those a quarter and three quarters of the way: half of all "
    "lie between them.",
    "Ridge": "The point of a roofline where its two roofs meet.",
    "TFLOP/s": "10^12 multiplications and additions a second.",
    "Triton": "A language for GPU kernels, written in Python: a program works on whole tiles, and "
    "the compiler chooses threads, registers and shared memory.",
}
TIMELINE = ROOT / "results" / "h200" / "hopper-timeline.jsonl"


def collect() -> dict[str, Any]:
    """The data of the lesson's modules, by key; all of it JSON can hold."""
    return {"stages": stages(), "splits": splits(), "timeline": timeline(), "ring": ring(),
            "terms": terms()}  # fmt: skip


def stages() -> list[dict[str, Any]]:
    """Number, name, title and idea of each stage and peer, as its file declares them."""
    declared = map(read_declared, [*built_in_files(), *peer_files()])
    fields = ("number", "name", "title", "idea")
    return [{field: each.get(field) for field in fields} for each in declared]


def splits() -> dict[str, Any] | None:
    """Figures of stage 8's rule for the number of parts: d up to 64, 16 bits, one H200.

    Read from its source, so that no torch is imported. None in a copy without the stage.
    """
    if all(each["number"] != SPLIT_KV for each in stages()):
        return None
    stage = constants(first_file(SPLIT_KV))
    tiles = stage["TILES"]["half"][0]
    return {
        "multiprocessors": H200_MULTIPROCESSORS,
        "tiles": {block_m: block_n for block_m, (block_n, *_) in tiles.items()},
        "most_rows": stage["MOST_ROWS"],
        "largest_tile": constants(COMMON / "kernels.py")["LARGEST_TILE"],
        "costs": {name.lower(): stage[name] for name in ("ALONE", "WAVE", "MERGE", "PART")},
        "computed": stage["COMPUTED"],
    }


def ring() -> dict[str, Any] | None:
    """The machine and heads of docs/ring.md's clusters. None in a copy without stage 10."""
    if all(each["number"] != RING for each in stages()):
        return None
    links = [{"name": name, "link": link, "latency": latency}
             for name, (link, latency) in rings.LINKS.items()]  # fmt: skip
    heads = {name: getattr(CLUSTER, name) for name in ("b", "h", "hk", "d")}
    return {
        "rate": rings.RATE, "hbm": Machine.hbm, "launch": Machine.launch, "links": links,
        "heads": heads | {"size": ITEMSIZE[CLUSTER.dtype]},
    }  # fmt: skip


def terms() -> list[list[str]]:
    """Terms and what they mean, by name: some of docs/glossary.md, where it is, and OWN_TERMS."""
    found = dict(OWN_TERMS)
    if GLOSSARY.is_file():
        parts = re.split(r"^### (.+)$", GLOSSARY.read_text(encoding="utf-8"), flags=re.MULTILINE)
        known = dict(zip(parts[1::2], parts[2::2], strict=True))
        found |= {term: plain(known[term]) for term in TERMS}
    return sorted(([*each] for each in found.items()), key=lambda each: each[0].lower())


def plain(markdown: str) -> str:
    """The first paragraph without marks and links; what is a link alone says nothing here."""
    paragraph = " ".join(markdown.strip().split("\n\n")[0].split())
    paragraph = re.sub(r"(?:(?<=\.)|:) \[[^\]]*\]\([^)]*\)(?=\.)", "", paragraph).replace("..", ".")
    return re.sub(r"[*`]|\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)


def constants(path: Path) -> dict[str, Any]:
    """The literals that a Python file assigns to names, by name."""
    found = {}
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            with suppress(ValueError):  # no literal
                found[ast.unparse(target)] = ast.literal_eval(node.value)
    return found


def timeline() -> dict[str, Any] | None:
    """The committed timeline of a Hopper tile: a record for each stage; None without the file."""
    if not TIMELINE.is_file():
        return None
    env, records = read(TIMELINE, "timeline")
    fields = ("stage", "cycles", "tile_cycles", "spans")
    return {
        "device": env["device_name"],
        "records": [{field: record[field] for field in fields} for record in records],
    }
