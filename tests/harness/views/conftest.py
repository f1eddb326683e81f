"""What tests of several views share."""

import pytest
from matplotlib import pyplot
from saved_figures import remember


@pytest.fixture
def figures(monkeypatch):
    """name of the file -> the figure that was saved into it."""
    saved = {}
    remember(monkeypatch, saved)
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    yield saved
    monkeypatch.undo()
    pyplot.close("all")
