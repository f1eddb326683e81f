"""The pictures that explain: what they show is so, they can be read, those committed are new."""

import ast
import sys
from itertools import pairwise

import numpy as np
import pytest
from ladder_command import PACKAGES, ROOT
from made_up import make_env
from PIL import Image

from course.lessons import figures, figures_lite, figures_memory, figures_tiling
from course.tracing import trace, trace_plots
from course.tracing.trace import example, make_trace
from harness.records.jsonl import read
from harness.records.schema import Ceiling
from harness.views.look import DARK, LIGHT, LOOKS
from ladder import app

# imported by what draws, with no say in what is drawn
BESIDE = {"harness/problems/problem", "harness/problems/real_inputs"}


def words_of(figure):
    """The Text objects that drawing a figure really draws: no tick's label outside the limits."""
    from matplotlib.text import Text

    drawn, draw = {}, Text.draw
    Text.draw = lambda text, *given: (drawn.setdefault(id(text), text), draw(text, *given))[1]
    try:
        figure.canvas.draw()
    finally:
        Text.draw = draw
    return [text for text in drawn.values() if text.get_visible() and text.get_text().strip()]


def shown_words(figure):
    return " ".join(" ".join(x.get_text().split()) for x in words_of(figure))


def assert_readable(figure):
    """No word leaves the picture, none lies on another, and none is tiny."""
    boxes = []
    for text in words_of(figure):
        box = text.get_window_extent().padded(-1)
        words = text.get_text()
        assert text.get_fontsize() >= 7, words
        assert box.x0 >= 0 and box.y0 >= 0, words
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, words
        for other, theirs in boxes:
            assert not box.overlaps(theirs), f"{words!r} lies on {other!r}"
        boxes.append((words, box))
    assert len(boxes) > 5


@pytest.fixture(scope="module")
def breaks():
    return figures_lite.measure()


def ceiling(what="copy", device="cpu", value=0.02, threads=1, **changes):
    made = dict.fromkeys(Ceiling.__dataclass_fields__)
    made |= {"kind": "ceiling", "what": what, "device": device, "size": 1, "value": value,
             "threads": threads, "unit": "TB/s" if what == "copy" else "TFLOP/s", "time_ms": 1.0,
             "samples": 5} | changes  # fmt: skip
    return made


CPU = [
    ceiling(value=0.0123),
    ceiling(value=0.0034, threads=2),
    ceiling("matmul", value=0.2, dtype="float32", precision="ieee"),
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


def test_the_pictures_panels_show_what_the_issue_asks_for():
    found = [(c.nq < c.nk, c.nq > c.nk) for c in figures_tiling.CASES if c.causal]
    assert {(True, False), (False, True), (False, False)} <= set(found)
    for case in figures_tiling.CASES:
        assert "masked" in figures_tiling.kinds(case)
        assert case.causal == ("never" in figures_tiling.kinds(case))


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
    labels = [text.get_text() for text in sharp.get_legend().get_texts()]
    assert labels == [f"N = {n}" for n in figures_lite.SHARPNESS_N]
    for line, n in zip(sharp.get_lines(), figures_lite.SHARPNESS_N):
        assert tuple(line.get_ydata()) == breaks.by_sharpness[n].lite
    dashes = {str(line._dash_pattern) for line in sharp.get_lines()}
    assert len(dashes) == len(figures_lite.SHARPNESS_N)
    assert online.get_yscale() == "log" and lite.get_yscale() == "linear"


# the memory hierarchy


def test_what_was_measured_is_shown_as_measured_and_nothing_else_is():
    env, ceilings = read(figures.CEILINGS, "ceiling")
    bars = [bar for level in figures_memory.levels(ceilings) for bar in level.bars]
    (copy,) = [record["value"] for record in ceilings if record["what"] == "copy"]
    assert [bar.low for bar in bars if bar.measured] == [copy * 1e12]
    words = shown_words(figures_memory.figure(env, ceilings, LIGHT))
    assert f"{copy:.3g} TB/s measured" in words
    assert f"measured on {env['device_name']}" in words and "Hatched: cited" in words
    assert words.count("measured") == 2
    for bar in bars:
        assert bar.measured or "measured" not in bar.said


def test_a_cited_bar_is_as_long_as_its_source_says():
    _, ceilings = read(figures.CEILINGS, "ceiling")
    bars = [bar for level in figures_memory.levels(ceilings) for bar in level.bars]
    assert [(bar.low / 1e9, bar.high / 1e9) for bar in bars if not bar.measured] == [
        (19000, 19000), (1500, 2000), (25, 25), (50, 60), (25, 30), (12, 13),
    ]  # fmt: skip
    said = [bar.said for bar in bars]
    assert "about 19 TB/s: A100" in said and "generation 5: 50-60 GB/s achieved" in said


def test_measured_is_solid_and_cited_is_hatched():
    env, ceilings = read(figures.CEILINGS, "ceiling")
    (axis,) = figures_memory.figure(env, ceilings, LIGHT).axes
    solid = [patch for patch in axis.patches if patch.get_hatch() is None and
             patch.get_facecolor()[:3] != (1.0, 1.0, 1.0)]  # fmt: skip
    left = axis.get_xlim()[0]
    (copy,) = [record["value"] for record in ceilings if record["what"] == "copy"]
    assert [left + patch.get_width() for patch in solid] == [pytest.approx(copy * 1e12)]


def test_a_cpus_record_is_main_memorys():
    names = {level.name: level.bars for level in figures_memory.levels(CPU)}
    assert [bar.low for bar in names["main memory (CPU)"]] == [0.0123e12, 0.0034e12]
    assert all(not bar.measured for bar in names["GPU memory (HBM)"])
    figure = figures_memory.figure(make_env([], device="cpu"), CPU, LIGHT)
    words = shown_words(figure)
    assert "12.3 GB/s measured: a copy, read and written, 1 thread" in words
    assert "3.4 GB/s measured: a copy, read and written, 2 threads" in words
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


@pytest.mark.slow
@pytest.mark.parametrize("asked", [
    {"n": 1, "d": 1, "tile": 1, "row": 0},
    {"n": 64, "d": 16, "tile": 8, "row": 9},
    {"n": 8, "d": 4, "tile": 3, "row": 3, "causal": True},
    {"n": 17, "d": 3, "tile": 5, "row": 2, "inputs": "peaky"},
])  # fmt: skip
def test_other_walks_can_be_read_too(asked):
    made = make_trace(**asked)
    assert_readable(trace_plots.still(made.steps(), made.truth(), DARK))


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


def assert_it_moves(path):
    """The picture of the trace, as the command draws it."""
    with Image.open(path) as gif:
        assert gif.n_frames == 2 * example().tiles
        frames = []
        for index in range(gif.n_frames):
            gif.seek(index)
            frames.append(np.asarray(gif.convert("RGB")).copy())
        assert gif.info["loop"] == 0
    assert all((a != b).any() for a, b in pairwise(frames))
    # a still preview shows the first frame: it is the fullest
    inked = [(frame != frame[2, 2]).any(-1).sum() for frame in frames]
    assert inked[0] == max(inked)
    # the colour of Lite's crosses is among those kept
    red = np.array([int(LIGHT.red[i : i + 2], 16) for i in (1, 3, 5)])
    assert (np.abs(frames[-1].astype(int) - red).max(-1) < 24).sum() > 20


# all of them


def drawn(look, breaks):
    """name -> figure."""
    env, ceilings = read(figures.CEILINGS, "ceiling")
    made = example()
    steps, truth = made.steps(), made.truth()
    found = {
        "memory": figures_memory.figure(env, ceilings, look),
        "memory of a CPU": figures_memory.figure(make_env([], device="cpu"), CPU, look),
        "tiling": figures_tiling.figure(look),
        "lite": figures_lite.figure(breaks, look),
        "trace": trace_plots.still(steps, truth, look),
    }
    # the looks differ in colours alone
    for index in range(len(steps) if look is LIGHT else 0):
        for done in (False, True):
            found[f"frame {index} {done}"] = trace_plots.frame(steps, index, done, truth, look)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("look", LOOKS, ids=["light", "dark"])
def test_every_word_can_be_read(look, breaks):
    for name, figure in drawn(look, breaks).items():
        try:
            assert_readable(figure)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def luminance(colour):
    """WCAG's relative luminance of '#RRGGBB'."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("look", LOOKS, ids=["light", "dark"])
def test_colours_stand_out_from_their_ground(look):
    """WCAG 2: 4.5 to 1 for words, 3 to 1 for lines; orange always comes with words, 2 do."""

    def contrast(colour):
        a, b = sorted((luminance(colour), luminance(look.ground)))
        return (b + 0.05) / (a + 0.05)

    assert contrast(look.ink) >= 7 and contrast(look.soft) >= 4.5
    assert contrast(look.blue) >= 3 and contrast(look.red) >= 3 and contrast(look.orange) >= 2


@pytest.mark.slow
def test_the_users_own_settings_are_left_out_and_left_alone():
    import matplotlib

    with matplotlib.rc_context({"axes.facecolor": "#123456", "font.size": 30}):
        figure = figures_tiling.figure(LIGHT)
        assert matplotlib.rcParams["font.size"] == 30
    assert figure.axes[0].get_facecolor()[:3] == (1.0, 1.0, 1.0)
    assert_readable(figure)
    assert "matplotlib.pyplot" not in vars(sys.modules["course.lessons.figures"])


def test_the_committed_pictures_are_up_to_date():
    assert figures.stale(figures.FOLDER) == [], "run `ladder figures`"
    for picture in figures.PICTURES:
        for look in LOOKS:
            path = figures.FOLDER / picture.file(look)
            assert path.stat().st_size < 300_000
            with Image.open(path) as image:
                assert image.format == picture.extension.upper()
                assert image.width <= 1300


def test_a_picture_names_every_module_that_decides_what_is_drawn():
    """The modules' imports, followed; a module left out would change the picture unseen."""
    makers = {
        "memory-hierarchy": "lessons/figures_memory", "tiling": "lessons/figures_tiling",
        "lite-breaks": "lessons/figures_lite", "trace": "tracing/trace_plots",
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


def command(capsys, *arguments):
    """Exit code, stdout and stderr of `ladder figures ARGUMENTS`, in this process."""
    with pytest.raises(SystemExit) as ended:
        app.main(["figures", *map(str, arguments)])
    return ended.value.code, *capsys.readouterr()


@pytest.mark.slow
def test_the_command_draws_what_it_then_finds_up_to_date(tmp_path, capsys, monkeypatch, breaks):
    """And its moving picture moves."""
    monkeypatch.setattr(figures_lite, "measure", lambda: breaks)
    folder = tmp_path / "new" / "figures"
    code, out, err = command(capsys, "--out", folder)
    assert (code, err) == (0, "")
    names = [picture.file(look) for picture in figures.PICTURES for look in LOOKS]
    assert out.split() == [str(folder / name) for name in names]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert command(capsys, "--out", folder, "--check") == (0, "", "")
    assert_it_moves(folder / "trace.gif")
    (folder / names[0]).unlink()
    code, out, err = command(capsys, "--out", folder, "--check")
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert str(folder / names[0]) in err and "run `ladder figures`" in err
    assert not (folder / names[0]).exists()


@pytest.mark.slow
def test_a_picture_drawn_twice_on_one_machine_is_the_same(tmp_path):
    tiling = next(picture for picture in figures.PICTURES if picture.name == "tiling")
    for name in ("once.png", "again.png"):
        tiling.write(LIGHT, figures.CEILINGS, tmp_path / name, "a comment")
    assert (tmp_path / "once.png").read_bytes() == (tmp_path / "again.png").read_bytes()
    assert b"a comment" in (tmp_path / "once.png").read_bytes()


def test_bad_arguments_are_one_clear_line(tmp_path, capsys):
    nothing, taken = tmp_path / "none.jsonl", tmp_path / "taken"
    taken.write_text("a file, no folder")
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("{}\n")
    no_copy = tmp_path / "no_copy.jsonl"
    lines = figures.CEILINGS.read_text().splitlines(keepends=True)
    no_copy.write_text("".join(line for line in lines if '"copy"' not in line))
    for arguments, says in (
        (("--ceilings", nothing), f"--ceilings: {nothing}: no such file"),
        (("--ceilings", nothing, "--check"), f"--ceilings: {nothing}: no such file"),
        (("--ceilings", wrong), "line 1 is not a record of ours"),
        (("--ceilings", no_copy), "no copy among the ceilings"),
        (("--out", taken), f"{taken}: File exists"),
        (("--out",), "--out"),
    ):
        out = () if "--out" in arguments else ("--out", tmp_path / "out")
        code, printed, err = command(capsys, *arguments, *out)
        assert (code, printed) == (2, "")
        assert err.startswith("ladder: ") and err.count("\n") == 1 and says in err, err
    assert not (tmp_path / "out").exists()
