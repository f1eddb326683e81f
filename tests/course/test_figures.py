"""The pictures that explain: what they show is so, and those committed are new."""

import ast

import numpy as np
import pytest
from ladder_command import PACKAGES, ROOT, run_here
from made_up import make_ceiling, make_env
from PIL import Image

from course.lessons import figures, figures_memory
from course.tracing import trace, trace_plots
from course.tracing.trace import make_trace
from harness.records.jsonl import read
from harness.views.look import LIGHT, LOOKS

NAMES = [figures.name(look) for look in LOOKS]

CPU = [
    make_ceiling("copy", device="cpu", threads=1) | {"value": 0.0123},
    make_ceiling("copy", device="cpu", threads=2) | {"value": 0.0034},
    make_ceiling(dtype="float32", precision="ieee", device="cpu", threads=1),
]


# the memory hierarchy


def test_what_was_measured_is_shown_as_measured_and_nothing_else_is():
    env, ceilings = read(figures.CEILINGS, "ceiling")
    bars = [bar for level in figures_memory.levels(ceilings) for bar in level.bars]
    (copy,) = [record["value"] for record in ceilings if record["what"] == "copy"]
    assert [bar.low for bar in bars if bar.measured] == [copy * 1e12]
    (axis,) = figures_memory.figure(env, ceilings, LIGHT).axes
    left = axis.get_xlim()[0]
    solid = [patch for patch in axis.patches if patch.get_hatch() is None and
             patch.get_facecolor()[:3] != (1.0, 1.0, 1.0)]  # fmt: skip
    assert [left + patch.get_width() for patch in solid] == [pytest.approx(copy * 1e12)]


def test_a_cpus_record_is_main_memorys():
    names = {level.name: level.bars for level in figures_memory.levels(CPU)}
    assert [bar.low for bar in names["main memory (CPU)"]] == [0.0123e12, 0.0034e12]
    assert all(not bar.measured for bar in names["GPU memory (HBM)"])
    figure = figures_memory.figure(make_env([], device="cpu"), CPU, LIGHT)
    assert figure.axes[0].get_xlim()[0] < 0.0034e12  # a slow machine's bar is still one


def test_without_a_copy_there_is_nothing_to_show():
    with pytest.raises(ValueError, match="no copy"):
        figures_memory.levels(CPU[2:])


# the trace


def test_the_trace_shows_the_walk():
    made = make_trace(n=8, d=4, tile=2, row=3)  # the max rises in the first three tiles only
    steps, truth = made.steps(), made.truth()
    figure = trace_plots.still(steps, truth)
    grid = np.array(figure.axes).reshape(3, len(steps))
    for index, step in enumerate(steps):
        scores, weights, outputs = grid[:, index]
        heights = sorted(bar.get_height() for bar in scores.patches)
        assert heights == pytest.approx(sorted(np.concatenate([s.s for s in steps[: index + 1]])))
        assert scores.get_lines()[-1 - (len(steps) - 1)].get_ydata()[0] == step.m_i
        filled = [bar.get_height() for bar in weights.patches if bar.get_fill()]
        assert sum(filled) == pytest.approx(step.l_i, rel=1e-6)
        hollow = [bar.get_height() for bar in weights.patches if not bar.get_fill()]
        if hollow:
            assert sum(hollow) == pytest.approx(steps[index - 1].l_i, rel=1e-6)
        assert bool(hollow) == (index > 0 and step.alpha < 1)
        lines = {line.get_label(): line.get_ydata() for line in outputs.get_lines()}
        assert np.array_equal(lines["Online"], step.o) and np.array_equal(lines["Lite"], step.lite)


def test_what_is_too_much_for_a_picture_is_said():
    q, k, v = np.ones((2, 4)), np.ones((70, 4)), np.ones((70, 4))
    for steps in (
        [],
        trace.walk(q[0], k, v, 70),
        trace.walk(q[0], k[:9], v[:9], 1),
        trace.walk(q, k[:4], v[:4], 2),
    ):
        with pytest.raises(trace_plots.TooMuch, match=r"^steps: got .*, expected"):
            trace_plots.still(steps, np.ones(4))


# those committed


def test_the_users_own_settings_are_left_out_and_left_alone():
    import matplotlib

    with matplotlib.rc_context({"axes.facecolor": "#123456", "xtick.major.width": 7}):
        figure = figures_memory.figure(*read(figures.CEILINGS, "ceiling"), LIGHT)
        assert matplotlib.rcParams["xtick.major.width"] == 7
    assert figure.axes[0].get_facecolor()[:3] == (1.0, 1.0, 1.0)
    assert figure.axes[0].xaxis.get_ticklines()[0].get_markeredgewidth() < 7


def test_the_committed_picture_is_up_to_date():
    assert figures.stale(figures.FOLDER) == [], "run `ladder figures`"


def test_every_module_that_decides_what_is_drawn_is_named():
    """The modules' imports, followed; a module left out would change the picture unseen."""
    found, left = set(), ["course/lessons/figures_memory"]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGES):
                place = node.module.replace(".", "/")
                whole = (ROOT / f"{place}.py").is_file()
                left += [place] if whole else [f"{place}/{a.name}" for a in node.names]
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith(PACKAGES) for alias in node.names)
    beside = {"harness/problems/problem"}  # imported, with no say in what is drawn
    assert found - beside == {*figures.MODULES}


def copied(tmp_path):
    """A folder with the committed pictures in it."""
    folder = tmp_path / "figures"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_bytes((figures.FOLDER / name).read_bytes())
    return folder


def test_a_change_of_code_or_record_makes_the_picture_stale(tmp_path, monkeypatch):
    folder = copied(tmp_path)
    assert figures.stale(folder) == []
    record = tmp_path / "ceilings.jsonl"
    record.write_bytes(figures.CEILINGS.read_bytes())
    assert figures.stale(folder, record) == []
    text = record.read_text()
    assert text.count('"value": ') > 1
    record.write_text(text.replace('"value": ', '"value": 1'))
    assert figures.stale(folder, record) == NAMES
    code = tmp_path / "code"
    for module in figures.MODULES:
        copy = code / f"{module}.py"
        copy.parent.mkdir(parents=True, exist_ok=True)
        whole = (ROOT / f"{module}.py").read_bytes()
        copy.write_bytes(whole.replace(b"\n", b"\r\n") + b"# and a comment\r\n")
    monkeypatch.setattr(figures, "ROOT", code)
    assert figures.stale(folder) == []  # other line ends, or words, are no change
    (code / "course" / "lessons" / "cited.py").write_text("another")
    assert figures.stale(folder) == NAMES


def test_a_missing_or_foreign_file_is_stale(tmp_path):
    folder = copied(tmp_path)
    (folder / NAMES[0]).unlink()
    Image.new("RGB", (9, 9)).save(folder / NAMES[1])
    assert figures.stale(folder) == NAMES


def test_the_command_draws_what_it_then_finds_up_to_date(tmp_path, capsys):
    folder = tmp_path / "new" / "figures"
    code, out, err = run_here(capsys, "figures", "--out", folder)
    assert (code, err) == (0, "")
    assert out.split() == [str(folder / name) for name in NAMES]
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    assert run_here(capsys, "figures", "--out", folder, "--check") == (0, "", "")
    (folder / NAMES[0]).unlink()
    code, out, err = run_here(capsys, "figures", "--out", folder, "--check")
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert str(folder / NAMES[0]) in err and "run `ladder figures`" in err
    assert not (folder / NAMES[0]).exists()
