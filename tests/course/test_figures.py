"""The pictures that explain: what they show is so, and those committed are new."""

import ast
import re

import numpy as np
import pytest
from ladder_command import PACKAGES, ROOT, run_here
from made_up import make_ceiling, make_env
from PIL import Image

from course.lessons import figures, figures_lite, figures_memory, figures_products, figures_tiling
from course.tracing import trace, trace_plots
from course.tracing.trace import example
from harness.records.jsonl import read
from harness.views.look import LIGHT, LOOKS

# imported by what draws, with no say in what is drawn
BESIDE = {"harness/problems/problem", "harness/problems/real_inputs"}


@pytest.fixture(scope="module")
def breaks():
    return figures_lite.measure()


CPU = [
    make_ceiling("copy", device="cpu", threads=1) | {"value": 0.0123},
    make_ceiling("copy", device="cpu", threads=2) | {"value": 0.0034},
    make_ceiling(dtype="float32", precision="ieee", device="cpu", threads=1),
]


# tiling


def visible(case):
    """(rows, keys), True where row i sees key j: j <= i + Nk - Nq, straight from the contract."""
    rows, keys = (size * x for size, x in zip(case.shape, (case.block_m, case.block_n)))
    seen = np.zeros((rows, keys), bool)
    for i in range(case.nq):
        for j in range(case.nk):
            seen[i, j] = not case.causal or j <= i + case.nk - case.nq
    return seen


SMALL = [
    figures_tiling.Case(nq, nk, causal, block_m, block_n)
    for nq, nk in ((8, 8), (9, 7), (7, 9), (3, 16), (16, 3), (1, 5), (5, 1), (13, 13))
    for causal in (False, True)
    for block_m, block_n in ((4, 4), (4, 2), (2, 4), (3, 5), (16, 16))
]


@pytest.mark.parametrize("case", [*SMALL, *figures_tiling.CASES])
def test_tiles_are_what_brute_force_says(case):
    seen = visible(case)
    kinds = figures_tiling.kinds(case)
    for (block, tile), kind in np.ndenumerate(kinds):
        first, start = block * case.block_m, tile * case.block_n
        rows = slice(first, min(first + case.block_m, case.nq))  # rows past the last are nobody
        part = seen[rows, start : start + case.block_n]
        want = "full" if part.all() else "masked" if part.any() else "never"
        assert kind == want, (block, tile)


# split products


def test_the_products_that_count_are_those_that_the_kernels_compute():
    text = (ROOT / "stages" / "common" / "products.py").read_text()
    computed = re.findall(r"tl\.dot\(a_(\w+), b_(\w+)", text)
    names = figures_products.PIECES
    shown = {(a, b) for i, a in enumerate(names) for j, b in enumerate(names)
             if figures_products.kept(i, j)}  # fmt: skip
    assert set(computed) == shown and len(computed) == len(shown)
    *smaller, largest = [figures_products.power(*map(names.index, pair)) for pair in computed]
    assert smaller == sorted(smaller) and max(smaller) < largest  # the smallest are summed first


# where Lite breaks


@pytest.mark.slow
def test_lites_error_is_a_sawtooth_and_onlines_is_rounding(breaks):
    found = breaks.by_n
    lite, online = np.array(found.lite), np.array(found.online)
    assert found.x == tuple(range(1, figures_lite.MOST_N + 1))
    tile = figures_lite.TILE
    # exact while one tile holds all the keys; the rounding of a sum of d + N terms in float32
    bound = (figures_lite.D + figures_lite.MOST_N) * np.finfo(np.float32).eps * 10
    assert lite[:tile].max() < bound and online.max() < bound
    for edge in range(tile, figures_lite.MOST_N, tile):
        assert lite[edge] > 2 * lite[edge - 1]  # a lone key in a tile of its own
        until = min(edge + tile, len(lite)) - 1
        assert lite[edge] > 1.5 * lite[until] > 100 * bound
    # along the multiples of a tile it grows
    assert np.all(np.diff(lite[tile - 1 :: tile]) > 0)


def test_errors_are_those_of_the_definition():
    q, k, v = figures_lite.inputs(3, 130)
    s = (q.astype(float) @ k.T.astype(float)) / np.sqrt(figures_lite.D)
    e = np.exp(s - s.max(-1, keepdims=True))
    tiles = [slice(0, 64), slice(64, 128), slice(128, 130)]
    truth = e / e.sum(-1, keepdims=True) @ v
    lite = sum(e[:, t] / e[:, t].sum(-1, keepdims=True) @ v[t] for t in tiles)
    want = np.abs(lite - truth).max()
    assert figures_lite.errors(q, k, v)[0] == pytest.approx(want, rel=1e-4)


def test_a_longer_draw_begins_with_the_shorter():
    for few, many in zip(figures_lite.inputs(1, 5), figures_lite.inputs(1, 9)):
        assert np.array_equal(few, many[: len(few)])
    # pinned: another stream would move the picture without a change of code
    q, _, _ = figures_lite.inputs(0, 1)
    np.testing.assert_allclose(q[0, :2], np.random.RandomState([0, 0]).standard_normal(2), 1e-6)


@pytest.mark.slow
def test_sharp_scores_make_lite_worse(breaks):
    for n, found in breaks.by_sharpness.items():
        lite, online = np.array(found.lite), np.array(found.online)
        # sharp or not, a lone key weighs 1; elsewhere every tile's winner comes to count whole
        assert lite[-1] >= 0.99 * lite[0] if n == 65 else lite[-1] > 5 * lite[0]
        # what float32 may lose grows with the scores: 4 u (1 + s_max) |v| and that of 4 sd more
        s_max = 6 * np.array(found.x)
        bound = (figures_lite.D + n) * np.finfo(np.float32).eps * (1 + s_max) * 6
        assert (online <= bound).all()


@pytest.mark.slow
def test_the_lines_are_the_errors(breaks):
    figure = figures_lite.figure(breaks, LIGHT)
    lite, sharp, online, _ = figure.axes
    assert tuple(lite.get_lines()[0].get_ydata()) == breaks.by_n.lite
    assert tuple(online.get_lines()[0].get_xdata()) == breaks.by_n.x
    for line, n in zip(sharp.get_lines(), figures_lite.SHARPNESS_N):
        assert tuple(line.get_ydata()) == breaks.by_sharpness[n].lite


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
    made = example()
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


def test_what_is_too_much_for_a_picture_is_said(tmp_path):
    q, k, v = np.ones((2, 4)), np.ones((70, 4)), np.ones((70, 4))
    for steps in (
        [],
        trace.walk(q[0], k, v, 70),
        trace.walk(q[0], k[:9], v[:9], 1),
        trace.walk(q, k[:4], v[:4], 2),
    ):
        for draw in (
            lambda steps: trace_plots.still(steps, np.ones(4)),
            lambda steps: trace_plots.moving(steps, np.ones(4), tmp_path / "x.gif"),
        ):
            with pytest.raises(trace_plots.TooMuch, match=r"^steps: got .*, expected"):
                draw(steps)
    assert not (tmp_path / "x.gif").exists()


# all of them


@pytest.mark.slow
def test_the_users_own_settings_are_left_out_and_left_alone(breaks):
    import matplotlib

    with matplotlib.rc_context({"axes.facecolor": "#123456", "xtick.major.width": 7}):
        figure = figures_lite.figure(breaks, LIGHT)
        assert matplotlib.rcParams["xtick.major.width"] == 7
    assert figure.axes[0].get_facecolor()[:3] == (1.0, 1.0, 1.0)
    assert figure.axes[0].xaxis.get_ticklines()[0].get_markeredgewidth() < 7


def test_the_committed_pictures_are_up_to_date():
    assert figures.stale(figures.FOLDER) == [], "run `ladder figures`"


def test_a_picture_names_every_module_that_decides_what_is_drawn():
    """The modules' imports, followed; a module left out would change the picture unseen."""
    makers = {
        "memory-hierarchy": "lessons/figures_memory", "tiling": "lessons/figures_tiling",
        "products": "lessons/figures_products", "lite-breaks": "lessons/figures_lite",
        "trace": "tracing/trace_plots",
    }  # fmt: skip
    for picture in figures.PICTURES:
        found, left = set(), [f"course/{makers[picture.name]}"]
        while left:
            name = left.pop()
            if name in found | BESIDE:
                continue
            found.add(name)
            for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGES):
                    place = node.module.replace(".", "/")
                    whole = (ROOT / f"{place}.py").is_file()
                    left += [place] if whole else [f"{place}/{a.name}" for a in node.names]
                elif isinstance(node, ast.Import):
                    assert not any(alias.name.startswith(PACKAGES) for alias in node.names)
        assert found == set(picture.modules), picture.name


def copied(tmp_path):
    """A folder with the committed pictures in it."""
    folder = tmp_path / "figures"
    folder.mkdir()
    for picture in figures.PICTURES:
        for look in LOOKS:
            name = picture.file(look)
            (folder / name).write_bytes((figures.FOLDER / name).read_bytes())
    return folder


def test_a_change_of_code_or_record_makes_pictures_stale(tmp_path, monkeypatch):
    folder = copied(tmp_path)
    assert figures.stale(folder) == []
    record = tmp_path / "ceilings.jsonl"
    record.write_bytes(figures.CEILINGS.read_bytes())
    assert figures.stale(folder, record) == []
    text = record.read_text()
    assert text.count('"value": ') > 1
    record.write_text(text.replace('"value": ', '"value": 1'))
    assert figures.stale(folder, record) == ["memory-hierarchy.png", "memory-hierarchy-dark.png"]
    code = tmp_path / "code"
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        copy = code / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"# and a comment\r\n")
    monkeypatch.setattr(figures, "ROOT", code)
    assert figures.stale(folder) == []  # other line ends, or words, are no change
    (code / "course" / "lessons" / "figures_tiling.py").write_text("another")
    assert figures.stale(folder) == ["tiling.png", "tiling-dark.png"]
    (code / "course" / "tracing" / "trace.py").write_text("another")
    assert len(figures.stale(folder)) == 8


def test_a_missing_or_foreign_file_is_stale(tmp_path):
    folder = copied(tmp_path)
    (folder / "trace.gif").unlink()
    Image.new("RGB", (9, 9)).save(folder / "tiling.png")
    (folder / "lite-breaks.png").write_bytes((folder / "tiling-dark.png").read_bytes())
    assert figures.stale(folder) == ["tiling.png", "lite-breaks.png", "trace.gif"]


@pytest.mark.slow
def test_the_command_draws_what_it_then_finds_up_to_date(tmp_path, capsys, monkeypatch, breaks):
    monkeypatch.setattr(figures_lite, "measure", lambda: breaks)
    folder = tmp_path / "new" / "figures"
    code, out, err = run_here(capsys, "figures", "--out", folder)
    assert (code, err) == (0, "")
    names = [picture.file(look) for picture in figures.PICTURES for look in LOOKS]
    assert out.split() == [str(folder / name) for name in names]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert run_here(capsys, "figures", "--out", folder, "--check") == (0, "", "")
    with Image.open(folder / "trace.gif") as moving:
        assert moving.n_frames == 2 * example().tiles
    (folder / names[0]).unlink()
    code, out, err = run_here(capsys, "figures", "--out", folder, "--check")
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert str(folder / names[0]) in err and "run `ladder figures`" in err
    assert not (folder / names[0]).exists()
