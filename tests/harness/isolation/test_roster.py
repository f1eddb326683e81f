"""What a stage can't be asked is skipped before a process is started for it."""

from dataclasses import replace

import pytest

from harness.isolation.roster import describe_files
from harness.problems.problem import Problem
from harness.records.code import built_in_files, twin_files

ONE = Problem("normal", 0, 1, 1, 1, 1, 1, 1, "float32", "ieee", False, None, "cpu")


@pytest.mark.parametrize(("names", "what"), [(["b"], "batch entries"), (["h", "hk"], "heads")])
def test_more_than_an_axis_of_the_grid_has_is_skipped(names, what):
    for stage in describe_files([*built_in_files(), *twin_files()]):
        if stage.why_skip(ONE):
            continue  # computes on a GPU only
        assert stage.why_skip(replace(ONE, **dict.fromkeys(names, 65535))) is None
        why = stage.why_skip(replace(ONE, **dict.fromkeys(names, 65536)))
        if stage.modes["cpu"] == "interpreted":
            assert "at most 65535" in why and what in why
        else:
            assert why is None
