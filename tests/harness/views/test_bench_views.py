"""The views of `ladder bench`, from records made up by hand."""

import csv
import io
import math

import matplotlib
import pytest

matplotlib.use("Agg")
from made_up import write_run
from made_up_bench import (
    RATES,
    SIZES,
    WORK,
    fell,
    make_bench,
    make_bench_env,
    make_run,
    text_of,
)

from harness.views import contest_groups, contest_plots, contests
from ladder import app

CEILING = {
    "kind": "ceiling", "what": "matmul", "device": "cuda", "size": 8192, "dtype": "float16",
    "precision": "float16", "threads": None, "value": 1100.0, "unit": "TFLOP/s", "time_ms": 1.0,
    "time_iqr_ms": 0.1, "samples": 9,
}  # fmt: skip


def below(lines, title):
    """The lines from the one that is `title` to the next empty pair of tables' end."""
    return lines[lines.index(title) :]


def row(lines, start):
    """The fields of the first line that starts so, what comes after the start."""
    found = next(line for line in lines if line.startswith(start))
    return found.removeprefix(start).split()


def test_time_rate_and_speed_up_at_each_n():
    records = make_run()
    lines = text_of(make_bench_env(records), records)
    assert all(len(line) <= 80 for line in lines)
    part = below(lines, "fwd, float16, d = 64, causal, b N = 16384, h = 32, cuda")
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


def test_a_peer_that_is_far_slower_has_its_row_and_the_page_stays_80_wide():
    records = make_run((3, 6, 100, 103, 104), sizes=(*SIZES, 32768))
    for record in records:
        if record["stage"] == 104:
            record["time_ms"] *= record["nk"] / 1024
    lines = text_of(make_bench_env(records), records)
    assert all(len(line) <= 80 for line in lines)
    part = below(lines, "fwd, float16, d = 64, no mask, b N = 16384..32768, h = 32, cuda")
    # what has no room in one table stands in the next: three ratios a size at the least
    ratios = [row(part[start:], "6 over SDPA, math ") for start in range(len(part))
              if part[start].startswith("6 over SDPA, math ")]  # fmt: skip
    found = [ratio for each in ratios for ratio in each][:7]
    assert found == ["34.4x", "68.8x", "138x", "275x", "550x", "1100x", "2200x"]
    assert row(part, "104 SDPA, math ")[0] == "ms"


def test_what_has_no_figure_says_why_and_is_in_no_ratio():
    records = [
        fell(3, "out-of-memory", "too large"), fell(7, "wrong", "max error 1, exact is 0.1"),
        fell(100, "skipped", "does not take this problem"),
        fell(6, "ok", "interpreted: no speed to compare", device="cpu") | {"mode": "interpreted"},
        make_bench(103, speedup={}),
    ]  # fmt: skip
    lines = text_of(make_bench_env(records), records)
    assert row(lines, "3 torch, three GEMMs ") == ["ms", "OOM"]
    assert row(lines, "7 Triton, training ") == ["ms", "wrong"]
    assert row(lines, "100 SDPA, flash ") == ["ms", "-"]
    assert row(lines, "6 Triton Flash 2 ") == ["ms", "interp."]
    assert "wrong #7 at 4096: max error 1, exact is 0.1" in lines
    assert "out-of-memory #3 at 4096: too large" in lines
    assert not any(" over " in line or line[-1:] == "x" for line in lines if line[:1].isdigit())


def test_the_newest_of_ours_stands_against_the_first_peer():
    """Of those that were timed; the yardstick is nobody's rival."""
    ours, flash, flex = (7, "triton_training"), (100, "sdpa_flash"), (103, "flex_attention")
    everyone = [make_bench(stage) for stage in (3, 6, 7, 100, 103)]
    assert contest_groups.rivals(everyone) == (ours, flash)
    refused = [everyone[0], fell(100, "skipped", "no"), make_bench(103), fell(6, "wrong", "off")]
    assert contest_groups.rivals(refused) == (None, flex)
    assert contest_groups.rivals(everyone[:1]) == (None, None)


def test_what_python_takes_to_launch_and_that_calls_were_replayed():
    records = make_run(sizes=(1024, 4096))
    launched = "launch"
    assert not any(launched in line for line in text_of(make_bench_env(records), records))
    records[0]["launch_ms"] = 0.0375
    lines = text_of(make_bench_env(records), records)
    rows = [line.split() for line in lines if launched in line]
    assert rows == [["3", "torch,", "three", "GEMMs", "launch", "37.5", "us", "-"]]
    assert not any("replayed" in line for line in lines)
    assert any("replayed" in line for line in text_of(make_bench_env(records, graph=True), records))


def test_memory_and_skipped_tiles():
    records = make_run(sizes=(1024, 4096))
    records[0]["peak_bytes"] = 3 << 30
    lines = text_of(make_bench_env(records), records)
    peaks = [line.split()[-4:] for line in lines if line.startswith("3 torch") and "peak" in line]
    assert peaks[0] == ["3", "GB", "64", "MB"]
    skipped = [line.split()[-3:] for line in lines if "skipped" in line]
    assert skipped == [["skipped", "50.0%", "50.0%"]]  # of the causal problems alone


def test_what_does_not_fit_into_the_page_goes_below():
    sizes = tuple(2**k for k in range(4, 18))
    records = [make_bench(stage, n) for n in sizes for stage in (6, 100)]
    lines = text_of(make_bench_env(records), records)
    assert all(len(line) <= 80 for line in lines)
    heads = [line.split()[1:] for line in lines if line.startswith("N ")]
    assert [n for head in heads[: len(heads) // 3] for n in head] == [str(n) for n in sizes]


def test_the_csv_holds_every_figure_and_the_machine():
    records = [*make_run(sizes=(512, 16384)), fell(7, "wrong", 'says "no", twice')]
    env = make_bench_env(records)
    rows = list(csv.DictReader(io.StringIO(contests.as_csv(env, records))))
    assert len(rows) == len(records)
    for row_, record in zip(rows, records, strict=True):
        for field, value in record.items():
            if field not in ("kind", "speedup"):
                assert row_.pop(field) == ("" if value is None else str(value))
        for peer in ("sdpa_flash", "flex_attention"):
            ratio = row_.pop(f"speedup_{peer}")
            assert ratio == str(record["speedup"].get(peer, ""))
        assert row_ == {
            "gpu": "NVIDIA H200", "driver": "580.1", "torch": env["torch"], "triton": "3.6.0",
            "python": env["python"], "date": env["date"],
        }  # fmt: skip
    assert contests.as_csv(env, []) == ""


# ---- the sources' tables


def table_of(suite, records, title, ceilings=()):
    """The header and rows of one of a suite's tables."""
    env = make_bench_env(records, suite=suite)
    [found] = [x for x in contests.source_tables(env, records, ceilings) if x.title == title]
    return tuple(column.header for column in found.columns), found.rows


SHORT = {"sizes": (512, 4096, 8192), "b": 2, "h": 4, "hk": 4}


def test_source_001_forward():
    head, body = table_of("001-forward", make_run(**SHORT), "forward, d = 64, causal")
    assert head[1:4] == ("#3, ms", "SDPA, flash, ms", "Triton Flash 2, ms")
    assert [line[0] for line in body] == ["512", "4096", "8192"]
    assert {line[-2] for line in body} <= {"1.37x", "1.38x"}  # 550 / 400
    assert [line[-1] for line in body] == ["-", "1.15-1.35x", "1.15-1.35x"]


def test_source_001_training_has_the_split_and_no_forward_only_stage():
    run = make_run((3, 7, 100), directions=("fwd", "bwd", "train"), **SHORT)
    head, body = table_of("001-train", run, "training, d = 64, no mask")
    assert head[4].startswith("Triton, training")
    for line, n in zip(body, SHORT["sizes"], strict=True):
        expected = [
            make_bench(stage, n, direction=direction, b=2, h=4, hk=4)["time_ms"]
            for stage in (100, 7) for direction in ("fwd", "bwd", "train")
        ]  # fmt: skip
        assert [float(text) for text in line[1:7]] == pytest.approx(expected, rel=5e-3)
    assert [line[-2:] for line in body] == [
        ["1.25x", "-"], ["1.25x", "-"], ["1.25x", "up to 1.17x"],
    ]  # fmt: skip
    # a run that was broken off has no backward pass yet
    early = [record for record in run if record["direction"] != "bwd"]
    assert table_of("001-train", early, "training, d = 64, no mask")[1][0][2] == ""


def test_source_001_memory():
    run = make_run((3, 7, 100), directions=("fwd", "train"), **SHORT)
    head, body = table_of("001-memory", run, "peak memory, forward, d = 64, no mask")
    assert body[1] == ["4096", "64 MB", "64 MB", "64 MB", "788 MB / 24 MB"]
    assert body[0][-1] == body[2][-1] == "-"
    _, body = table_of("001-memory", run, "peak memory, training, d = 64, causal")
    assert [line[-1] for line in body] == ["-", "-", "13% less than SDPA"]
    assert head == ("N", "#3", "SDPA, flash", "Triton, training", "source")


def test_source_004_with_the_share_of_the_measured_matrix_rate():
    run = make_run()
    head, body = table_of("004", run, "TFLOP/s, d = 64, no mask", [CEILING])
    assert head[4] == "of the matrix rate"
    assert [line[1:5] for line in body[:-1]] == [["80", "400", "550", "50%"]] * 5
    assert body[-1] == ["16384", "", "400", "550", "50%", "3-4 / 190 (61%)"]
    _, body = table_of("004", run, "TFLOP/s, d = 64, no mask")
    assert {line[4] for line in body} == {"-"}
    env = make_bench_env(run, suite="004")
    lines = text_of(env, run, [CEILING])
    assert any(line.startswith("Source 004: an A100") for line in lines)
    assert "6 Triton Flash 2 reaches 50%, 50%, 50%" in "\n".join(lines)


@pytest.mark.parametrize("suite", contests.SOURCE_TABLES)
def test_a_suite_where_little_was_measured_is_shown_all_the_same(suite):
    """Stage 3 alone, all wrong, or nothing but a peer: no figure is made up."""
    for records in ([make_bench(3)], [fell(6, "wrong", "max error")], [make_bench(100)],
                    [make_bench(7, direction="train")], make_run((6, 7, 103))):  # fmt: skip
        lines = text_of(make_bench_env(records, suite=suite), records)
        assert not any("nan" in line for line in lines)
    assert suite in contests.SOURCES


def test_every_suite_has_its_tables():
    from harness.runs.suites import names

    ours = {"decode", "decode-masks", "hopper-odd"}  # tables of their own
    sources = {name for name in names("bench") if name not in ours and not name.endswith("bf16")}
    assert sources == contests.SOURCES.keys() == contests.SOURCE_TABLES.keys()


# ---- plots


def lines_of(axis):
    """label -> N -> value of each contestant's line."""
    return {
        line.get_label(): dict(zip(*map(list, line.get_data()), strict=True))
        for line in axis.get_lines()
        if not line.get_label().startswith("_")
    }


def test_plots_of_a_forward_run(tmp_path, figures):
    records = make_run()
    written = contest_plots.plot(make_bench_env(records), records, tmp_path / "p", [CEILING])
    assert [path.name for path in written] == [
        "latency.png", "memory.png", "speedup.png", "tflops.png",
    ]  # fmt: skip
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert [axis.get_title() for axis in figures[path.name].axes][:2] == [
            f"fwd, float16, d = 64, {masked}, b N = 16384, h = 32, cuda"
            for masked in ("no mask", "causal")
        ]
    latency = figures["latency.png"].axes[1]
    assert latency.get_yscale() == "log" and "(ms)" in latency.get_ylabel()
    found = lines_of(latency)
    assert found["6 Triton Flash 2"] == {
        r["nk"]: r["time_ms"] for r in records if r["stage"] == 6 and r["causal"]
    }
    assert set(found["3 torch, three GEMMs"]) == set(SIZES) - {16384}  # it ran out of memory
    assert set(lines_of(figures["memory.png"].axes[0])["100 SDPA, flash"].values()) == {64.0}
    speedup = lines_of(figures["speedup.png"].axes[0])
    assert speedup == {"100 SDPA, flash": dict.fromkeys(SIZES, 550 / 400),
                       "103 FlexAttention": dict.fromkeys(SIZES, 550 / 520)}  # fmt: skip
    rates = figures["tflops.png"].axes[0]
    assert rates.get_ylim()[0] == 0 and rates.get_ylim()[1] > 550
    assert set(lines_of(rates)["6 Triton Flash 2"].values()) == {550.0}


@pytest.mark.slow
def test_the_second_axis_is_the_share_of_the_measured_matrix_rate(tmp_path, figures):
    records = make_run(sizes=(512, 1024))
    contest_plots.plot(make_bench_env(records), records, tmp_path, [CEILING])
    axis = figures["tflops.png"].axes[0]
    figures["tflops.png"].canvas.draw()
    [share] = axis.child_axes
    assert "matrix rate" in share.get_ylabel()
    assert share.get_ylim() == pytest.approx([100 * y / 1100 for y in axis.get_ylim()])
    contest_plots.plot(make_bench_env(records), records, tmp_path)
    assert figures["tflops.png"].axes[0].child_axes == []


def test_the_interpreted_and_the_wrong_are_in_no_plot(tmp_path, figures):
    interpreted = fell(6, "ok", "interpreted: no speed to compare", device="cpu")
    records = [interpreted | {"mode": "interpreted"}, fell(7, "wrong", "max error", device="cpu"),
               make_bench(3, device="cpu", peak_bytes=None, memory_meter=None)]  # fmt: skip
    written = contest_plots.plot(make_bench_env(records), records, tmp_path)
    assert [path.name for path in written] == ["latency.png", "tflops.png"]
    axis = figures["latency.png"].axes[0]
    assert set(lines_of(axis)) == {"3 torch, three GEMMs"}
    assert any("interpreted" in text.get_text() for text in axis.texts)
    assert "GFLOP/s" in figures["tflops.png"].axes[0].get_ylabel()


def bars_of(axis):
    """Heights of the plain and of the hatched bars, left to right."""
    bars = sorted(axis.patches, key=lambda bar: bar.get_x())
    plain = [bar.get_height() for bar in bars if not bar.get_hatch()]
    return plain, [bar.get_height() for bar in bars if bar.get_hatch()]


@pytest.mark.slow
@pytest.mark.parametrize("directions", [("fwd", "bwd", "train"), ("fwd", "train")])
def test_the_breakdown_of_training(tmp_path, figures, directions):
    """Backward as measured; where it wasn't, training less forward. The newest stage's is 1."""
    records = make_run((7, 100), sizes=(1024, 4096), directions=directions)
    written = contest_plots.plot(make_bench_env(records), records, tmp_path)
    assert "breakdown.png" in [path.name for path in written]
    axis = figures["breakdown.png"].axes[0]
    assert "Triton, training" in axis.get_ylabel()
    forward, backward = bars_of(axis)
    # work over rate: 2 of 7 products forward, 5 backward, at the rates made up above
    parts = {"fwd": 2 / WORK["fwd"], "bwd": 5 / WORK["bwd"], "train": 7 / WORK["train"]}
    rest = parts["bwd"] if "bwd" in directions else parts["train"] - parts["fwd"]
    own = parts["fwd"] + rest
    slower = RATES[7] / RATES[100]
    assert forward == pytest.approx([parts["fwd"] / own, slower * parts["fwd"] / own] * 2)
    assert backward == pytest.approx([rest / own, slower * rest / own] * 2)
    assert math.isclose(forward[0] + backward[0], 1.0)


def test_ceilings_of_another_machine_are_refused(tmp_path, monkeypatch, capsys):
    records = make_run(sizes=(512,))
    run = write_run(tmp_path / "bench.jsonl", make_bench_env(records), records)
    other = {**make_bench_env([]), "device_name": "NVIDIA L4"}
    roofs = write_run(tmp_path / "ceilings.jsonl", other, [CEILING])
    with pytest.raises(SystemExit) as ended:
        app.main(["bench", "--show", str(run), "--ceilings", str(roofs)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "measured on NVIDIA L4, the run on NVIDIA H200" in said and said.count("\n") == 1
    write_run(roofs, make_bench_env([]), [CEILING])
    with pytest.raises(SystemExit) as ended:
        app.main(["bench", "--show", str(run), "--ceilings", str(roofs)])
    assert ended.value.code == 0
    assert "6 Triton Flash 2 reaches 50% of the measured" in capsys.readouterr().out


def test_a_file_of_another_kind_is_no_bench(tmp_path, capsys):
    run = write_run(tmp_path / "ceilings.jsonl", make_bench_env([]), [CEILING])
    with pytest.raises(SystemExit) as ended:
        app.main(["bench", "--show", str(run)])
    assert ended.value.code == 2
    assert "is of kind 'ceiling', expected 'bench'" in capsys.readouterr().err
    assert not run.with_suffix(".csv").exists()
