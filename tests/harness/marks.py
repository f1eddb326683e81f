"""Marks of parameters."""

import pytest


def slowly(*values):
    """Parameters that `make test` leaves out."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def quickly(count, values):
    """`values` as parameters, of which `make test` has the first `count`."""
    values = [*values]
    return [*values[:count], *slowly(*values[count:])]
