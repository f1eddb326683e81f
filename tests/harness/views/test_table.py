"""Tables, from records made up by hand."""

import csv
import io
import json
import re
from xml.etree import ElementTree

import pytest
from ladder_command import in_turn
from made_up import make_cell, make_env, write_run

from harness.records import units
from harness.views import cell_tables, groups, ratios, table

TITLES = {
    "raw_python": "raw Python floats",
    "torch_three_gemm": "torch, three GEMMs",
    "triton_lite": "Triton Lite",
    "slow": "a title that just fits",
    "triton_online": "Triton Online, with a title that is longer than any table has room for",
}


def ladder_cells(**changes):
    """Five stages of one problem: ok, ok, interpreted and wrong by design, interpreted, crashed."""
    interpreted = {"mode": "interpreted", "time_iqr_ms": None, "samples": 1}
    nothing = {"time_ms": None, "time_iqr_ms": None, "samples": 0, "peak_bytes": None,
               "memory_meter": None, "err_f64_max": None, "err_f64_rel": None}  # fmt: skip
    return [
        make_cell(1, "raw_python", time_ms=50.0, peak_bytes=1000, **changes),
        make_cell(3, "torch_three_gemm", time_ms=0.5, err_f64_max=0.0, **changes),
        make_cell(4, "triton_lite", status="wrong-by-design", reason="declared exact up to 64",
                  time_ms=0.001, err_f64_max=0.37, **interpreted, **changes),
        make_cell(5, "triton_online", time_ms=900.0, **interpreted, **changes),
        make_cell(90, "mine", status="crashed", reason="killed by SIGSEGV", **nothing, **changes),
    ]  # fmt: skip


def page(cells):
    """The tables of cells."""
    return cell_tables.page(make_env(cells, TITLES), cells)


def shown(cells, width=100):
    """The lines of the tables on a page of `width` columns."""
    return page(cells).text(width).splitlines()


def line_of(lines, start):
    [line] = [line for line in lines if line.split()[:1] == [start]]
    return line


EXTREMES = {
    "slow": {"time_ms": 123_456.0, "peak_bytes": 1000 << 20},
    "fast": {"time_ms": 0.0123, "peak_bytes": 999},
    "wide": {"status": "out-of-memory", "err_f64_max": 1.2e-10, "err_f64_rel": 3.4e12},
    "design": {"status": "wrong-by-design", "mode": "interpreted", "time_ms": 999.4},
}


@pytest.mark.parametrize("width", [100, 92, 80])
def test_no_line_is_wider_than_the_page_and_no_figure_is_cut(width):
    cells = ladder_cells() + ladder_cells(n=512)
    cells.append(make_cell(n=16384, time_ms=1.0))
    cells += [make_cell(90 + i, name, n=16384, **EXTREMES[name]) for i, name in enumerate(EXTREMES)]
    cells.append(make_cell(1, "raw_python", status="crashed", reason="a very long reason " * 15))
    lines = shown(cells, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for cell in cells:
        if cell["nk"] == 16384:
            line = line_of(lines[text[: text.index("N = 16384")].count("\n") :], str(cell["stage"]))
            assert cell["status"] in line
            assert units.show_time(cell["time_ms"]) in line
            assert ratios.show_error(cell["err_f64_max"]) in line
            assert ratios.show_peak(cell) in line
    # the relative error is what gives way, and it is said that it did
    header = next(line for line in lines if line.lstrip().startswith("#"))
    assert "rel err" in header if width == 100 else "rel err" not in header or width > 80
    said = f"To fit {width} columns, left out: rel err" in text
    assert said == ("rel err" not in header)
    assert ("cut: stage. A wider window" in text) == (width < 100)


def test_only_ok_rows_are_compared_and_interpreted_ones_never():
    lines = shown(ladder_cells())
    assert (
        line_of(lines, "1").split()[-7:]
        == ["ms", "-", "~0.01x", "<1", "MB", *["3e-07", "4e-07", "ok"]][-7:]
    )
    assert "~100x" in line_of(lines, "3")  # against stage 1, which is before it
    for number in ("4", "5"):
        line = line_of(lines, number)
        assert " interpreted " in line and "x " not in line
    assert "x" not in line_of(lines, "90").replace("mine", "")


def faster(group, cell):
    """How many times as fast a cell is as the stage before it, and as stage 3."""
    return tuple(ratios.times_faster(other, cell) for other in ratios.rivals(group, cell))


def test_a_wrong_or_interpreted_stage_is_never_the_base_of_a_ratio():
    cells = [
        make_cell(1, "raw_python", time_ms=8.0),
        make_cell(2, "wrong", status="wrong", reason="x", time_ms=1e-3),
        make_cell(3, "torch_three_gemm", time_ms=2.0),
        make_cell(4, "design", status="wrong-by-design", reason="x", time_ms=1e-3),
        make_cell(5, "interpreted", mode="interpreted", time_ms=1e-3),
        make_cell(6, "flash", mode="compiled", time_ms=0.5),
        make_cell(7, "timeout", status="timeout", reason="x", time_ms=None),
        make_cell(101, "peer", time_ms=0.25),
    ]
    found = {cell["stage"]: faster(cells, cell) for cell in cells}
    nothing = (None, None)
    assert found == {
        1: (None, 0.25), 2: nothing, 3: (4.0, None), 4: nothing, 5: nothing, 6: (4.0, 4.0),
        7: nothing, 101: (None, 8.0),
    }  # fmt: skip


def test_without_an_ok_stage_3_nothing_is_compared_with_it():
    cells = [make_cell(1, "raw_python"), make_cell(status="timeout", reason="x", time_ms=9.0)]
    assert faster(cells, cells[0]) == (None, None)


def test_ratios_of_paired_cells_are_told_from_those_of_unpaired_ones():
    cells = [
        make_cell(1, "raw_python", time_ms=8.0),
        make_cell(3, "torch_three_gemm", time_ms=1.0),
        make_cell(1, "raw_python", time_ms=6.0, paired=True),
        make_cell(3, "torch_three_gemm", time_ms=2.0, paired=True),
    ]
    # a paired time is held against paired ones only
    assert faster(cells, cells[2]) == (None, 2.0 / 6.0)
    assert faster(cells, cells[1]) == (8.0, None)
    lines = shown(cells)
    row = line_of(lines, "3")
    assert " 3.00x " in row and "~" not in row
    assert " 2 ms " in row  # who divides the times shown finds the ratio shown
    assert "~8x" in line_of(shown(cells[:2]), "3")


def test_a_paired_ratio_has_the_quartiles_of_its_rounds():
    """Of the ratios, not of the times: both sag alike in the last round. It is their median."""
    before = make_cell(1, "raw_python", time_ms=8.0, paired=True, rounds_ms=[8.0, 9.0, 8.0, 80.0])
    after = make_cell(time_ms=2.0, paired=True, rounds_ms=[2.0, 2.0, 1.6, 20.0])
    assert ratios.spread(before, after) == (4.0, 4.625)
    assert ratios.show_step(before, after) == "4.25x (4.00-4.62)"
    cells = [make_cell(1, "raw_python"), make_cell(), before, after]
    assert " 4.25x (4.00-4.62) " in line_of(shown(cells), "3")
    assert "| 4.25x (4.00-4.62) |" in page(cells).markdown()
    flat = cell_tables.flat_rows(make_env(cells, TITLES), cells)
    assert [(row["vs_before_q1"], row["vs_before_q3"]) for row in flat[-2:]] == [
        (None, None), (4.0, 4.625),
    ]  # fmt: skip
    # a record that is older, or of other rounds, has none
    for rounds in (None, [2.0], [2.0, 2.0, 1.6]):
        assert ratios.spread(before, after | {"rounds_ms": rounds}) is None
        assert ratios.show_step(before, after | {"rounds_ms": rounds}) == "4.00x"
    assert ratios.spread(None, after) is None
    # nor has another problem's, however many rounds it has; pages take turns with one piece
    assert ratios.show_step(before | {"causal": True}, after) == "4.00x"
    assert ratios.show_step(before | {"page_size": 16}, after) == "4.25x (4.00-4.62)"


@pytest.mark.parametrize(
    ("slow", "shown", "brief"),
    [((1.199, 1.2, 1.202), "1.200x (1.200-1.201)", "1.20x"),
     ((1.18, 1.2, 1.22), "1.20x (1.19-1.21)", "1.20x"),
     ((0.992, 0.998, 1.002), "0.998x (0.995-1.000)", "0.998x (0.995-1.000)"),
     ((12.1, 12.3, 12.9), "12.3x (12.2-12.6)", "12.3x"),
     ((1.02, 1.04, 1.06), "1.04x (1.03-1.05)", "1.04x (1.03-1.05)"),
     ((0.5, 0.5, 0.5), "0.50000x (0.50000-0.50000)", "0.50000x (0.50000-0.50000)")],
)  # fmt: skip
def test_a_ratio_has_the_digits_that_show_its_spread(slow, shown, brief):
    """In a table without room, the ratios close to 1, or below it, have their quartiles."""
    before = make_cell(1, "raw_python", time_ms=slow[1], paired=True, rounds_ms=[*slow])
    after = make_cell(time_ms=1.0, paired=True, rounds_ms=[1.0, 1.0, 1.0])
    assert ratios.show_step(before, after) == shown
    assert ratios.show_briefly(before, after) == brief
    assert ratios.show_briefly(after, after) == "1.00x"  # itself


@pytest.mark.parametrize("said", [cell_tables.COMPARED, cell_tables.LEGEND.partition("#3")[2]])
def test_the_legend_says_which_ratios_have_quartiles(said):
    def brief(ratio):
        slow = make_cell(1, time_ms=ratio, paired=True, rounds_ms=[ratio, ratio, ratio + 0.001])
        fast = make_cell(time_ms=1.0, paired=True, rounds_ms=[1.0, 1.0, 1.0])
        return ratios.show_briefly(slow, fast)

    low, high = (float(x) for x in re.findall(r"([\d.]+)x", said)[:2])
    assert "(" in brief(low) and "(" in brief(high - 1e-6)
    assert "(" not in brief(low - 1e-6) and "(" not in brief(high)


@pytest.mark.parametrize(
    ("ms", "text"),
    [(None, "-"), (1.23e-4, "0.123 us"), (0.0123, "12.3 us"), (0.9994, "999 us"), (0.9999, "1 ms"),
     (4.561, "4.56 ms"), (999.4, "999 ms"), (999.6, "1 s"), (12345.0, "12.3 s"), (2e6, "2000 s")],
)  # fmt: skip
def test_times_for_people(ms, text):
    assert units.show_time(ms) == text


@pytest.mark.parametrize(
    ("peak", "meter", "text"),
    [(None, None, "-"), (0, "process-rss", "<1 MB"), ((1 << 20) - 1, "process-rss", "<1 MB"),
     (1 << 20, "process-rss", "1 MB"), (512, "cuda-allocator", "512 B"),
     (200 << 20, None, "200 MB"),
     (1000 << 20, None, "1000 MB"), (1023 << 20, None, "1023 MB"), (3 << 29, None, "1.5 GB"),
     (1010 << 10, "cuda-allocator", "1010 KB")],
)  # fmt: skip
def test_peaks_for_people(peak, meter, text):
    assert ratios.show_peak(make_cell(peak_bytes=peak, memory_meter=meter)) == text


def test_errors_and_ratios_for_people():
    assert [ratios.show_error(x) for x in (None, 0.0, 0.37, 1.26e-7, 15.0)] == [
        "-", "0", "0.37", "1.3e-07", "15"
    ]  # fmt: skip
    assert [ratios.show_ratio(x, False) for x in (None, 123.4, 0.512)] == [
        "-",
        "~120x",
        "~0.51x",
    ]
    assert ratios.show_ratio(123.4, True) == "123x"


def test_a_problem_says_what_is_unusual_in_it():
    assert groups.title([make_cell()]) == "N = 128, d = 64, float32, normal input, cpu"
    unusual = make_cell(
        nq=1, nk=99, b=2, h=8, hk=2, dtype="float32", precision="tf32", inputs="real",
        causal=True, seqlens_k=[9, 99], device="cuda", direction="train",
    )  # fmt: skip
    assert groups.title([unusual]) == (
        "Nq = 1, Nk = 99, d = 64, b = 2, h = 8, hk = 2, float32, tf32, real input, causal, padded, "
        "train, cuda"
    )


def test_directions_in_one_file_are_tables_of_their_own_and_are_not_compared():
    cells = ladder_cells() + ladder_cells(direction="bwd") + ladder_cells(direction="train")
    headers = [line for line in shown(cells) if "vs before" in line]
    assert [line.split("vs before")[0].split()[2:] for line in headers] == [
        ["time"], ["bwd", "time"], ["train", "time"],
    ]  # fmt: skip
    assert len({line.index("vs before") for line in headers}) == 1  # all columns of one width
    for group in groups.by_problem(cells):
        assert len({cell["direction"] for cell in group}) == 1
        assert faster(group, group[1]) == (100.0, None)


def output(path, form):
    done = in_turn("table", path, "--format", form)
    assert done.returncode == 0 and done.stderr == ""
    return done.stdout


def test_every_format_holds_what_the_records_hold(tmp_path):
    cells = ladder_cells() + ladder_cells(n=512)
    cells[-1]["reason"] = 'a "quoted", reason | with bars\nand two lines'
    path = write_run(tmp_path / "run.jsonl", make_env(cells, TITLES), cells)
    cells[-1]["reason"] = cells[-1]["reason"].replace("\n", "?")  # an end of a line is never shown

    rows = json.loads(output(path, "json"))
    assert len(rows) == len(cells)
    for row, cell in zip(rows, cells):
        assert {name: row[name] for name in cell} == cell
        assert row["title"] == TITLES.get(cell["name"], "mine")
    assert [row["vs_before"] for row in rows[:5]] == [None, 100.0, None, None, None]
    assert [row["vs_stage3"] for row in rows[:5]] == [0.01, None, None, None, None]

    rows = list(csv.DictReader(io.StringIO(output(path, "csv"))))
    assert len(rows) == len(cells)
    for row, cell in zip(rows, cells):
        for name, value in cell.items():
            assert row[name] == ("" if value is None else str(value)), name

    lines = output(path, "markdown").splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) == 2 * 2 + len(cells)
    for line in tables:
        assert line.count("|") - line.count("\\|") == len(cell_tables.COLUMNS) + 1
    assert "**N = 512, d = 64, float32, normal input, cpu**" in lines
    assert [cell.strip() for cell in tables[3].split("|")[1:4]] == [
        "3", "torch, three GEMMs", "500\N{NO-BREAK SPACE}us"
    ]  # fmt: skip
    assert lines[-1] == cell_tables.LEGEND

    text = output(path, "rich")
    assert max(map(len, text.splitlines())) <= 100
    assert "torch, three GEMMs" in text


def test_a_csv_has_the_rate_the_speed_ups_and_the_machine():
    cells = [make_cell(time_ms=2.0, paired=True), make_cell(6, "ours", paired=True, time_ms=0.5),
             make_cell(100, "flash", paired=True), make_cell(101, "other", paired=True,
             status="crashed", time_ms=None, reason="x")]  # fmt: skip
    text = table.as_csv(cell_tables.flat_rows(make_env(cells, driver="580.1"), cells))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["speedup_flash"] for row in rows] == ["0.5", "2.0", "", ""]
    assert {row["speedup_other"] for row in rows} == {""}
    for row, cell in zip(rows, cells, strict=True):
        assert (row["cpu"], row["driver"]) == ("a processor", "580.1")
        time = cell["time_ms"]
        assert row["tflops"] == (str(cell["flops"] / time / 1e9) if time else "")
        assert row["tokens_per_s"] == (str(128 / (1e-3 * time)) if time else "")
    assert table.as_csv([]) == ""


@pytest.mark.parametrize("form", ["text", "markdown", "html"])
def test_a_title_can_not_break_a_table(form):
    cells = [make_cell(90, "mine")]
    made = cell_tables.page(make_env(cells, {"mine": "[red]a|b[/red] <i>"}), cells)
    expected = {"text": "[red]a|b[/red] <i>", "markdown": r"| [red]a\|b[/red] <i> |",
                "html": ">[red]a|b[/red] &lt;i&gt;</td>"}  # fmt: skip
    assert expected[form] in getattr(made, form)()


def test_a_table_in_html_has_every_text_once_in_its_cell():
    made = table.Table([table.Column("a", left=True), table.Column("b")], [["1", "2"]], "T", ["n"])
    root = ElementTree.fromstring(f"<div>{made.html()}</div>")
    found = [[(cell.tag, cell.text, cell.get("align")) for cell in row] for row in root.iter("tr")]
    assert found == [[("th", "a", "left"), ("th", "b", "right")],
                     [("td", "1", "left"), ("td", "2", "right")]]  # fmt: skip
    assert [each.tag for each in root] == ["p", "table", "p"]
    assert [each.text for each in root.iter() if (each.text or "").strip()] == [*"Tab12n"]
    assert made.markdown() == "**T**\n\n| a | b |\n|---|---:|\n| 1 | 2 |\n\nn"


def test_no_number_is_parted_from_its_unit_in_markdown():
    parted = ["12.3 us", "1.5 MB", "<1 MB", "4.28 TB/s", "7 kFLOP/s", "1.2 GB / 3 GB, 2x"]
    row = table.markdown_row(parted)
    for text, shown in zip(parted, row.strip("| ").split(" | "), strict=True):
        assert shown.replace("\N{NO-BREAK SPACE}", " ") == text
        assert not re.search(r"\d [a-zA-Z]", shown)
    kept = ["4 Triton Lite", "64 tokens, 3 SDPA", "5 members", "a|b"]
    assert table.markdown_row(kept) == r"| 4 Triton Lite | 64 tokens, 3 SDPA | 5 members | a\|b |"
