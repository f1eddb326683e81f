"""Tables and plots of comparisons, from records made up by hand."""

import math

import pytest
from ladder_command import run_here
from made_up import (
    RATES,
    SIZES,
    WORK,
    fell,
    make_bench,
    make_bench_env,
    make_ceiling,
    make_run,
    text_of,
    write_run,
)

from harness.views import cell_tables, plots, ratios

CEILING = make_ceiling() | {"value": 1100.0}


def row(lines, start):
    """The fields of the first line that starts so, what comes after the start."""
    return next(line for line in lines if line.startswith(start)).removeprefix(start).split()


def test_time_rate_and_speed_up_at_each_n():
    records = make_run()
    lines = text_of(make_bench_env(records), records)
    assert all(len(line) <= 80 for line in lines)
    title = "d = 64, b N = 16384, h = 32, float16, normal input, causal, cuda"
    part = lines[lines.index(title) :]
    assert row(part, "N") == [str(n) for n in SIZES]
    times = [r["time_ms"] for r in records if r["stage"] == 6 and r["causal"]]
    for text, time in zip(row(part, "6 Triton Flash 2 ")[1:], times, strict=True):
        assert float(text) == pytest.approx(time, rel=5e-3)
    after = part[next(i for i, line in enumerate(part) if line.startswith("6 Triton")) + 1]
    assert after.split() == ["TFLOP/s"] + ["550"] * 6
    found = row(part, "6 over SDPA, flash ")
    assert {*found} <= {"1.37x", "1.38x"} and len(found) == 6  # 550 / 400
    assert row(part, "6 over FlexAttention ") == ["1.06x"] * 6
    assert not any(line.startswith(("3 over", "100 over")) for line in lines)


def test_columns_without_room_follow_below_in_text_and_stay_in_one_table_elsewhere():
    sizes = tuple(2**k for k in range(4, 18))
    records = [make_bench(stage, n) for n in sizes for stage in (6, 100)]
    page = cell_tables.page(make_bench_env(records), records)
    listed = [*map(str, sizes)]
    for width in range(50, 100):  # whatever is left for the last part
        lines = page.text(width).splitlines()
        assert all(len(line) <= width for line in lines)
        heads = [n for line in lines if line.startswith("N ") for n in line.split()[1:]]
        assert heads == listed * len(page.tables)
    assert [line.split(" | ")[2:] for line in page.markdown().splitlines() if "| N |" in line] == [
        [*listed[:-1], f"{listed[-1]} |"]
    ] * len(page.tables)


def test_what_has_no_figure_says_why_and_is_in_no_ratio():
    records = [
        fell(3, "out-of-memory", "too large"), fell(7, "wrong", "max error 1, exact is 0.1"),
        fell(100, "skipped", "does not take this problem"), make_bench(103),
        fell(6, "ok", "interpreted: no speed to compare", device="cpu", mode="interpreted"),
    ]  # fmt: skip
    lines = text_of(make_bench_env(records), records)
    assert row(lines, "3 torch, three GEMMs ") == ["ms", "OOM"]
    assert row(lines, "7 Triton, training ") == ["ms", "wrong"]
    assert row(lines, "100 SDPA, flash ") == ["ms", "-"]
    assert row(lines, "6 Triton Flash 2 ") == ["ms", "interp."]
    assert "wrong #7: max error 1, exact is 0.1" in lines
    assert "out-of-memory #3: too large" in lines
    assert not any(" over " in line or line[-1:] == "x" for line in lines if line[:1].isdigit())
    several = [fell(7, "wrong", "off", n=n) for n in (512, 1024)]
    assert "wrong #7 at 512, 1024: off" in text_of(make_bench_env(several), several)


def test_the_newest_of_ours_stands_against_the_first_peer():
    """Of those that were timed; the yardstick is nobody's rival."""
    ours, flash, flex = (7, "triton_training"), (100, "sdpa_flash"), (103, "flex_attention")
    everyone = [make_bench(stage) for stage in (3, 6, 7, 100, 103)]
    assert ratios.leaders(everyone) == (ours, flash)
    refused = [everyone[0], fell(100, "skipped", "no"), make_bench(103), fell(6, "wrong", "off")]
    assert ratios.leaders(refused) == (None, flex)
    assert ratios.leaders(everyone[:1]) == (None, None)


def test_memory_skipped_tiles_launches_and_replayed_calls():
    records = make_run(sizes=(1024, 4096))
    records[0]["peak_bytes"] = 3 << 30
    lines = text_of(make_bench_env(records), records)
    peaks = [line.split()[-4:] for line in lines if line.startswith("3 torch") and "peak" in line]
    assert peaks[0] == ["3", "GB", "64", "MB"]
    skipped = [line.split()[-3:] for line in lines if "skipped" in line]
    assert skipped == [["skipped", "50.0%", "50.0%"]]  # of the causal problems alone
    assert not any("launch" in line or "replayed" in line for line in lines)
    records[0]["launch_ms"] = 0.0375
    lines = text_of(make_bench_env(records, graph=True), records)
    rows = [line.split() for line in lines if "launch" in line]
    assert rows == [["3", "torch,", "three", "GEMMs", "launch", "37.5", "us", "-"]]
    assert any("replayed" in line for line in lines)


def test_the_share_of_the_measured_matrix_rate():
    run = make_run()
    lines = "\n".join(text_of(make_bench_env(run), run, [CEILING]))
    assert "6 Triton Flash 2 reaches 50%, 50%, 50%" in lines
    assert "reaches" not in "\n".join(text_of(make_bench_env(run), run))


@pytest.mark.parametrize(
    "records",
    [[make_bench(3)], [fell(6, "wrong", "off")], [make_bench(100)],
     [make_bench(7, direction="train")], make_run((6, 7, 103), (512,))],
)  # fmt: skip
def test_little_that_was_measured_is_shown_all_the_same(records):
    lines = text_of(make_bench_env(records), records, [CEILING])
    assert lines and not any("nan" in line for line in lines)


def test_ceilings_of_another_machine_are_refused_and_a_sources_claim_is_told(tmp_path, capsys):
    records = make_run(sizes=(512,))
    run = write_run(tmp_path / "bench.jsonl", make_bench_env(records, suite="004"), records)
    other = {**make_bench_env([]), "device_name": "NVIDIA L4"}
    roofs = write_run(tmp_path / "ceilings.jsonl", other, [CEILING])
    asked = ("bench", "--show", run, "--ceilings", roofs)
    code, _, said = run_here(capsys, *asked)
    assert code == 2 and said.count("\n") == 1
    assert "measured on NVIDIA L4, the run on NVIDIA H200" in said
    write_run(roofs, make_bench_env([]), [CEILING])
    code, out, _ = run_here(capsys, *asked)
    assert code == 0 and "6 Triton Flash 2 reaches 50% of the measured" in out
    assert "Source 004: an A100" in out


# ---- plots


def lines_of(axis):
    """label -> N -> value of each line."""
    return {
        line.get_label(): dict(zip(*map(list, line.get_data()), strict=True))
        for line in axis.get_lines()
        if not line.get_label().startswith("_")
    }


def test_plots_of_a_forward_run(tmp_path, figures):
    records = make_run()
    written = plots.plot(make_bench_env(records), records, tmp_path / "p", [CEILING])
    assert [path.stem for path in written] == ["latency", "memory", "speedup", "tflops"]
    found = lines_of(figures["latency.png"].axes[1])
    assert found["6 Triton Flash 2"] == {
        r["nk"]: r["time_ms"] for r in records if r["stage"] == 6 and r["causal"]
    }
    assert set(found["3 torch, three GEMMs"]) == set(SIZES) - {16384}  # it ran out of memory
    assert set(lines_of(figures["memory.png"].axes[0])["100 SDPA, flash"].values()) == {64.0}
    speedup = lines_of(figures["speedup.png"].axes[0])
    assert speedup == {"100 SDPA, flash": dict.fromkeys(SIZES, 550 / 400),
                       "103 FlexAttention": dict.fromkeys(SIZES, 550 / 520)}  # fmt: skip
    rates = figures["tflops.png"].axes[0]
    assert set(lines_of(rates)["6 Triton Flash 2"].values()) == {550.0}
    figures["tflops.png"].canvas.draw()
    [share] = rates.child_axes
    assert share.get_ylim() == pytest.approx([100 * y / 1100 for y in rates.get_ylim()])


def test_the_interpreted_and_the_wrong_are_in_no_plot(tmp_path, figures):
    interpreted = fell(6, "ok", "interpreted: no speed", device="cpu", mode="interpreted")
    records = [interpreted, fell(7, "wrong", "max error", device="cpu"),
               make_bench(3, device="cpu", peak_bytes=None, memory_meter=None)]  # fmt: skip
    written = plots.plot(make_bench_env(records), records, tmp_path)
    assert [path.name for path in written] == ["latency.png", "tflops.png"]
    assert set(lines_of(figures["latency.png"].axes[0])) == {"3 torch, three GEMMs"}
    assert "GFLOP/s" in figures["tflops.png"].axes[0].get_ylabel()


@pytest.mark.parametrize("directions", [("fwd", "bwd", "train"), ("fwd", "train")])
def test_the_breakdown_of_training(tmp_path, figures, directions):
    """Backward as measured; where it wasn't, training less forward. The newest stage's is 1."""
    records = make_run((7, 100), sizes=(1024, 4096), directions=directions)
    written = plots.plot(make_bench_env(records), records, tmp_path)
    assert "breakdown.png" in [path.name for path in written]
    bars = sorted(figures["breakdown.png"].axes[0].patches, key=lambda bar: bar.get_x())
    forward = [bar.get_height() for bar in bars if not bar.get_hatch()]
    backward = [bar.get_height() for bar in bars if bar.get_hatch()]
    # work over rate: 2 of 7 products forward, 5 backward, at the rates made up above
    parts = {"fwd": 2 / WORK["fwd"], "bwd": 5 / WORK["bwd"], "train": 7 / WORK["train"]}
    rest = parts["bwd"] if "bwd" in directions else parts["train"] - parts["fwd"]
    own = parts["fwd"] + rest
    slower = RATES[7] / RATES[100]
    assert forward == pytest.approx([parts["fwd"] / own, slower * parts["fwd"] / own] * 2)
    assert backward == pytest.approx([rest / own, slower * rest / own] * 2)
    assert math.isclose(forward[0] + backward[0], 1.0)
