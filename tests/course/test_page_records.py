"""What the page shows of records: which are compared, and that each figure has its record."""

import hashlib
import html
import json
import re

import pytest
from made_up import fell, make_bench, make_ceiling, make_cell, make_env, write_run

from course.page import drift, listings, page, records, vendored
from harness.records.code import built_in_files, digest, files_of, number_of
from harness.records.jsonl import read

LITE, THREE = (4, "triton_lite"), (3, "torch_three_gemm")
HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>"


@pytest.fixture(autouse=True)
def no_code_here(monkeypatch):
    """Which stages were edited since is asked by one test alone: it takes most of a second."""
    monkeypatch.setattr(records.text, "codes", dict)


def shown(tmp_path, cells, *more, **about):
    """The page's records of a file of cells, its rows as dicts."""
    path = write_run(tmp_path / "run.jsonl", make_env(cells, **about), cells)
    found = records.collect({each: read(each, None) for each in (path, *more)})["records"]
    return found | {"rows": [dict(zip(found["fields"], row, strict=True)) for row in found["rows"]]}


def interpreted(**changes):
    return make_cell(5, "triton_online", mode="interpreted", samples=1, time_iqr_ms=None, **changes)


def test_only_right_and_not_interpreted_times_are_compared(tmp_path):
    wrong = make_cell(*LITE, status="wrong-by-design", reason="above its N", time_ms=0.1)
    crashed = fell(6, "crashed", "by a signal", dtype="float32", precision="ieee")
    cells = [make_cell(*THREE), wrong, interpreted(), make_cell(8, "other", time_ms=0.5), crashed]
    rows = shown(tmp_path, cells)["rows"]
    fair = {row["time_ms"] for row in rows if row["fair"]}
    assert fair == {1.0, 0.5}
    for row in rows:
        if not row["fair"]:
            assert row["over"] == {} and row["rate"] == "-"
    [over] = [row["over"] for row in rows if row["over"]]
    assert over == {"3 torch_three_gemm": "~2x"}


def test_unpaired_ratios_are_marked_and_stand_in_a_table_of_their_own(tmp_path):
    rounds = {"samples": 3, "paired": True}
    cells = [
        make_cell(*THREE), make_cell(8, "other", time_ms=0.5),
        make_cell(*THREE, **rounds, rounds_ms=[3.0, 3.3, 3.6]),
        make_cell(8, "other", **rounds, rounds_ms=[1.0, 1.0, 1.0]),
    ]  # fmt: skip
    found = shown(tmp_path, cells)
    tables = {}
    for row in found["rows"]:
        tables.setdefault(row["problem"], []).append(row["over"].get("3 torch_three_gemm"))
    assert len(tables) == len(found["problems"]) == 2
    for place, over in tables.items():
        paired = found["problems"][place]["paired"]
        assert over == [None, "3.30x (3.15-3.45)" if paired else "~2x"]


def test_a_variant_is_compared_with_its_stage_and_is_nobodys_rival(tmp_path):
    nine, variant = (9, "gluon_hopper"), (91, "in_turn")
    cells = [make_cell(*nine), make_cell(*variant, time_ms=0.5), make_cell(9, "first")]
    found = shown(tmp_path, cells)
    [run] = found["runs"]
    of = {each["name"]: each["of"] for each in run["stages"]}
    assert of == {"gluon_hopper": None, "in_turn": 9, "first": 9}
    over = {run["stages"][row["who"]]["name"]: row["over"] for row in found["rows"]}
    assert over["gluon_hopper"] == {}
    assert over["in_turn"]["9 gluon_hopper"] == "~2x"
    # with two stages beside it, nothing says which one it varies
    [run] = shown(tmp_path, [*cells, make_cell(6, "triton_flash2")])["runs"]
    assert {each["name"]: each["of"] for each in run["stages"]}["in_turn"] is None


def test_no_two_runs_problems_or_devices_share_a_table(tmp_path):
    cells = [make_cell(n=64), make_cell(n=128), make_cell(n=64, causal=True),
             make_cell(n=64, inputs="peaky"), make_cell(n=64, direction="train")]  # fmt: skip
    other = write_run(tmp_path / "other.jsonl", make_env(cells), cells)
    found = shown(tmp_path, cells, other)
    places = [row["problem"] for row in found["rows"]]
    assert len(set(places)) == len(places) == 2 * len(cells)
    assert {problem["run"] for problem in found["problems"]} == {0, 1}


def test_each_row_has_its_whole_record_and_its_run(tmp_path):
    cells = [make_cell(time_ms=1 / 3), make_cell(n=64, reason="why", status="skipped")]
    about = {"commit": "abc123", "device_name": "a machine", "date": "2026-02-03T04:05:06+00:00"}
    arguments = {"command": "bench", "n": "64,128", "inputs": "normal", "graph": True,
                 "suite": None, "stage": ["a file.py"], "nq": False}  # fmt: skip
    found = shown(tmp_path, cells, arguments=arguments, plan=[{**THREE_PLANNED}] * 3, **about)
    [run] = found["runs"]
    assert (run["commit"], run["machine"], run["date"]) == tuple(about.values())
    assert run["command"] == "ladder bench --n 64,128 --inputs normal --graph --stage 'a file.py'"
    assert run["file"] == "run.jsonl"  # and no folder of this machine
    assert str(tmp_path) not in json.dumps(found)
    assert run["missing"] == 1
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    for row in found["rows"]:
        written = json.loads(lines[row["line"] - 1])
        kept = row | found["problems"][row["problem"]] | {"causal": False}
        known = {name: kept[name] for name in written if name not in ("kind", "stage", "name")
                 and name != "rounds_ms"}  # fmt: skip
        for name, value in known.items():
            assert value == (pytest.approx(written[name], rel=1e-5)
                             if isinstance(value, float) else written[name]), name  # fmt: skip
        assert run["stages"][row["who"]]["number"] == written["stage"]


THREE_PLANNED = {name: make_cell()[name] for name in (
    "stage", "name", "b", "h", "hk", "nq", "nk", "d", "dtype", "precision", "causal", "inputs",
    "seed", "seqlens_k", "device", "direction", "paired", "page_size")}  # fmt: skip


def test_an_edited_stage_is_marked(tmp_path, monkeypatch):
    cells = [make_cell(), make_cell(*LITE)]
    monkeypatch.setattr(records.text, "codes", lambda: {THREE: "as measured", LITE: "edited"})
    env = make_env(cells)
    for rung in env["rungs"]:
        rung["code"] = "as measured"
    path = write_run(tmp_path / "run.jsonl", env, cells)
    [run] = records.collect({path: read(path)})["records"]["runs"]
    assert {each["number"]: each["edited"] for each in run["stages"]} == {3: False, 4: True}


def test_a_chart_has_two_stages_and_two_n(tmp_path):
    def titles(*cells):
        return [chart["title"] for chart in shown(tmp_path, [*cells])["charts"]]

    three, other = make_cell(*THREE, n=64), make_cell(8, "other", n=64)
    larger = make_cell(*THREE, n=128)
    assert titles(three, other) == titles(three, larger) == []
    assert titles(three, other, larger) == ["d = 64, b = 1, h = 1, float32, normal input, cpu"]


def test_charts_have_no_interpreted_or_wrong_time_but_their_errors(tmp_path):
    cells = [
        make_cell(*which, n=n, status=status, reason="" if status == "ok" else "above its N")
        for n in (64, 128)
        for which, status in ((THREE, "ok"), (LITE, "ok" if n == 64 else "wrong-by-design"))
    ] + [interpreted(n=64)]
    found = shown(tmp_path, cells)
    [chart] = found["charts"]
    assert chart["title"] == "d = 64, b = 1, h = 1, float32, normal input, cpu"

    def drawn(what):
        rows = (found["rows"][place] for place, _ in chart["points"][what])
        return [(row["mode"], row["status"]) for row in rows]

    assert drawn("time") == drawn("rate") == [("native", "ok")] * 3
    assert sorted(drawn("error")) == [
        ("interpreted", "ok"), *[("native", "ok")] * 3, ("native", "wrong-by-design")
    ]  # fmt: skip


def test_a_roof_takes_runs_of_its_machine_alone_and_of_each_stage_the_latest(tmp_path):
    def cells(time_ms):
        return [make_bench(each, time_ms=time_ms) | {"paired": False} for each in (3, 6, 7)]

    def run(name, time_ms, machine, date):
        own = cells(time_ms)
        about = {"device": "cuda", "device_name": machine, "date": f"2026-01-0{date}"}
        return write_run(tmp_path / name, make_env(own, **about), own)

    ceilings = [make_ceiling(), make_ceiling("copy")]
    roofs = write_run(
        tmp_path / "ceilings.jsonl",
        make_env([], device="cuda", device_name="one"), ceilings,
    )  # fmt: skip
    paths = [run("new", 2.0, "one", 2), run("old", 3.0, "one", 1), run("far", 1.0, "two", 3), roofs]
    found = records.collect({path: read(path, None) for path in paths})["records"]
    [roof] = found["roofs"]
    assert roof["machine"] == "one"
    times = {found["rows"][place][found["fields"].index("time_ms")] for place, *_ in roof["points"]}
    assert times == {2.0}


def test_a_hostile_title_or_reason_stays_a_text(tmp_path):
    cell = make_cell(status="crashed", reason=HOSTILE, time_ms=None)
    path = write_run(tmp_path / "run.jsonl", make_env([cell], {cell["name"]: HOSTILE}), [cell])
    data = {"stages": [], **records.collect({path: read(path)})}
    inside = page.make(data).split('id="data">')[1].split("</script>")[0]
    assert "<" not in inside
    assert json.loads(inside)["records"]["runs"][0]["stages"][0]["title"] == HOSTILE


# ---- code side by side


@pytest.fixture(scope="module")
def code():
    return listings.collect()["listings"]


def test_a_listing_has_every_line_of_every_file_of_a_stage(code):
    assert [each["number"] for each in code["stages"]] == [*map(number_of, built_in_files())]
    for stage in code["stages"]:
        files = files_of(stage["number"])
        assert stage["files"] == [path.name for path in files]
        texts = [path.read_text().splitlines() for path in files]
        for file, number, coloured in stage["whole"]:
            assert plain(coloured) == texts[file][number - 1]
        left_out = [line for lines in texts for line in lines if listings.diff.MARKER.match(line)]
        assert len(stage["whole"]) == sum(map(len, texts)) - len(left_out)
    assert any(name.endswith(".cpp") for name in code["stages"][2]["files"])


def plain(coloured):
    return html.unescape(re.sub("<[^>]*>", "", coloured))


@pytest.mark.parametrize("part", ["whole", "kernel"])
def test_what_is_said_to_be_equal_is_and_every_line_is_somewhere(code, part):
    stages = {each["number"]: each[part] for each in code["stages"]}
    for pair, opcodes in code["opcodes"][part].items():
        a, b = (stages[int(number)] for number in pair.split())
        i = j = 0
        for equal, i1, i2, j1, j2 in opcodes:
            assert (i1, j1) == (i, j)
            left, right = ([line[2] for line in lines] for lines in (a[i1:i2], b[j1:j2]))
            assert left == right if equal else left[:1] != right[:1]
            i, j = i2, j2
        assert (i, j) == (len(a), len(b))


# ---- the committed page


def test_the_committed_page_is_made_from_what_is_here():
    assert not drift.is_stale(), "run `ladder readme`"
    assert drift.PAGE.stat().st_size < 5e6


def test_a_change_of_a_record_a_style_a_stage_or_a_module_makes_the_page_stale(
    tmp_path, monkeypatch
):
    told = [*drift.texts()]
    assert {*told} >= {*drift.sources(), *page.WEB.rglob("*.js"), *page.WEB.glob("*.css")}
    assert {*told} >= {path for first in built_in_files() for path in files_of(first)}
    before = drift.made_from()
    path = tmp_path / "page.html"
    monkeypatch.setattr(drift, "PAGE", path)
    assert drift.is_stale()  # it is missing
    path.write_text(before)
    assert not drift.is_stale()
    first, *others = told
    changed = tmp_path / first.name
    for end, stale in ((b"\r\n", False), (b" \n", True)):  # other line ends are no change
        changed.write_bytes(first.read_bytes().replace(b"\n", end))
        with monkeypatch.context() as patch:
            patch.setattr(drift, "texts", lambda: iter([changed, *others]))
            assert drift.is_stale() == stale
    with monkeypatch.context() as patch:
        patch.setattr(drift, "digest", lambda text: digest(text + "\nanother = 1"))
        assert drift.is_stale()


# ---- libraries of others


def test_a_vendored_library_is_as_its_project_made_it_and_has_its_licence():
    listed = vendored.libraries()
    files = {path.name for path in vendored.FOLDER.glob("*.js")}
    assert {each["file"] for each in listed} == files
    for each in listed:
        data = (vendored.FOLDER / each["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == each["sha256"]
        assert f"v{each['version']} Copyright".encode() in data.splitlines()[0]
        assert "Permission to use, copy, modify" in each["terms"]
