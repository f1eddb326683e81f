"""The table, the picture and the paper cluster of several GPUs, from records made up by hand."""

import pytest
from made_up import make_cell, make_env, problem

from harness.problems import ring_cost
from harness.problems.cost import flops
from harness.views import cell_tables, plots, rings

HALF = {"dtype": "bfloat16", "precision": "bfloat16", "device": "cuda"}
NAMES = {10: "ring", 111: "ring_in_turn", 115: "ulysses", 116: "one_gpu",
         117: "context_parallel_allgather"}  # fmt: skip
LINK = {"link_gb_s": 250.0, "link_us": 50.0}


def cells(**changes):
    """A problem of two ranks: one GPU takes 6 ms, the ring 3 ms, and so on."""
    given = problem(h=16, hk=16, d=128, nq=32768, nk=32768, causal=True, world=2, **HALF)
    times = {10: 3.0, 111: 4.0, 115: 3.5, 116: 6.0, 117: 4.0}
    return [
        make_cell(
            stage, name, paired=True, **{**given.to_json(), "mode": "compiled",
            "flops": flops(given), "time_ms": times[stage], "rounds_ms": [times[stage]] * 3,
            "x_one_gpu": 6.0 / times[stage], **LINK, **changes},
        )
        for stage, name in NAMES.items()
    ]  # fmt: skip


def test_a_row_has_what_was_measured_beside_what_the_model_says():
    made = cells()
    [table] = rings.tables(make_env(made), made)
    ring, *_, one, torch = ([str(text) for text in row] for row in table.rows)
    # half of 6 ms, a merge of 64 MB in three passes at 3.35 TB/s, and three starts of kernels
    assert ring[2:4] == ["3 ms", "2.00"] and ring[4] == "3.08 ms"
    # 128 MB in 3 ms are 45 GB/s, of 250
    assert ring[5:7] == ["128 MB", "18%"]
    assert one[3:7] == ["1.00", "6 ms", "0 B", "-"] and torch[4:7] == ["-", "-", "-"]
    assert any("250 GB/s" in note for note in table.notes)
    assert "2 ranks" in table.title
    page = cell_tables.page(make_env(made), made)
    assert all(len(line) <= 80 for line in page.text(80).splitlines())
    assert "x one" in page.markdown()


def test_without_a_time_the_table_says_why():
    made = cells(
        time_ms=None, rounds_ms=None, x_one_gpu=None, reason="no speed: why", link_gb_s=None
    )
    [table] = rings.tables(make_env(made), made)
    for row in table.rows:
        assert [str(row[column]) for column in (2, 3, 4, 6)] == ["-"] * 4
    assert any("no speed: why" in note for note in table.notes)
    assert rings.machine_of(made) is None


def test_a_row_without_a_result_has_dashes_and_no_bars(tmp_path, figures):
    made = cells()
    gone = dict.fromkeys(("time_ms", "rounds_ms", "x_one_gpu", "peak_bytes", "err_f64_max"))
    made[2] |= gone | {"status": "skipped", "reason": "why"}
    [table] = rings.tables(make_env(made), made)
    assert [str(text) for text in table.rows[2]] == ["115", "ulysses", *["-"] * 7, "skipped"]
    assert table.rows[1][5] != "-" and any("why" in note for note in table.notes)
    plots.plot(make_env(made), made, tmp_path)
    [axis] = figures["ring.png"].axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["ring", "ring_in_turn"]


def test_the_picture_is_the_schedule(tmp_path, figures):
    made = cells()
    [path] = plots.plot(make_env(made), made, tmp_path)
    assert path.name == "ring.png"
    [axis] = figures["ring.png"].axes
    machine = rings.machine_of(made)
    given = problem(h=16, hk=16, d=128, nq=32768, nk=32768, causal=True, world=2, **HALF)
    drawn = [name for name in NAMES.values() if name in rings.DRAWN]
    spans = [span for name in drawn for span in ring_cost.schedule(given, machine, name)]
    bars = [bar.get_paths()[0].get_extents() for bar in axis.collections]
    assert [(bar.x0, bar.x1) for bar in bars] == [
        pytest.approx((1e3 * span.start, 1e3 * span.end)) for span in spans
    ]
    assert plots.plot(make_env(made), cells(link_gb_s=None), tmp_path) == []


def test_a_cluster_hides_more_over_faster_links_and_ulysses_needs_the_heads():
    given = problem(h=16, hk=16, d=128, **HALF)
    rows = [[str(text) for text in row] for row in rings.cluster_table(given).rows]
    assert [row[:2] for row in rows] == [
        [name, str(world)] for name in rings.LINKS for world in rings.CLUSTERS
    ]
    nvlink, network = float(rows[0][2]), float(rows[3][2])
    assert nvlink < network and float(rows[0][3]) > nvlink
    # 8 ranks have 2 of 16 heads each, 64 would have none
    assert [row[5] != "-" for row in rows] == [True, False, False] * 2
