"""Numbers and texts as people read them: in reasons, tables and pictures."""

import math
from collections.abc import Sequence
from typing import Any

LONGEST_TEXT = 4000  # characters: nobody reads more, and a picture has no room for it
DEEPEST = 64  # levels of nested lists and objects


def clean(value: Any, deepest: int = DEEPEST) -> Any:
    """Make every text in a JSON value safe to print: on one line, without control characters.

    A character that isn't printable (escape codes, line ends, half a surrogate pair) becomes "?".
    """
    if isinstance(value, str):
        cut = value if len(value) <= LONGEST_TEXT else value[:LONGEST_TEXT] + " ..."
        return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)
    if isinstance(value, (list, dict)) and not deepest:
        return "..."
    if isinstance(value, dict):
        return {clean(name): clean(item, deepest - 1) for name, item in value.items()}
    return [clean(item, deepest - 1) for item in value] if isinstance(value, list) else value


def show_bytes(size: float) -> str:
    """A size in powers of 1024: 1.5 MB."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024 or unit == "GB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 1000 else f"{size:.3g} {unit}"


def show_time(ms: float | None) -> str:
    """A time, three digits: 12.3 us, 4.56 ms, 1.23 s."""
    if ms is None:
        return "-"
    for factor, unit in ((1e3, "us"), (1.0, "ms")):
        if ms * factor < 999.5:
            return f"{significant(ms * factor)} {unit}"
    return f"{significant(ms / 1e3)} s"


def show_rate(value: float, unit: str) -> str:
    """A rate given in 10^12 per second, three digits: 790 TFLOP/s, 12.3 GB/s, 1.5 MFLOP/s."""
    for prefix in ("T", "G", "M", "k"):
        if value >= 0.9995 or prefix == "k":
            break
        value *= 1e3
    return f"{significant(value)} {prefix}{unit.removeprefix('T')}"


def fixed(values: Sequence[float], digits: int) -> list[str]:
    """Numbers with as many decimals each, so many that the first has `digits` digits: 1.20, 0.98.

    Whole numbers where it has as many before the point; zeros at the end are kept.
    """
    size = math.floor(math.log10(float(f"{values[0]:.{digits - 1}e}"))) if values[0] > 0 else 0
    return [f"{x:.{max(0, digits - 1 - size)}f}" for x in values]


def significant(x: float, digits: int = 3) -> str:
    """`x` to so many significant digits, without an exponent: 1234, 12.3, 0.00123."""
    text = f"{x:.{digits}g}"
    return f"{float(text):.0f}" if "e+" in text else text
