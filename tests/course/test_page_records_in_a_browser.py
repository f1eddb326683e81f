"""The records on the page of `ladder report` in a browser: sorted, filtered, opened, hovered."""

import re
from functools import cache
from urllib.parse import urlencode

import pytest
from browser import DARK, LIGHT, Page, started
from ladder_command import ROOT
from made_up import make_cell, make_env, write_run

from course.lessons import diff
from course.page import listings
from harness.records.jsonl import read
from harness.records.units import show_time
from ladder.report import report_command

pytestmark = pytest.mark.slow  # test_page.py has what `make test` opens a browser for

HOSTILE = "</script><img src=x onerror=document.title='run'><!--<script>"
RESULTS = ROOT / "results"
SHOWN = ("cpu/tour", "h200/table-4.2", "h200/roofline-float16", "h200/roofline-float32",
         "h200/ceilings")  # fmt: skip
MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@pytest.fixture(scope="module", autouse=True)
def one_listing():
    """The code of the stages is coloured for the first page, not for each: it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listings, "collect", cache(listings.collect))
        yield


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    cells = [make_cell(reason=HOSTILE, status="crashed", time_ms=None)]
    env = make_env(cells, {cells[0]["name"]: HOSTILE}, device_name=HOSTILE)
    hostile = write_run(folder / "hostile.jsonl", env, cells)
    file = folder / "report.html"
    report_command([*(RESULTS / f"{name}.jsonl" for name in SHOWN), hostile], file)
    with started() as driver:
        yield Page(driver, file).open()


@pytest.fixture(autouse=True)
def no_error(page):
    """Nothing of what the tests do leaves an error on the console."""
    if not page.driver.current_url.startswith(page.file.as_uri()):
        page.open()
    page.errors()
    yield
    assert page.errors() == []


@pytest.fixture
def another(page, tmp_path):
    """A function that opens the page of other records."""

    def opened(cells, width=1440, **about):
        path = write_run(tmp_path / "run.jsonl", make_env(cells, **about), cells)
        report_command([path], tmp_path / "report.html")
        return Page(page.driver, tmp_path / "report.html").open(width=width)

    return opened


def clear(page):
    page.button("Clear filters", "#comparison")


def choose(page, label, value):
    control = page.labelled(label, "#comparison")
    page.put(control, f"={value}")


def blocks(page):
    """The shown tables: title -> rows of texts, as they stand."""
    return page.js(
        "return [...document.querySelectorAll('.records tbody')].map((body) =>"
        " [body.querySelector('.problem').textContent, [...body.rows].map((row) => ({"
        " kind: row.className, words: [...row.cells].map((cell) => cell.textContent)}))])"
    )


def ms(text):
    number, unit = text.split()
    return float(number) * MS[unit]


def test_a_table_is_sorted_by_time_and_what_is_not_compared_stands_last(page):
    clear(page)
    choose(page, "file", "results/cpu/tour.jsonl")
    for way in ("ascending", "descending"):
        page.find("#sort-time").click()
        assert page.find("th.time").get_attribute("aria-sort") == way
        assert page.find("th.stage").get_attribute("aria-sort") == "none"
        assert page.js("return document.activeElement.id") == "sort-time"
        assert_sorted(blocks(page), way)


def assert_sorted(tables, way):
    """In each table stand those that are compared, by time; then the others; then interpreted."""
    for _, rows in tables:
        apart = [row["kind"] for row in rows].index("apart")
        above, below = rows[1:apart], rows[apart + 1 :]
        kinds = [row["kind"] for row in above]
        assert kinds == sorted(kinds) and kinds[0] == "fair"
        times = [ms(row["words"][1]) for row in above if row["kind"] == "fair"]
        assert times == sorted(times, reverse=way == "descending") and len(times) > 1
        assert {row["words"][7] for row in above} == {"native"}
        # mode, rate, and both ratios
        assert {tuple(row["words"][i] for i in (7, 2, 3, 4)) for row in below} == {
            ("interpreted", "-", "-", "-")
        }


def test_filters_leave_only_what_passes_and_say_how_much(page):
    clear(page)
    everything = page.text("#comparison .count")
    _, cells = read(RESULTS / "h200" / "table-4.2.jsonl")
    want = [c for c in cells if (c["dtype"], c["nk"], c["paired"]) == ("float16", 4096, True)]
    for label, value in (("dtype", "float16"), ("N (keys)", "4096"), ("timed", "in turns")):
        choose(page, label, value)
    assert page.text("#comparison .count") == f"2 problems, {len(want)} records"
    for title, rows in blocks(page):
        assert "N = 4096, d = 64" in title and "float16" in title and "in turns" in title
        assert not any("~" in word for row in rows for word in row["words"])
    page.until("location.hash.startsWith('#comparison?kind=float16&')")
    machine = page.labelled("machine", "#comparison")  # no CPU has such a record
    assert not machine.find_element("css selector", "[value='=AMD EPYC']").is_enabled()
    choose(page, "timed", "alone")
    assert any("~" in word for _, rows in blocks(page) for row in rows for word in row["words"])
    clear(page)
    assert page.text("#comparison .count") == everything


def test_the_address_holds_what_the_records_are_shown_as(page):
    page.open()
    choose(page, "d", "128")
    for _ in range(2):
        page.press(page.find("#sort-time"))
    options = "return [...arguments[0].options].map((option) => option.value)"
    for label, section in (
        ("compare with", "#comparison"), ("show", "#charts"), ("problems", "#charts"),
        ("16 bits", "#roofline"), ("float32", "#roofline"),
    ):  # fmt: skip
        control = page.labelled(label, section)
        page.put(control, page.js(options, control)[-1])
    held = "^#roofline[^;]*float32=.*;comparison.*&sort=time&down=1&over=.*;charts"
    page.until(f"/{held}/.test(location.hash)")
    shown = (
        "return [...document.querySelectorAll('main select')].map((e) => e.value).concat("
        "[...document.querySelectorAll('#comparison thead th, figcaption, #roofline .drawing svg')]"
        ".map((e) => e.textContent + e.ariaSort + e.ariaLabel))"
    )
    before = page.js(shown)
    linked = page.js("return location.hash")
    assert page.open().js(shown) != before
    assert page.open(linked).js(shown) == before
    page.js("location.hash = '#comparison?d=64;charts?show=error;roofline?float32=unknown'")
    page.until("document.querySelector('#comparison [aria-sort=ascending]').className === 'stage'")
    assert page.labelled("show", "#charts").get_attribute("value") == "error"
    unknown = page.labelled("float32", "#roofline")
    assert page.js("return arguments[0].selectedIndex", unknown) == 0
    assert page.errors() == []


def test_what_was_measured_again_stands_together_the_best_of_it_first(page):
    clear(page)
    choose(page, "file", "results/h200/table-4.2.jsonl")
    for label, value in (("dtype", "float16"), ("N (keys)", "4096")):
        choose(page, label, value)
    titles = [title for title, _ in blocks(page)]
    assert len(titles) == 4
    for first, second in (titles[:2], titles[2:]):
        assert first.split(", cuda")[0] == second.split(", cuda")[0]
        assert "in turns" in first and "each alone" in second
        assert "believe this first" in first and "believe this first" not in second


def test_a_ratio_is_over_whom_the_reader_chooses(page):
    clear(page)
    choose(page, "file", "results/h200/table-4.2.jsonl")
    choose(page, "timed", "in turns")
    page.put(page.labelled("compare with", "#comparison"), "102 SDPA, efficient")
    assert page.text("th.over") == "over 102 SDPA, efficient"
    [row] = [row for row in blocks(page)[0][1] if row["words"][0].startswith("102 ")]
    assert row["words"][4] == "-"
    [row] = [row for row in blocks(page)[0][1] if row["words"][0].startswith("3 ")]
    assert re.match(r"\d\.\d+x", row["words"][4])


def test_a_records_run_is_a_key_press_away(page):
    from selenium.webdriver.common.keys import Keys

    clear(page)
    choose(page, "file", "results/h200/table-4.2.jsonl")
    button = page.find(".records tbody .stage button")
    button.send_keys(Keys.ENTER)
    dialog = page.find("dialog.record")
    assert dialog.get_attribute("open")
    env, cells = read(RESULTS / "h200" / "table-4.2.jsonl")
    said = dialog.text
    assert env["device_name"] in said and env["commit"] in said and env["date"] in said
    assert "ladder run" in said and "--suite table-4.2" in said
    line = int(re.search(r"results/h200/table-4\.2\.jsonl, line (\d+)", said)[1])
    assert f"{cells[line - 2]['time_ms']:.6g}" in said
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert dialog.get_attribute("open") is None
    assert page.js("return document.activeElement === arguments[0]", button)
    page.js("arguments[0].click()", page.all(".records tbody td.peak")[0])
    assert dialog.get_attribute("open") and dialog.text == said
    page.button("Close", "dialog")


def test_a_hostile_record_is_shown_as_it_is(page):
    clear(page)
    choose(page, "file", "hostile.jsonl")
    button = page.find(".records tbody .stage button")
    assert HOSTILE in button.text and HOSTILE in page.text(".records .problem")
    button.click()
    assert HOSTILE in page.text("dialog.record")
    page.button("Close", "dialog")
    assert page.driver.title != "run" and not page.all("img")


def test_variants_stand_below_their_stage(another):
    cells = [make_cell(9, "gluon_hopper"), make_cell(91, "in_turn"), make_cell(100, "sdpa_flash")]
    [(_, rows)] = blocks(another(cells))
    assert [row["words"][0].strip("†") for row in rows[1:]] == [
        "9 gluon_hopper", "9 variant: in_turn", "100 sdpa_flash"
    ]  # fmt: skip
    assert rows[2]["words"][3].endswith("over stage 9")


def test_a_long_name_makes_nothing_wider_than_the_page(another):
    long = 150 * "x"
    cells = [make_cell(stage, name, n=n) for stage, name in ((3, "torch_three_gemm"), (8, "own"))
             for n in (64, 128)]  # fmt: skip
    other = another(cells, width=360, titles={"own": long}, device_name=long)
    assert long in other.text("#charts figcaption") and long in other.text("#charts .legend")
    assert other.js("return document.documentElement.scrollWidth <= innerWidth")
    other.js("document.querySelector('.records .variant td').click()")
    assert long in other.text("dialog.record h3")
    assert other.js("return document.querySelector('dialog').scrollWidth <= innerWidth")


@pytest.mark.parametrize("interpreted", [False, True])
def test_records_without_a_time_to_compare_are_shown_all_the_same(another, interpreted):
    changes = {"mode": "interpreted", "samples": 1, "time_iqr_ms": None}
    if not interpreted:
        changes = {"status": "crashed", "reason": "a cause", "time_ms": None}
    other = another([make_cell(5, "triton_online", **changes)])
    assert other.errors() == []
    assert other.all("#charts .point") == []
    assert other.text("#comparison .count") == "1 problem, 1 record"
    assert not other.find("#comparison").text.count("compare with")


def chart(page, what, file="results/h200/table-4.2.jsonl", title=""):
    page.put(page.labelled("show", "#charts"), what)
    options = page.all("#chart-problem optgroup")
    [own] = [each for each in options if each.get_attribute("label").endswith(file)]
    families = own.find_elements("css selector", "option")
    value = next(x.get_property("value") for x in families if title in x.get_property("text"))
    page.put(page.find("#chart-problem"), value)


def test_the_charts_problems_are_told_apart_and_each_has_something_to_see(page):
    for what in ("time", "memory", "error"):
        page.put(page.labelled("show", "#charts"), what)
        words = [each.text for each in page.all("#chart-problem option")]
        assert len({*words}) == len(words) > 1
        places = [each.get_attribute("value") for each in page.all("#chart-problem option")]
        for place in places:  # a change makes the options anew
            page.put(page.find("#chart-problem"), place)
            points = [each.get_attribute("aria-label") for each in page.all("#charts .point")]
            stages, ns = ({point.split(", N = ")[0] for point in points},
                          {point.split(", N = ")[1].split(":")[0] for point in points})  # fmt: skip
            assert min(len(stages), len(ns)) > 1


def test_lines_of_one_colour_are_told_apart(page):
    chart(page, "time", title="float16")
    glyphs = page.js(
        "return [...document.querySelectorAll('#charts .legend button')].map((button) =>"
        " [...button.querySelectorAll('path')].map((path) => path.outerHTML).join(''))"
    )
    assert len({*glyphs}) == len(glyphs)
    lines = page.js(
        "return [...document.querySelectorAll('#charts g[aria-label=line]')].map((line) =>"
        " [line.getAttribute('stroke'), line.getAttribute('stroke-width')].join())"
    )
    drawn = [line for line in lines if not line.startswith("var")]  # the rest makes a line double
    assert len({*drawn}) == len(drawn) == len(glyphs)


def test_hover_and_focus_show_a_points_value(page):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    chart(page, "time")
    _, cells = read(RESULTS / "h200" / "table-4.2.jsonl")
    alone = {c["nk"]: c for c in cells if c["stage"] == 3 and not c["paired"]
             and (c["dtype"], c["precision"], c["h"]) == ("float32", "ieee", 1)}  # fmt: skip
    first, *_, last = sorted(alone)
    points = page.all("#charts .point")
    assert [each.get_attribute("tabindex") for each in points] == ["0"] + ["-1"] * (len(points) - 1)
    page.js("arguments[0].focus()", points[0])
    tip = page.find("#charts .tip")
    assert tip.text.splitlines()[1] == f"N = {first}: {show_time(alone[first]['time_ms'])}"
    points[0].send_keys(Keys.END)
    assert tip.text.splitlines()[1] == f"N = {last}: {show_time(alone[last]['time_ms'])}"
    focused = page.driver.switch_to.active_element
    assert show_time(alone[last]["time_ms"]) in focused.get_attribute("aria-label")
    focused.send_keys(Keys.ENTER)
    assert page.find("dialog.record h3").text == "3 torch, three GEMMs"
    page.button("Close", "dialog")
    page.js("document.activeElement.blur()")
    assert not tip.is_displayed()
    page.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", points[0])
    ActionChains(page.driver).move_to_element(points[0]).perform()
    assert tip.is_displayed() and f"N = {first}: " in tip.text


def test_modes_are_apart_and_no_interpreted_time_is_drawn(page):
    chart(page, "time", "results/cpu/tour.jsonl")
    headings = [each.text for each in page.all("#charts .legend h3")]
    assert headings == ["Native: torch, C++, Python, other kernels"]
    chart(page, "error", "results/cpu/tour.jsonl", "d = 64")
    headings = [each.text for each in page.all("#charts .legend h3")]
    assert headings[-1] == "Interpreted, no speed"
    hollow = page.js(
        "return document.querySelectorAll('#charts .point[fill=\"var(--ground)\"]').length"
    )
    assert hollow > 0  # Lite is wrong by design
    before = len(page.all("#charts .point"))
    entry = page.all("#charts .legend button")[0]
    page.js("arguments[0].click()", entry)
    assert page.all("#charts .legend button")[0].get_attribute("aria-pressed") == "false"
    assert len(page.all("#charts .point")) < before


def test_the_roofline_has_every_stage_that_has_a_place_under_it(page):
    names = [
        [each.text.strip("†") for each in figure.find_elements("css selector", ".legend button")]
        for figure in page.all("#roofline figure")
    ]
    for name, shown in zip(("float16", "float32"), names, strict=True):
        env, cells = read(RESULTS / "h200" / f"roofline-{name}.jsonl")
        titles = {rung["stage"]: rung["title"] for rung in env["rungs"]}
        assert sorted(shown) == sorted(f"{c['stage']} {titles[c['stage']]}" for c in cells)


@pytest.mark.parametrize(
    ("old", "new", "part"), [(4, 5, "kernel"), (2, 3, "whole"), (9, 6, "kernel")]
)
def test_any_two_stages_stand_side_by_side(page, old, new, part):
    for label, value in (("left", old), ("right", new), ("show", part)):
        page.put(page.labelled(label, "#side-by-side"), value)
    for fold in page.all("#side-by-side .fold"):
        page.js("arguments[0].click()", fold)
    of = {"kernel": diff.kernel, "whole": lambda stage: [
        line for line in diff.whole(stage) if not diff.MARKER.match(line[2])]}[part]  # fmt: skip
    shown = page.js(
        "return [1, 2].map((n) => [...document.querySelectorAll("
        "`#side-by-side .listing pre:nth-child(${n}) .line`)]"
        ".map((line) => [line.tagName, line.textContent]))"
    )
    for stage, tag, lines in ((old, "DEL", shown[0]), (new, "INS", shown[1])):
        assert [text.rstrip() for _, text in lines] == [text.rstrip() for *_, text in of(stage)]
        assert {name for name, _ in lines} <= {"SPAN", tag}
    equal = [[text for name, text in side if name == "SPAN"] for side in shown]
    assert equal[0] == equal[1]
    goes, comes = (sum(name == tag for name, _ in side)
                   for side, tag in zip(shown, ("DEL", "INS"), strict=True))  # fmt: skip
    assert page.text("#side-by-side .count") == f"{comes} lines come, {goes} go."
    usual = {"left": 4, "right": 5, "part": "kernel"}
    asked = {"left": old, "right": new, "part": part}
    query = urlencode({name: x for name, x in asked.items() if x != usual[name]})
    first = f"#side-by-side?{query}" if query else "#side-by-side"
    page.until(f"location.hash.split(';')[0] === '{first}'")
    if part == "whole":
        files = page.text("#side-by-side .listing")
        assert "attention.cpp" in files and "value_graph.hpp" in files


def test_a_stage_or_part_that_is_none_is_as_at_first(page):
    for left, part in (("toString", "__proto__"), ("99", ""), ("constructor", "valueOf")):
        page.open("#side-by-side?" + urlencode({"left": left, "right": 3, "part": part}))
        shown = [page.labelled(each, "#side-by-side").get_attribute("value")
                 for each in ("left", "right", "show")]  # fmt: skip
        assert shown == ["4", "3", "kernel"]


def test_line_numbers_jump_only_where_lines_are_said_to_be_left_out(page):
    for left, right in ((6, 7), (8, 9)):
        for label, value in (("left", left), ("right", right), ("show", "kernel")):
            page.put(page.labelled(label, "#side-by-side"), value)
        for fold in page.all("#side-by-side .fold"):
            page.js("arguments[0].click()", fold)
        for n, stage in ((1, left), (2, right)):
            shown = page.js(
                "return [...document.querySelectorAll("
                "`#side-by-side .listing pre:nth-child(${arguments[0]}) > *`)]"
                ".map((row) => [row.className, row.textContent])", n,
            )  # fmt: skip
            rows, said, last = diff.kernel(stage), 0, None
            places = iter(rows)
            for kind, text in shown:
                if kind == "gap":
                    said = int((re.search(r"\d+", text) or ["0"])[0])
                elif kind == "line":
                    name, number, _ = next(places)
                    if last and last[0] == name:
                        left_out = number - last[1] - 1
                        assert said == (left_out if left_out > 2 else 0)
                    said, last = 0, (name, number)
            assert next(places, None) is None


def test_the_page_is_readable_by_everybody_with_everything_open(page):
    for width, theme in ((360, LIGHT), (1440, DARK)):
        page.open("#comparison", width=width, theme=theme)
        page.js("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        page.js("document.querySelector('.records tbody .stage button').click()")
        if theme == DARK:  # an open dialog hides the page
            page.button("Close", "dialog")
        assert page.axe("'#comparison, #charts, #roofline, #side-by-side, dialog'") == []
        assert page.js("return document.documentElement.scrollWidth <= innerWidth")
