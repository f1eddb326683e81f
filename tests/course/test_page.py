"""The page of `ladder report` in a browser: it can be played, edited, broken, linked and read."""

import re
from dataclasses import replace

import numpy as np
import pytest
from browser import DARK, LIGHT, Page, started
from ladder_command import ROOT

from course.page import ladder_data
from course.report.course import CLUSTER
from course.tracing import trace
from harness.problems import ring_cost
from harness.problems.ring_cost import Machine
from harness.views import rings
from ladder.report import report_command

FIRST = [0.5, 1, 2, -0.5, 3, 1, 0, 1.5], [2, 8, 4, 6, 9, 1, 3, 7]  # scores, values
TILE = 2
SECTIONS = ("player", "lite", "masks", "splits", "pieces", "timeline", "ring")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "a report.html"
    report_command([ROOT / "results" / "cpu" / "tour.jsonl"], file)
    with started() as driver:
        yield Page(driver, file)


def shown(page):
    """The table of outputs: name -> output, what the weights sum to, error; None where none is."""
    rows = page.js(
        "return [...document.querySelectorAll('.outputs tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return {name: [number(cell) for cell in cells] for name, *cells in rows}


def number(text):
    text = text.replace("\N{MINUS SIGN}", "-").replace(" ", "")
    if found := re.fullmatch(r"(?:(-?[\d.]+)·)?10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", text):
        digits = found[2].translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
        return float(found[1] or 1) * 10.0 ** int(digits)
    return None if text == "\N{EN DASH}" else float(text)


def expected(s, v, tile):
    """Exact, Online and Lite over all keys, by course/tracing."""
    q, k, v = np.ones(1), np.array(s, float)[:, None], np.array(v, float)[:, None]
    last = trace.walk(q, k, v, tile)[-1]
    return {"Exact": trace.attention(q, k, v)[0], "Online": last.o[0], "Lite": last.lite[0]}


def assert_outputs(page, s, v, tile):
    """The page shows what Python computes, as far as its four decimals go."""
    rows = shown(page)
    for name, want in expected(s, v, tile).items():
        assert abs(rows[name][0] - want) <= 0.6e-4, (name, rows[name], want)
    assert rows["Online"][1] == 1 and rows["Lite"][1] == -(-len(s) // tile)


def test_it_opens_without_an_error_and_can_ask_for_nothing(page):
    page.errors(), page.requests()
    page.open()
    assert page.errors() == []
    asked = [url for url in page.requests() if not url.startswith(("data:", "about:"))]
    assert asked == [page.file.as_uri()]
    assert [each.get_attribute("id") for each in page.all("section")][: len(SECTIONS)] == [
        *SECTIONS
    ]
    assert all(page.text(f"#{name} .mount") for name in SECTIONS)
    stopped = page.driver.execute_async_script(
        "const done = arguments[0];"
        "document.addEventListener('securitypolicyviolation', (event) => done(event.blockedURI));"
        "fetch('http://127.0.0.1:9/').catch(() => {});"
    )
    assert stopped.startswith("http://127.0.0.1:9")
    page.errors()  # of this request


def test_it_steps_forth_and_back_to_what_python_computes(page):
    page.open()
    assert shown(page)["Online"][0] is None
    for tile in range(4):
        page.button("Step", "#player")
        so_far = TILE * (tile + 1)
        assert_outputs(page, FIRST[0][:so_far], FIRST[1][:so_far], TILE)
    m_i, alpha, *_ = (each.text for each in page.all(".carried output"))
    assert (m_i, alpha) == ("3", "1")  # the max stays in the last tile
    page.button("Back", "#player")
    assert_outputs(page, FIRST[0][:6], FIRST[1][:6], TILE)
    page.button("Start", "#player")
    assert shown(page)["Online"][0] is None


@pytest.mark.slow
def test_it_plays_until_it_is_paused(page):
    page.open()
    page.button("Play", "#player")
    page.until("document.querySelector('#player .transport input').value === '1'")
    page.button("Pause", "#player")
    assert [each.text for each in page.all("#player .main")] == ["Play"]


def test_a_reader_edits_scores_values_keys_and_tiles(page):
    from selenium.webdriver.common.keys import Keys

    page.open("#player?step=4")
    s, v = ([*x] for x in FIRST)
    s[6] = 4.25
    field = page.find("input[aria-label='score of key 6']")
    field.clear()
    field.send_keys("4.25")
    assert_outputs(page, s, v, TILE)
    v[0] = -3
    page.put(page.find("input[aria-label='value of key 0']"), -3)
    assert_outputs(page, s, v, TILE)
    page.button("Add a key", "#player")
    assert_outputs(page, [*s, 2], [*v, 5], TILE)
    page.button("Remove the last key", "#player")
    page.put(page.labelled("Keys per tile"), 3)
    page.put(page.labelled("Sharpness: scores times"), 2)
    assert_outputs(page, [2 * x for x in s], v, 3)
    before = shown(page)
    field = page.find("input[aria-label='score of key 6']")  # the table is a new one
    field.send_keys(
        Keys.CONTROL + "a", Keys.DELETE
    )  # no number: nothing changes, and the field says so
    assert field.get_attribute("aria-invalid") and shown(page) == before
    assert "4.25" in page.text("#player [role=status].small")  # what the page still shows
    field.send_keys(Keys.TAB)
    assert field.get_attribute("value") == "4.25" and "4.25" in page.text("#player .note")
    assert page.errors() == []


def test_the_terms_are_texts_and_on_the_page(page):
    found = ladder_data.terms()
    assert {*ladder_data.TERMS, *ladder_data.OWN_TERMS} == {term for term, _ in found}
    assert not any(re.search(r"\]\(|`|\*\*", words) for _, words in found)
    page.open()
    shown = page.js("return [...document.querySelectorAll('.terms dd')].map((e) => e.textContent)")
    assert shown == [words for _, words in found]


@pytest.mark.parametrize("mistake", ["rescale", "tail", "zero"])
def test_a_mistake_is_named_and_shown(page, mistake):
    page.open("#player?step=4")
    page.put(page.labelled("Break Online"), mistake)
    begins = {"rescale": "no rescale: acc", "tail": "ragged tail unmasked", "zero": "no max"}
    assert page.text("#player .note strong").startswith(begins[mistake])
    if mistake != "rescale":  # eight keys in tiles of two have no tail, and a score above 0
        page.button("Show an example that does", "#player .note")
    assert page.all("#player .note button") == []
    page.button("End", "#player")
    rows = shown(page)
    s, v = (
        [float(field.get_attribute("value")) for field in page.all(f"input[aria-label^='{name}']")]
        for name in ("score", "value")
    )
    want = expected(s, v, 1)["Exact"]
    assert abs(rows["Exact"][0] - want) <= 0.6e-4
    assert not abs(rows["Online, broken"][0] - want) < 0.1


def test_the_address_holds_the_example(page):
    page.open("#player?s=1,2,3,4,5&v=5,4,3,2,1&tile=2&step=3")
    page.put(page.find("input[aria-label='score of key 1']"), 7.5)
    page.put(page.labelled("Break Online"), "rescale")
    page.until("/s=1,7.5,3,4,5&.*step=3.*break=rescale/.test(location.hash)")
    before = page.text("#player .mount"), shown(page)
    page.driver.refresh()
    page.until("document.documentElement.dataset.ready === 'true'")
    assert (page.text("#player .mount"), shown(page)) == before


def settings(page):
    """What the controls of the page are at, by their labels."""
    return page.js(
        "return Object.fromEntries([...document.querySelectorAll('main label')]"
        ".map((e) => [e.textContent + e.control.id, e.control.value]))"
    )


@pytest.mark.slow
def test_the_address_holds_every_section_that_was_changed(page):
    """And no other, whatever is gone to; what is as at first is left out."""
    page.open()
    first = settings(page)
    page.put(page.labelled("Queries Nq"), 40)
    page.until("location.hash === '#masks?nq=40'")
    page.put(page.labelled("GPUs", "#ring"), 8)
    page.put(page.labelled("Mask", "#ring"), 0)
    page.put(page.labelled("Number a", "#pieces"), "-0.1")
    page.put(page.labelled("show", "#charts"), "memory")
    page.button("Step", "#player")
    others = "masks?nq=40;ring?world=8&causal=0;pieces?a=-0.1;charts?show=memory"
    page.until(f"location.hash === '#player?step=1;{others}'")
    page.press(page.find("nav a[href='#lite']"))
    page.until(f"location.hash === '#lite;{others};player?step=1'")
    page.put(page.labelled("Queries Nq"), 64)  # as it was at first
    page.until(f"location.hash === '#masks;{others.removeprefix('masks?nq=40;')};player?step=1'")
    linked, shown = page.js("return location.hash"), settings(page)
    assert shown != first
    assert settings(page.open(linked)) == shown
    page.js("location.hash = '#masks?n=4;splits?h=64'")  # a link to a part of an open page
    page.until("location.hash.startsWith('#masks?n=4;ring?')")
    assert page.labelled("BLOCK_N", "#masks").get_attribute("value") == "4"
    assert page.labelled("Heads", "#splits").get_attribute("value") == "64"
    assert page.labelled("GPUs", "#ring").get_attribute("value") == "8"
    assert page.errors() == []


def test_a_value_that_a_section_cannot_have_is_as_at_first(page):
    page.open()
    for n, nq in zip((4, 8) * 4, ("40.5", "0", "129", "", "x", "Infinity", "1e99")):
        page.js(f"location.hash = '#masks?nq={nq}&n={n};ring?causal=%20'")
        block = page.labelled("BLOCK_N", "#masks")
        page.until("arguments[0].value === arguments[1]", block, str(n))
        assert page.labelled("Queries Nq").get_attribute("value") == "64", nq
        assert page.labelled("Mask", "#ring").get_attribute("value") == "1"
    assert page.errors() == []


def test_a_slider_says_the_value_that_is_computed_with_not_its_nearest_step(page):
    page.open("#player?sharp=0.3&step=4;lite?sharp=0.03")
    said = "arguments[0].parentElement.querySelector('output').textContent"
    sharp, deviation = (page.labelled("Sharpness", each) for each in ("#player", "#lite"))
    assert page.js(f"return {said}", sharp) == "0.3"
    assert page.js(f"return {said}", deviation) == f"{10**0.03:.2f}"
    assert_outputs(page, np.array(FIRST[0]) * 0.3, FIRST[1], TILE)


def test_a_malformed_address_is_said_and_shows_the_first_example(page):
    page.open("#player?s=1,two&tile=99&step=4")
    note = page.text("#player .note")
    assert '"1,two"' in note and "99" in note and page.errors() == []
    assert_outputs(page, *FIRST, TILE)
    page.open("#player?s=" + 999 * "9", width=360)
    assert 0 < len(page.text("#player .note")) < 300
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_the_theme_is_the_systems_until_the_button_switches_it(page, theme):
    def dark():
        ground = page.js("return getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", ground))) < 300

    page.open(theme=theme)
    button = page.find("#theme")
    for want in (theme == DARK, theme != DARK, theme == DARK):
        assert dark() == want and button.get_attribute("aria-pressed") == str(want).lower()
        button.click()


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1440])
def test_nothing_is_wider_than_the_page(page, width):
    """A ragged tail and many keys, too: a wide table scrolls in its own box."""
    page.open("#player?step=2", width=width)
    for _ in range(9):
        page.button("Add a key", "#player")
    page.put(page.labelled("Break Online"), "tail")
    wide = page.js(
        "const clipped = (e) => e && (e.matches('.scroll, .top nav, svg')"
        " || clipped(e.parentElement));"
        "return [...document.querySelectorAll('body *')].filter((e) => !clipped(e.parentElement) &&"
        " e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 99));"
    )
    assert wide == []
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")


def test_nothing_moves_for_a_reader_who_wants_less_motion(page):
    moving = (
        "return [...document.querySelectorAll('*')].filter((e) => { const s = getComputedStyle(e);"
        "return s.transitionDuration !== '0s' || s.animationDuration !== '0s' ||"
        " s.scrollBehavior === 'smooth'; }).length"
    )
    assert page.open("#player?step=2").js(moving) > 0
    assert page.open("#player?step=2", motion="reduce").js(moving) == 0


def test_the_keyboard_reaches_and_moves_every_control(page):
    from selenium.webdriver.common.keys import Keys

    page.open("#player?step=1")
    controls = "a[href], button:enabled, input, select, summary, [tabindex='0']"
    count = page.js(
        "let n = 0; for (const e of document.querySelectorAll(arguments[0]))"
        " if (e.checkVisibility()) e.dataset.nth = n++;"
        "return n", controls,
    )  # fmt: skip
    page.js(
        "window.reached = []; document.addEventListener('focusin', ({target}) => window.reached"
        ".push([Number(target.dataset.nth), getComputedStyle(target).outlineStyle]))"
    )
    page.find("body").send_keys(Keys.TAB * count)
    assert [nth for nth, _ in page.js("return window.reached")] == [*range(count)]
    assert "none" not in [outline for _, outline in page.js("return window.reached")]
    slider = page.labelled("Step", "#player")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert slider.get_attribute("value") == "2"
    step = page.all("#player .transport button")[3]
    for _ in range(4):  # the last two do nothing, and the focus stays
        step.send_keys(Keys.ENTER)
    assert slider.get_attribute("value") == "4"
    assert page.js("return document.activeElement === arguments[0]", step)
    play = page.find("#player .main")
    play.send_keys(Keys.ENTER)
    assert play.text == "Pause"


def test_the_explorables_say_what_python_computes(page):
    page.open("#masks?nq=48&nk=64&m=16&n=8")
    # each of the three blocks of 16 queries has the mask at two tiles of 8 keys
    count = {"full": 2 + 4 + 6, "masked": 3 * 2, "never": 4 + 2 + 0}
    assert {kind: len(page.all(f"#masks svg .{kind}")) for kind in count} == count

    def busy():
        return [
            len(each.find_elements("css selector", ".busy")) for each in page.all("#splits svg")
        ]

    assert busy() == [16, 128]  # stage 8 makes 8 parts of each
    page.put(page.labelled("Heads", "#splits"), 64)
    assert busy() == [132, 132]

    weights, last, _, error, online = (each.text for each in page.all("#lite .figures dd"))
    assert (weights, last) == ("2", "1") and number(error) > 0.5 > 1e-5 > number(online)
    page.put(page.labelled("Keys N", "#lite"), 64)
    weights, _, _, error, _ = (each.text for each in page.all("#lite .figures dd"))
    assert (weights, error) == ("1", "0")

    errors = [
        number(each.text.split("error ")[1]) for each in page.all("#pieces [data-count] .explained")
    ]
    assert errors[0] > 1e-4 > errors[1] > 1e-8 > errors[2] > errors[3] == 0
    page.press(page.find("#pieces [data-count='1']"))
    assert page.js("return document.querySelectorAll('#pieces td.kept').length") == 1

    def ring(way):
        one = replace(CLUSTER, nq=2**16, nk=2**16, world=4, causal=True)
        machine = Machine(rings.RATE, *rings.LINKS["NVLink"])
        took = f"{1e3 * ring_cost.seconds(one, machine, way):.2f}".rstrip("0").rstrip(".")
        assert page.text("#ring .figures dd") == f"{took}\N{NO-BREAK SPACE}ms"
        return [len(page.all(f"#ring svg .{kind}")) for kind in ("computes", "merges", "sends")]

    assert ring("ring_in_order") == [4 + 3 + 2 + 1, 3 + 2 + 1, 4 * 3]
    page.put(page.labelled("Parts", "#ring"), 1)
    assert ring("ring") == [16, 12, 12]
    page.put(page.labelled("A hop sends", "#ring"), 0)
    assert ring("ring_in_turn") == [16, 12, 12]

    page.button("1", "#player .predict")
    assert page.find("#player .why").text.startswith("It is 4.")  # what is hidden has no text
    assert page.errors() == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1440])
def test_axe_finds_nothing(page, width):
    """Every rule in light colours; in dark ones that of contrast, as nothing else is different."""
    for theme, rules in ((LIGHT, {}), (DARK, {"runOnly": ["color-contrast"]})):
        page.open("#player?step=2&break=rescale", width=width, theme=theme)
        page.button("1", "#splits .predict")  # its answer is hidden before
        assert page.axe(**rules) == []
