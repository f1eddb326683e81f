"""One colour and one marker for each stage and peer, in every picture and on every ground."""

import pytest
from matplotlib.colors import to_hex

from course.report import pages
from course.report.profile import DOING, UNITS, WAITS
from harness.problems import problem
from harness.records.jsonl import read
from harness.views import plots, roofline
from harness.views.look import DARK, EITHER, LIGHT, LOOKS, PEERS_FROM, mark, marks

STAGES, PEERS = range(PEERS_FROM), range(PEERS_FROM, PEERS_FROM + 20)


def test_no_two_stages_or_peers_look_alike():
    pairs = {(mark(n).colour, str(mark(n).marker)) for n in (*STAGES, *PEERS)}
    assert len(pairs) == len(STAGES) + len(PEERS)
    assert problem.PEERS_FROM == PEERS_FROM
    for few in (range(8), range(100, 107)):  # in grey, too
        assert len({str(mark(n).marker) for n in few}) == len(few)


def test_a_second_file_with_a_stages_number_has_a_mark_of_its_own():
    found = marks([(5, "online"), (5, "mine"), (99, "spare"), (5, "mine"), (104, "math")])
    assert len(found) == 4 == len({(x.colour, str(x.marker)) for x in found.values()})
    assert found[99, "spare"] == mark(99) and found[104, "math"] == mark(104)
    assert mark(5) in found.values()


def luminance(colour):
    """WCAG's relative luminance of '#RRGGBB'."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("ground", [LIGHT.ground, DARK.ground, "#111111"])
def test_marks_and_a_notebooks_ink_stand_out_from_light_and_dark(ground):
    """WCAG 2 asks 3 to 1 of lines; no one ink has 4.5 with white and with near-black."""
    for colour in (EITHER.ink, *(mark(n).colour for n in (*STAGES, *PEERS))):
        a, b = sorted((luminance(colour), luminance(ground)))
        assert (b + 0.05) / (a + 0.05) >= (4 if colour == EITHER.ink else 3), colour


def entries(figure):
    """number -> handle, of the legend's entries that begin with a stage's number."""
    return {
        int(text.get_text().split()[0]): handle
        for legend in figure.legends
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
        if text.get_text().split()[0].isdigit()
    }


def a_stage_has_its_mark_in_every_picture(drawn):
    seen = {}
    for name, figure in drawn.items():
        for number, handle in entries(figure).items():
            seen.setdefault(number, set()).add(name)
            if hasattr(handle, "get_marker"):
                assert to_hex(handle.get_color()) == mark(number).colour.lower(), name
                assert handle.get_marker() == mark(number).marker, name
            else:
                assert to_hex(handle.get_facecolor()) == mark(number).colour.lower(), name
        for axis in figure.axes:  # a line of data has the colour of an entry
            data = [x for x in axis.get_lines() if len(x.get_xdata()) and x.get_marker() != "None"]
            marked = {(mark(n).colour.lower(), mark(n).marker) for n in entries(figure)}
            assert {(to_hex(x.get_color()), x.get_marker()) for x in data} <= marked, name
    assert set(range(8)) <= seen.keys() and len(seen[5]) > 6


def every_picture_is_there_for_light_pages_and_dark(drawn):
    light = {name for name in drawn if "-dark" not in name}
    assert {name.replace(".png", "-dark.png") for name in light} == drawn.keys() - light
    for name, figure in drawn.items():
        look = LOOKS["-dark" in name]
        assert to_hex(figure.get_facecolor()) == look.ground.lower()


def placed(name, kind, has):
    _, records = read(pages.GPU / name, kind)
    return {record["stage"] for record in records if has(record)}


def every_stage_and_peer_of_the_records_is_drawn(drawn, measure):
    """Those of the tour, and those that only the table beside it has, with many heads."""
    other, heads = ("table-4.3.jsonl", 1) if measure == "error" else ("table-4.2.jsonl", 32)

    def has(record):
        return record["h"] in (1, heads) and plots.panels([record], measure)

    wanted = placed("tour.jsonl", "cell", has)
    wanted |= placed(other, "cell", lambda r: r["h"] == heads and not r["paired"] and has(r))
    assert wanted >= set(range(8))
    assert entries(drawn[f"{measure}.png"]).keys() == wanted


def the_roofline_and_the_traffic_have_every_stage_of_theirs(drawn):
    _, cells = pages.under_roofs()
    wanted = {cell["stage"] for cell in cells if roofline.place(cell)}
    assert {3, 5, 6, 9, 102} <= wanted == entries(drawn["roofline.png"]).keys()
    labels = {
        int(text.get_text().split()[0])
        for axis in drawn["traffic.png"].axes
        for text in axis.get_yticklabels()
    }
    assert labels == placed("io.jsonl", "io", lambda r: True)


def the_profile_has_each_share_of_both_kernels(drawn):
    _, records = read(pages.GPU / "hopper-io.jsonl", "io")
    panels = zip(drawn["profile.png"].axes, ("waits", "units"), (WAITS, UNITS), strict=True)
    for axis, what, names in panels:
        assert [text.get_text() for text in axis.get_yticklabels()] == list(names.values())
        for bars, record in zip(axis.containers, records, strict=True):
            assert bars.get_label().startswith(f"{record['stage']} ")
            assert [bar.get_width() for bar in bars] == [100 * record[what][n] for n in names]


def the_timeline_has_each_span_of_both_kernels_in_its_consumer_s_row(drawn):
    _, records = read(pages.GPU / "hopper-timeline.jsonl", "timeline")
    for axis, record in zip(drawn["timeline.png"].axes, records, strict=True):
        rows = [int(text.get_text().split()[1]) for text in axis.get_yticklabels()]
        bars = sorted(
            (
                rows[round(bar.get_y() + bar.get_height() / 2)],
                round(1000 * bar.get_x()),
                round(1000 * bar.get_width()),
                bar.get_hatch() == DOING["products"][1],
            )
            for bar in axis.patches
        )
        assert bars == sorted(
            (
                span["consumer"],
                span["start"],
                span["end"] - span["start"],
                span["part"] != "softmax",
            )
            for span in record["spans"]
        )


@pytest.mark.slow
def test_the_pictures_show_what_the_records_hold(tmp_path, figures):
    """Those of README and docs, in one test, since all are drawn for it."""
    written = {path.name for path in pages.draw(tmp_path)}
    assert written == {path.name for path in tmp_path.iterdir()} == figures.keys()
    drawn = dict(figures)  # name of the file -> figure
    every_picture_is_there_for_light_pages_and_dark(drawn)
    a_stage_has_its_mark_in_every_picture(drawn)
    for measure in ("time", "memory", "error"):
        every_stage_and_peer_of_the_records_is_drawn(drawn, measure)
    the_roofline_and_the_traffic_have_every_stage_of_theirs(drawn)
    the_profile_has_each_share_of_both_kernels(drawn)
    the_timeline_has_each_span_of_both_kernels_in_its_consumer_s_row(drawn)
