"""Scores as large as their dtype makes them, compiled: an interpreter rounds each product."""

import pytest
from test_magnitudes import (  # noqa: F401  the same tests, of what runs on a GPU here
    test_gradients_of_large_scores_are_refused,
    test_scores_of_any_size,
)

pytestmark = pytest.mark.gpu
