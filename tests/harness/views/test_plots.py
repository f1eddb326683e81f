"""Plots, from records made up by hand."""

import pytest
from made_up import make_cell, make_env

from harness.views import plots


def cells_of_a_ladder():
    cells = []
    for n in (64, 128, 256):
        by_design = "ok" if n == 64 else "wrong-by-design"
        cells += [
            make_cell(1, "raw_python", n=n, time_ms=n / 4),
            make_cell(3, "torch_three_gemm", n=n, time_ms=n / 1e3, err_f64_max=3e-7),
            make_cell(4, "lite", n=n, mode="compiled", status=by_design, err_f64_max=n / 100),
            make_cell(5, "online", n=n, mode="interpreted", time_ms=7.0 * n),
        ]
    return cells


def lines_in(figure):
    """label -> (N, values) of each stage's line."""
    lines = figure.axes[0].get_lines()
    shown = (line for line in lines if not line.get_label().startswith("_"))
    return {line.get_label(): tuple(map(list, line.get_data())) for line in shown}


def test_the_lines_are_the_records(tmp_path, figures):
    cells = cells_of_a_ladder()
    written = plots.plot(make_env(cells, {"raw_python": "raw"}), cells, tmp_path / "plots")
    assert [path.name for path in written] == ["time.png", "memory.png", "error.png"]
    for name, unit in zip(figures, ("(ms)", "(MB)", "float64"), strict=True):
        [axis] = figures[name].axes
        assert axis.get_xscale() == axis.get_yscale() == "log" and unit in axis.get_ylabel()
        assert [float(x) for x in axis.get_xticks()] == [64, 128, 256]
    time = lines_in(figures["time.png"])
    # no line for what is interpreted, no point for what is wrong by design
    assert time == {
        "1 raw": ([64, 128, 256], [16.0, 32.0, 64.0]),
        "3 torch_three_gemm": ([64, 128, 256], [0.064, 0.128, 0.256]),
        "4 lite": ([64], [1.0]),
    }
    memory = lines_in(figures["memory.png"])
    assert memory["5 online"] == ([64, 128, 256], [3.0, 3.0, 3.0])
    error = lines_in(figures["error.png"])
    assert error["4 lite"] == ([64, 128, 256], [0.64, 1.28, 2.56])
    legends = [text.get_text() for text in figures["error.png"].legends[0].get_texts()]
    assert legends == ["1 raw", "3 torch_three_gemm", "4 lite", "5 online"]
    notes = " ".join(text.get_text() for text in figures["time.png"].axes[0].texts)
    assert "interpreted" in notes


def test_the_alternative_text_names_every_line():
    cells = cells_of_a_ladder()
    said = plots.in_words(make_env(cells), cells, "error")
    assert "3 torch_three_gemm, 3e-07 at N = 64 to 3e-07 at N = 256;" in said
    assert "4 lite, 0.64 at N = 64 to 2.6 at N = 256, wrong by design from N = 128" in said
    assert "5 online" in said and "5 online" not in plots.in_words(make_env(cells), cells, "time")


def test_points_leave_out_what_has_no_place():
    def points(measure, **changes):
        [found] = plots.by_stage([make_cell(n=64, **changes)], measure).values()
        return found

    assert points("time", time_ms=2.0) == [(64, 2.0, True)]
    assert points("time", time_ms=2.0, mode="interpreted") == []
    assert points("time", time_ms=2.0, status="wrong-by-design") == []
    assert points("time", time_ms=None, status="crashed") == []
    for status in ("wrong", "skipped", "timeout", "out-of-memory"):
        for measure in plots.TITLES:
            assert points(measure, status=status) == []
    assert points("memory", peak_bytes=5 << 20) == [(64, 5.0, True)]
    assert points("memory", peak_bytes=0) == []  # no logarithm
    assert points("memory", mode="interpreted") == [(64, 3.0, True)]
    assert points("error", err_f64_max=0.5, status="wrong-by-design") == [(64, 0.5, False)]
    assert points("error", err_f64_max=0.0) == []
    both = [make_cell(), make_cell(n=64, paired=True)]  # alone and in turns: no line has both
    assert plots.panels(both, "time") == [both[:1]]


def test_a_panel_for_each_kind_of_problem(tmp_path, figures):
    cells = [make_cell(n=n) for n in (64, 128)]
    cells += [make_cell(n=n, d=16) for n in (8, 16)]
    cells += [make_cell(n=n, inputs="real", d=32) for n in (128, 256)]
    plots.plot(make_env(cells), cells, tmp_path)
    titles = [axis.get_title() for axis in figures["time.png"].axes]
    assert len(titles) == 3
    assert all(word in title for word, title in zip(("d = 64", "d = 16", "real input"), titles))


@pytest.mark.parametrize("direction", ["bwd", "train"])
def test_an_axis_says_which_direction_all_cells_have(direction):
    backward = [make_cell(direction=direction)]
    for what in ("time", "error"):
        assert plots.axis_title(backward, what) != plots.axis_title([make_cell()], what)
        assert plots.axis_title([*backward, make_cell()], what) == plots.TITLES[what][""]
