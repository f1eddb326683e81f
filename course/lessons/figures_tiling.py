"""The picture of tiling: blocks of queries, tiles of keys, and the tiles a causal mask skips.

A program has BLOCK_M query rows and goes through tiles of BLOCK_N keys. With a causal mask row i
sees the keys up to i + Nk - Nq. A tile that all rows of the block see completely needs no mask; a
tile that some row sees in part needs one; a tile that no row sees is never loaded.
(FlashAttention-2, Dao 2023, section 3.1.)
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.views.look import Look, in_look, new_figure, plain

FULL, MASKED, NEVER = "full", "masked", "never"
WORDS = {
    FULL: "visited, no mask: every row sees every key",
    MASKED: "visited with a mask: some pairs are hidden",
    NEVER: "never loaded: no row sees a key",
}


@dataclass(frozen=True)
class Case:
    """One problem, and the tiles of its program."""

    nq: int
    nk: int
    causal: bool
    block_m: int = 64
    block_n: int = 64

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of query blocks and key tiles."""
        return -(-self.nq // self.block_m), -(-self.nk // self.block_n)

    def seen_by(self, row: int) -> int:
        """How many keys a row sees, counted from the first."""
        return min(max(row + self.nk - self.nq + 1, 0), self.nk) if self.causal else self.nk


CASES = (
    Case(512, 480, False),
    Case(512, 512, True, 128, 64),
    Case(256, 512, True),
    Case(512, 256, True),
)


def title(case: Case) -> str:
    """The title of a panel."""
    mask = "causal" if case.causal else "no mask"
    sizes = f"N = {case.nq}" if case.nq == case.nk else f"Nq = {case.nq}, Nk = {case.nk}"
    return f"{mask}, {sizes}; q blocks of {case.block_m}, tiles of {case.block_n}"


def kinds(case: Case) -> np.ndarray[Any, Any]:
    """FULL, MASKED or NEVER for each block and tile, (blocks, tiles) of str.

    A tile that reaches past the last key is MASKED: the part past it is hidden from all rows.
    """
    found = np.full(case.shape, NEVER, dtype="<U6")
    for block, tile in np.ndindex(case.shape):
        first = block * case.block_m  # this row of the block sees the fewest keys
        last = min(first + case.block_m, case.nq) - 1
        start = tile * case.block_n
        if start + case.block_n <= case.seen_by(first):
            found[block, tile] = FULL
        elif start < case.seen_by(last):
            found[block, tile] = MASKED
    return found


def figure(look: Look) -> Any:
    """Draw the four CASES, one panel each."""
    with in_look(look):
        from matplotlib.patches import Patch

        picture = new_figure(10.0, 9.6)
        for axis, case in zip(picture.subplots(2, 2).flat, CASES, strict=True):
            draw(axis, case, look)
        handles = [Patch(label=WORDS[kind], **paint(kind, look)) for kind in WORDS]
        picture.legend(handles=handles, loc="outside lower center", ncols=1, fontsize=9)
    return picture


def paint(kind: str, look: Look) -> dict[str, Any]:
    """Fill and hatching of a tile, distinct also in grey."""
    return {"linewidth": 0.8} | {
        FULL: {"facecolor": look.blue, "edgecolor": look.ink},
        MASKED: {"facecolor": look.ground, "edgecolor": look.orange, "hatch": "////"},
        NEVER: {"facecolor": "none", "edgecolor": look.soft, "linestyle": ":"},
    }[kind]


def draw(axis: Any, case: Case, look: Look) -> None:
    """Draw the tiles, the edge of the visible part, and how many tiles each block visits."""
    from matplotlib.patches import Rectangle

    found = kinds(case)
    blocks, tiles = case.shape
    width, height = tiles * case.block_n, blocks * case.block_m
    # the hatching has its own colour, the outline that of the others
    outline = {"fill": False, "edgecolor": look.ink, "linewidth": 0.8}
    for (block, tile), kind in np.ndenumerate(found):
        corner = (tile * case.block_n, block * case.block_m)
        for style in [paint(kind, look), outline] if kind == MASKED else [paint(kind, look)]:
            axis.add_patch(Rectangle(corner, case.block_n, case.block_m, **style))
    edge(axis, case, look)
    for block, visited in enumerate((found != NEVER).sum(axis=1)):
        axis.text(
            1.02 * width, (block + 0.5) * case.block_m, f"{visited} of {tiles}", va="center",
            fontsize=8.5, clip_on=False,
        )  # fmt: skip
    axis.set_title(f"{title(case)}\n{(found != NEVER).sum()} of {found.size} tiles visited")
    axis.set_xlim(-0.01 * width, 1.01 * width)
    axis.set_ylim(1.01 * height, -0.01 * height)
    axis.set_aspect("equal")
    axis.set_xticks(range(0, width + 1, 128))
    axis.set_yticks(range(0, height + 1, 128))
    axis.set_xlabel("keys")
    axis.set_ylabel("queries")
    axis.spines[:].set_visible(False)


def edge(axis: Any, case: Case, look: Look) -> None:
    """Draw the last key that each row sees as a line; everything left of it is visible."""
    blind = max(0, case.nq - case.nk) if case.causal else 0  # rows that see no key
    keys = [case.seen_by(blind - 1), case.nk]
    axis.plot(keys, [blind, case.nq], color=look.ink, linewidth=2.4, solid_capstyle="butt")
    if blind:
        axis.text(
            case.nk / 2, blind / 2, "these rows see no key:\no = 0", ha="center", va="center",
            fontsize=8.5, bbox=plain(look),
        )  # fmt: skip
