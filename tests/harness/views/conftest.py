"""What tests of several views share."""

import matplotlib.figure
import pytest
from matplotlib import pyplot


@pytest.fixture
def figures(monkeypatch):
    """name of the file -> the figure that was saved into it."""
    saved = {}
    save = matplotlib.figure.Figure.savefig

    def remember(figure, path, **options):
        saved[path.name] = figure
        save(figure, path, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", remember)
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    yield saved
    monkeypatch.undo()
    pyplot.close("all")
