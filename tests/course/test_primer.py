"""The primer's first kernels: the folded lines are right, and a check says what is wrong."""

import contextlib
import importlib.util
import io
import re
import runpy
from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).parents[2]
CELLS = jupytext.read(ROOT / "notebooks" / "primer.py").cells
CODE = [cell.source for cell in CELLS if cell.cell_type == "code"]
KERNELS = ["add_kernel", "softmax_kernel", "matmul_kernel"]
no_triton = importlib.util.find_spec("triton") is None
ways = pytest.mark.parametrize(
    "twin",
    [pytest.param(False, marks=pytest.mark.skipif(no_triton, reason="no Triton")), True],
    ids=["triton", "numpy"],
)


def cell_with(text):
    return next(cell for cell in CODE if text in cell)


def folded_lines(kernel):
    """The lines that the notebook folds away below the check of `kernel`."""
    words = "\n".join(cell.source for cell in CELLS if cell.cell_type == "markdown")
    blocks = re.findall(r"```python\n(.*?)```", words, re.DOTALL)
    return blocks[KERNELS.index(kernel)].splitlines()


def filled(kernel, changes):
    """The kernel's cell, its gaps filled with the folded lines; `changes` replace some of them."""
    lines = {line.split(" = ")[0]: line for line in [*folded_lines(kernel), *changes]}

    def fill(found):
        return found[1] + lines[found[2]] if "____" in found[0] else found[0]

    text = re.sub(r"^( *)(\w+) = .*$", fill, cell_with(f"def {kernel}("), flags=re.M)
    assert "____" not in text
    return text


def said(folder, kernel_cell, kernel, twin):
    """What the check below the kernel's cell prints; `twin`: as where there is no Triton."""
    start = cell_with("from course.primer import check")
    if twin:
        start = re.sub(r"^    import triton.*", "    raise ImportError", start, flags=re.M)
    head = 'import torch\nimport course.notebook as nb\ndevice = nb.here(cpu="cpu", gpu="cuda")'
    head = head.replace('nb.here(cpu="cpu", gpu="cuda")', '"cpu"') if twin else head
    cells = [head, start, kernel_cell, cell_with(f"check(\n    {kernel},")]
    script = folder / "cells.py"  # in a file, as a kernel's source is read again
    script.write_text("\n\n\n".join(cells))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(script))
    *before, last = out.getvalue().splitlines()
    assert before == (["There is no Triton here. A twin in NumPy runs the same kernels."] * twin)
    return last


@ways
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_folded_lines_are_right(kernel, twin, tmp_path):
    assert said(tmp_path, filled(kernel, []), kernel, twin) == "Right."


@ways
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gap_is_no_error(kernel, twin, tmp_path):
    cell = cell_with(f"def {kernel}(")
    gaps = len(re.findall("____", cell))
    assert said(tmp_path, cell, kernel, twin) == f"Not written yet: {gaps} gaps left."


def test_the_pages_way_into_stage_4_shows_lines_that_it_has():
    page = (ROOT / "docs" / "primer.md").read_text().split("## Now read stage 4")[1]
    shown = [
        code for row in re.findall(r"^\| (`.*?) \|", page, re.M) for code in row.split("`")[1::2]
    ]
    stage = (ROOT / "stages" / "s04_triton_lite.py").read_text()
    assert len(shown) > 8
    assert [x for code in shown for x in code.split("...") if x not in stage] == []


WRONG = [
    ("add_kernel", "offs = tl.arange(0, BLOCK)", "every program did the same block"),
    ("add_kernel", "mask = offs < n - n % BLOCK", "the last elements are missing"),
    ("add_kernel", "mask = offs < n + 1", ("wrote outside the output", "element 100 of a tensor")),
    ("add_kernel", "mask = offs < n // 2", "out[50]: never written"),
    (
        "softmax_kernel",
        "s = tl.load(x_ptr + row * N + offs, mask=mask, other=0.0)",
        "do elements that don't exist have a weight",
    ),
    ("softmax_kernel", "e = tl.exp(s)", "Subtract the row's max"),
    ("softmax_kernel", "p = e", "Divide by their sum"),
    ("softmax_kernel", "p = tl.sum(missing, 0)", "It stopped: "),
    ("matmul_kernel", 'acc = tl.dot(a, b, input_precision="ieee")', "only the last step along K"),
    (
        "matmul_kernel",
        "offs_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        "tl.program_id(1)",
    ),
    (
        "matmul_kernel",
        "b_mask = (offs_n < N)[None, :]",
        ("not a number", "of a tensor that has 1750"),
    ),
    (
        "matmul_kernel",
        "b = tl.load(b_ptr + offs_k[:, None] + offs_n[None, :] * N, mask=b_mask, other=0.0)",
        ("expected", "expected"),
    ),
]


@ways
@pytest.mark.parametrize("kernel, line, words", WRONG, ids=[line for _, line, _ in WRONG])
def test_a_wrong_kernel_is_told_what_is_wrong(kernel, line, words, twin, tmp_path):
    told = said(tmp_path, filled(kernel, [line]), kernel, twin)
    assert told.startswith(("Wrong: ", "It stopped: "))
    assert (words if isinstance(words, str) else words[twin]) in told
