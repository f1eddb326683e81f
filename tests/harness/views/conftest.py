"""What tests of several views share: the figures that they save, by the names of their files."""

from contextlib import contextmanager

import matplotlib

matplotlib.use("Agg")
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

from harness.views import look


@pytest.fixture
def figures(monkeypatch):
    """name of the file -> the figure that was saved into it. The files are empty.

    To draw them takes most of the time, and nobody looks.
    """
    whole, names, saved = look.whole, {}, {}

    @contextmanager
    def named(path):
        with whole(path) as draft:
            names[draft] = path.name
            yield draft

    def savefig(figure, path, **options):
        saved[names.get(path, path.name)] = figure
        path.write_bytes(b"")

    monkeypatch.setattr(look, "whole", named)
    monkeypatch.setattr(Figure, "savefig", savefig)
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    yield saved
    monkeypatch.undo()
    pyplot.close("all")
