"""The picture of split products: the pieces of a float32, and which of their nine products count.

The arithmetic is that of stages/common/products.py.
"""

from typing import Any

from harness.views.look import COLOURS, Look, halo, in_look, new_figure

BITS = 8  # of a bfloat16, and of each piece
PIECES = ("high", "middle", "low")
EXPONENT, SIGNIFICANT = 6.0, 13.5  # where these bits of a number begin, in widths of a bit
WORDS = 14  # the size of letters: the picture is read at 400 pixels, too


def power(row: int, column: int) -> int:
    """About 2 to this power of a b is the product of piece `row` of a and piece `column` of b."""
    return -BITS * (row + column)


def kept(row: int, column: int) -> bool:
    """Whether the product of two pieces counts; those that don't are below float32's last bit."""
    return row + column < len(PIECES)


def paint(piece: int, look: Look) -> dict[str, Any]:
    """Fill and hatching of a piece, distinct also in grey."""
    colours, hatches = (look.blue, look.orange, COLOURS[6]), (None, "///", "...")
    return {"facecolor": colours[piece], "edgecolor": look.ink, "hatch": hatches[piece]}


def figure(look: Look) -> Any:
    """Draw the pieces of a float32, and below them the products of the pieces of two."""
    with in_look(look):
        picture = new_figure(6.0, 7.6)
        picture.get_layout_engine().set(hspace=0.08)
        above, below = picture.subplots(2, 1, height_ratios=(1.0, 1.5))
        draw_pieces(above, look)
        draw_products(below, look)
    return picture


def box(axis: Any, x: float, y: float, width: float, height: float, **style: Any) -> None:
    """Draw a rectangle with its lower left corner at (x, y)."""
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x, y), width, height, **{"linewidth": 0.8} | style))


def draw_pieces(axis: Any, look: Look) -> None:
    """Draw the bits of a float32, and below each significant bit the piece that has it."""
    ends = SIGNIFICANT + BITS * len(PIECES)
    for x, words in ((EXPONENT + 3, "exponent"), ((SIGNIFICANT + ends) / 2, "24 significant bits")):
        axis.text(x, 1.3, words, fontsize=WORDS, ha="center")
    for row, name in enumerate(("float32", *PIECES)):
        y = -1.5 * row
        axis.text(0, y + 0.5, name, fontsize=WORDS, va="center")
        for bit in range(BITS):  # as many bits in a bfloat16 as in a float32
            box(axis, EXPONENT + 0.75 * bit, y, 0.75, 1, fill=False, edgecolor=look.ink)
        for bit in range(BITS * len(PIECES)):
            if not row or bit // BITS == row - 1:
                box(axis, SIGNIFICANT + bit, y, 1, 1, **paint(bit // BITS, look))
    axis.set_title("three bfloat16 hold one float32", fontsize=WORDS, weight="bold")
    axis.set_xlim(0, ends + 0.1)
    axis.set_ylim(-4.6, 2.2)
    axis.set_axis_off()


def draw_products(axis: Any, look: Look) -> None:
    """Draw the nine products: the six that count filled, the three that don't crossed out."""
    for row, name in enumerate(PIECES):
        box(axis, row, 3.05, 1, 0.14, **paint(row, look))
        axis.text(row + 0.5, 3.25, f"b {name}", fontsize=WORDS, ha="center", va="bottom")
        box(axis, -0.1, 2 - row, 0.07, 1, **paint(row, look))
        axis.text(-0.15, 2.5 - row, f"a {name}", fontsize=WORDS, ha="right", va="center")
        for column in range(len(PIECES)):
            x, y, size = column + 0.02, 2.04 - row, (0.96, 0.92)
            if kept(row, column):
                box(axis, x, y, *size, facecolor=look.blue, alpha=0.85 - 0.3 * (row + column))
                box(axis, x, y, *size, fill=False, edgecolor=look.ink)
            else:
                box(axis, x, y, *size, fill=False, edgecolor=look.soft, linestyle=":")
                for ends in ((y, y + size[1]), (y + size[1], y)):
                    axis.plot((x, x + size[0]), ends, color=look.soft, linewidth=1.2)
            exponent = power(row, column)
            axis.text(
                column + 0.5, 2.5 - row, f"$2^{{{exponent}}}$" if exponent else "1", fontsize=18,
                ha="center", va="center", path_effects=halo(look),
            )  # fmt: skip
    axis.set_title("nine products, and their sizes: six count", fontsize=WORDS, weight="bold")
    axis.set_xlim(-0.95, 3.05)
    axis.set_ylim(-0.05, 3.6)
    axis.set_axis_off()
