"""Execute the notebooks: notebooks/NAME.py, a jupytext percent script, becomes NAME.ipynb.

    python tools/build_notebooks.py                all of them
    python tools/build_notebooks.py 04_to_05       some
    python tools/build_notebooks.py --jobs 2       two at a time: quick, its times no good
    python tools/build_notebooks.py --words        only words have changed: outputs are kept

The script is the source; the .ipynb is made from it, and holds outputs and pictures so that a code
host shows them. Measure on a machine that does nothing else.
"""

import argparse
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.records.environment import own_files

FOLDER = Path(__file__).parent.parent / "notebooks"
CELL_SECONDS = 240  # for one cell of a slow machine
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def names() -> list[str]:
    """The notebooks there are, in order."""
    return [path.stem for path in own_files("notebooks/*.py")]


def from_script(name: str) -> Any:
    """The notebook that notebooks/`name`.py describes, without outputs; the same at every call."""
    import jupytext

    notebook = jupytext.read(FOLDER / f"{name}.py")
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index:02d}"  # jupytext's own are drawn anew each time
        cell.metadata = {}
    return notebook


def execute(name: str, folder: Path, kernel: Any = None) -> Any:
    """The notebook executed, cell by cell, in `folder`, by this Python's own kernel.

    `kernel`: the manager of one that runs, in that folder. Raises
    nbclient.exceptions.CellExecutionError where a cell raises.
    """
    from nbclient import NotebookClient

    notebook = from_script(name)
    client = NotebookClient(
        notebook, km=kernel, timeout=CELL_SECONDS, kernel_name="python3", record_timing=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    )  # fmt: skip
    client.execute()
    # what the kernel says of itself, such as its version, is not of the notebook
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return notebook


def build(name: str) -> Path:
    """Execute one and write its .ipynb."""
    import nbformat

    with tempfile.TemporaryDirectory() as folder:  # what its cells write stays out of the checkout
        notebook = execute(name, Path(folder))
    path = FOLDER / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def reword(name: str) -> Path:
    """Take the script's words into the .ipynb, its outputs kept. SystemExit where code changed."""
    import nbformat

    path = FOLDER / f"{name}.ipynb"
    notebook, script = nbformat.read(path, as_version=4), from_script(name)
    before, after = (
        [cell for cell in x.cells if cell.cell_type == "code"] for x in (notebook, script)
    )
    if [cell.source for cell in before] != [cell.source for cell in after]:
        raise SystemExit(f"{name}: its code has changed too: execute it, without --words")
    for old, new in zip(before, after, strict=True):
        new.outputs, new.execution_count = old.outputs, old.execution_count
    nbformat.write(script, path)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Execute the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(names())}")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--words", action="store_true", help="keep the outputs that there are")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(names()):
        parser.error(f"no such notebook: {', '.join(sorted(unknown))}")
    if given.jobs < 1:
        parser.error(f"--jobs: got {given.jobs}, expected 1 or more")
    with ThreadPoolExecutor(given.jobs) as pool:
        for path in pool.map(reword if given.words else build, given.names or names()):
            print(f"{path.name}  {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
