"""A consumer's parts are marked in the loop over KV tiles, and read from the profiler's trace."""

import re

import make_variants
import pytest
import timeline
from made_up import make_env, write_run

from course.edits import texts_of
from course.report import hopper, text
from harness.records.jsonl import read

SHIPPED = texts_of(9)
MARK = re.compile(r"pl\.(enter|exit)_scope\('(\w+)'\)| = (\w+)\(")


@pytest.mark.parametrize("made", [SHIPPED, make_variants.variant("in_turn")])
def test_all_products_of_a_tile_are_in_one_part_and_the_softmax_in_another(made):
    texts = timeline.marked(made)
    [(marked, made)] = [(text, made[file]) for file, text in texts.items() if text != made[file]]
    loop = marked.partition("\ndef mainloop(")[2].partition("\n    return ")[0]
    inside, seen = "", {part: [] for part in (*timeline.PARTS, "")}
    for word, part, called in MARK.findall(loop):
        if called:
            seen[inside].append(called)
            continue
        assert inside == ("" if word == "enter" else part)
        inside = part if word == "enter" else ""
    assert seen["softmax"] == ["online_softmax"]
    # P V before S, or around it: OVERLAP says which
    products = ["start_scores", "finish_scores", *["start_output", "finish_output"] * 2]
    assert sorted(x for x in seen["products"] if x != "mask") == sorted(products)
    assert not {*products, "online_softmax"} & {*seen[""]}
    # nothing else is changed, but for the order of the wait for P V and the softmax
    lines = [line for line in marked.splitlines()[1:] if "    pl." not in line]
    assert sorted(lines) == sorted(made.splitlines())


def test_a_loop_that_is_not_as_expected_is_refused():
    with pytest.raises(ValueError, match="online_softmax"):
        timeline.marked(
            {file: text.replace("= online_softmax(", "= other(") for file, text in SHIPPED.items()}
        )


def event(part, start, length, warp=0, cta="CTA0"):
    """As Proton writes it: times in us, and how many cycles it takes for one."""
    return {
        "name": part, "pid": f"kernel Core0 {cta}", "tid": f"warp {warp} (line 0)",
        "ts": start / 1500, "dur": length / 1500, "args": {"Frequency (MHz)": 1500.0},
    }  # fmt: skip


def trace(tiles, cta="CTA0", slower=0):
    """Consumers 0 and 1: 600 cycles of products, then 300 of softmax, in a tile of 1000."""
    return [
        event(part, 1000 * tile + late + start, length + slower, warp, cta)
        for warp, late in ((0, 0), (1, 7), (4, 500), (5, 507))
        for tile in range(tiles)
        for part, start, length in (("products", 0, 600), ("softmax", 600, 300), ("other", 0, 1))
    ]


def test_a_record_has_medians_of_all_ctas_and_some_tiles_of_one():
    traced = timeline.spans([*trace(20), *trace(20, "CTA1"), *trace(20, "CTA2", slower=50)][::-1])
    found = timeline.summary(traced)
    assert found["cycles"] == {"products": pytest.approx(600), "softmax": pytest.approx(300)}
    assert found["tile_cycles"] == pytest.approx(1000)
    assert found["tiles"] == 3 * 2 * 20
    assert found["shown_cycles"] == 1000 * timeline.SHOWN
    by_consumer = {who: [s for s in found["spans"] if s["consumer"] == who] for who in (0, 1)}
    assert sum(map(len, by_consumer.values())) == len(found["spans"])
    # it begins with a softmax of the first; the other is half a tile later, cut off at both ends
    first, second = ([(s["part"], s["start"], s["end"]) for s in x] for x in by_consumer.values())
    assert first[:3] == [("softmax", 0, 300), ("products", 400, 1000), ("softmax", 1000, 1300)]
    assert second[:2] == [("products", 0, 500), ("softmax", 500, 800)]
    assert second[-1] == ("products", 4900, 5000)


def test_the_tiles_that_are_shown_are_neither_the_shortest_nor_the_longest():
    begins = [tile * 1000 + tile**2 for tile in range(12)]  # each takes longer than the last
    events = [event(part, at, 300) for at in begins for part in timeline.PARTS]
    found = timeline.summary(timeline.spans(events))
    lengths = [b - a for a, b in zip(begins, begins[timeline.SHOWN :], strict=False)]
    assert found["shown_cycles"] == lengths[len(lengths) // 2]


def test_only_tiles_that_all_consumers_noted_are_shown():
    late = [event(part, 1000 * tile, 300, warp) for warp, begin, end in ((0, 0, 30), (4, 11, 19))
            for tile in range(begin, end) for part in timeline.PARTS]  # fmt: skip
    found = timeline.summary(timeline.spans(late))
    rows = [sum(s["consumer"] == who for s in found["spans"]) for who in (0, 1)]
    assert rows[0] == rows[1] == timeline.SHOWN * len(timeline.PARTS)


def test_too_few_tiles_are_refused():
    with pytest.raises(ValueError, match="got no KV tiles"):
        timeline.summary({})
    with pytest.raises(ValueError, match=r"got \d KV tiles"):
        timeline.summary(timeline.spans(trace(timeline.SHOWN)))


def test_the_docs_say_what_a_tile_takes(tmp_path, monkeypatch):
    env, (_, shipped) = read(text.GPU / "hopper-timeline.jsonl", "timeline")
    shipped |= {"cycles": {"products": 600.0, "softmax": 300.0}, "tile_cycles": 1000.0}
    monkeypatch.setattr(text, "GPU", tmp_path)
    assert hopper.timeline().startswith("Not measured yet")
    write_run(tmp_path / "hopper-timeline.jsonl", env, [shipped])
    assert "| as shipped | 0.60 | 0.30 | 0.10 | 1.00 |" in hopper.timeline()


def test_it_says_why_it_can_not_trace_and_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    out = tmp_path / "timeline.jsonl"
    monkeypatch.setattr("stages.common.contract.why_not", lambda *_: "no such GPU here")
    with pytest.raises(SystemExit, match="stage 9: no such GPU here"):
        timeline.main(64, out)
    assert not out.exists()
    out.touch()
    monkeypatch.setattr("stages.common.contract.why_not", lambda *_: None)
    with pytest.raises(SystemExit, match="is there already"):
        timeline.main(64, out)
    assert not out.read_bytes()


def test_a_kernel_that_hangs_or_fails_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("stages.common.contract.why_not", lambda *_: None)
    monkeypatch.setattr("harness.records.environment.make_env", lambda *_: make_env([]))
    monkeypatch.setattr(timeline, "LIMIT", 0.0)
    out = tmp_path / "timeline.jsonl"
    with pytest.raises(SystemExit, match="in_turn: no trace in 0 s"):
        timeline.main(64, out)
    monkeypatch.setattr(timeline, "LIMIT", 60.0)
    monkeypatch.setattr(timeline, "__file__", "is-not-there.py")
    with pytest.raises(SystemExit, match="in_turn: exit code 2"):
        timeline.main(64, out)
    assert not out.exists()  # the next try may have the name
