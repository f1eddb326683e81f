"""The roofline, from records made up by hand."""

import pytest
from ladder_command import in_turn
from made_up import make_ceiling, make_cell, make_env, write_run

from harness.views import roofline
from harness.views.roofline import Panel, Point, Roof, panels, place, roof_of, share

# 100 TFLOP/s and 4 TB/s: they meet at 25 FLOP/byte
GPU = {"device": "cuda", "memory_meter": "cuda-allocator", "mode": "compiled"}
HALF = {"dtype": "float16", "precision": "float16"}


def ceiling(value, what="matmul", **changes):
    """A ceiling record of that value, in 10^12 a second."""
    return make_ceiling(what, **changes) | {"value": value}


def gpu_ceilings():
    return [
        ceiling(100.0, **HALF),
        ceiling(50.0, dtype="float32", precision="ieee"),
        ceiling(4.0, "copy"),
    ]


def gpu_run():
    """Stage 3, flat at 10 FLOP/byte, and stage 5, growing: in float16 and IEEE float32."""
    cells = []
    for kind in (HALF, {"dtype": "float32", "precision": "ieee"}):
        for n in (1024, 4096):
            three = {"flops": 10 * n * 10**6, "hbm_bytes": n * 10**6, "time_ms": n / 2048}
            online = {"flops": n * 10**9, "hbm_bytes": 10**9, "time_ms": n / 25.0 / 1024}
            cells += [
                make_cell(3, "three", n=n, **GPU, **kind, **three),
                make_cell(5, "online", n=n, **GPU, **kind, **online),
            ]
    return cells


def gpu_env(cells, **changes):
    return make_env(cells, device="cuda", device_name="a GPU", **changes)


def test_a_roof_is_the_lower_of_its_two_parts():
    roof = Roof(matrix=100.0, bandwidth=4.0)
    assert roof.ridge == 25.0
    assert [roof.at(x) for x in (1.0, 10.0, 25.0, 1000.0)] == [4.0, 40.0, 100.0, 100.0]
    assert [Roof(None, 4.0).at(x) for x in (10.0, 1000.0)] == [40.0, 4000.0]
    assert Roof(100.0, None).at(1.0) == 100.0
    assert Roof(None, None).at(1.0) is Roof(None, 4.0).ridge is Roof(100.0, None).ridge is None


def test_a_point_is_flops_over_bytes_and_over_time():
    cell = make_cell(flops=6_000_000_000, hbm_bytes=200_000_000, time_ms=2.0)
    point = place(cell)
    assert (point.x, point.y) == (30.0, 3.0)  # 6 GFLOP in 2 ms are 3 TFLOP/s
    assert share(point, Roof(100.0, 4.0)) == 3.0 / 100.0
    assert share(point, Roof(1000.0, 4.0)) == 3.0 / 120.0
    assert share(point, Roof(None, 4.0)) is share(point, Roof(100.0, None)) is None


@pytest.mark.parametrize(
    "changes",
    [{"status": "wrong"}, {"mode": "interpreted"}, {"paired": True},
     {"status": "skipped", "time_ms": None}, {"time_ms": None}, {"direction": "train"},
     {"device": "cuda", "memory_meter": "process-rss"}, {"flops": 0}],
)  # fmt: skip
def test_a_cell_that_is_not_comparable_has_no_place(changes):
    assert place(make_cell()) is not None
    assert place(make_cell(**GPU)) is not None
    assert place(make_cell(**changes)) is None


def test_the_roof_is_of_the_cell_s_own_dtype_precision_device_and_threads():
    ceilings = [
        ceiling(1.0, dtype="float32", precision="tf32"),
        ceiling(2.0, dtype="float32", precision="ieee"),
        ceiling(3.0, **HALF),
        ceiling(4.0, "copy"),
        ceiling(5.0, dtype="float32", precision="ieee", device="cpu", threads=1),
        ceiling(6.0, dtype="float32", precision="ieee", device="cpu", threads=8),
        ceiling(7.0, "copy", device="cpu", threads=1),
        ceiling(8.0, "copy", device="cpu", threads=8),
    ]
    expected = {
        ("cuda", "float32", "tf32"): Roof(1.0, 4.0),
        ("cuda", "float32", "ieee"): Roof(2.0, 4.0),
        ("cuda", "float16", "float16"): Roof(3.0, 4.0),
        ("cuda", "bfloat16", "bfloat16"): Roof(None, 4.0),
        # stages are timed with one thread of a CPU
        ("cpu", "float32", "ieee"): Roof(5.0, 7.0),
        ("cpu", "float64", "float64"): Roof(None, 7.0),
    }
    for order in (ceilings, ceilings[::-1]):
        for (device, dtype, precision), roof in expected.items():
            cell = make_cell(device=device, dtype=dtype, precision=precision)
            assert roof_of(cell, order) == roof
    assert roof_of(make_cell(), ceilings[:4]) == Roof(None, None)


def with_products(cell, made):
    return cell | {"products": made}


def test_products_that_stand_for_one_lower_the_roof_of_theirs():
    ceilings = [ceiling(60.0, dtype="bfloat16", precision="bfloat16"), *gpu_ceilings()]
    cell = make_cell(**GPU)
    assert roof_of(with_products(cell, "bf16x6"), ceilings) == Roof(10.0, 4.0)
    for usual in (cell, with_products(cell, "ieee"), with_products(cell, None)):
        assert roof_of(usual, ceilings) == Roof(50.0, 4.0)


def test_each_family_has_a_panel():
    cells = [
        *gpu_run(),
        make_cell(3, "three", n=1024, d=128, **GPU, **HALF),
        make_cell(3, "three", n=1024, **GPU, precision="tf32"),
        make_cell(5, "online", n=1024, **GPU, dtype="bfloat16", precision="bfloat16",
                  status="wrong"),
    ]  # fmt: skip
    found = panels(cells, gpu_ceilings())
    assert [[*panel.roofs] for panel in found] == [
        ["float16"], ["float32 ieee"], ["float16"], ["float32 tf32"],
    ]  # fmt: skip
    assert [panel.top.matrix for panel in found] == [100.0, 50.0, 100.0, None]
    assert {panel.top.bandwidth for panel in found} == {4.0}
    shown = [[(p.stage[0], p.cell["nk"], p.cell["d"]) for p in panel.points] for panel in found]
    four = [(3, 1024, 64), (3, 4096, 64), (5, 1024, 64), (5, 4096, 64)]
    assert shown == [four, four, [(3, 1024, 128)], [(3, 1024, 64)]]
    assert panels([make_cell(status="wrong")], gpu_ceilings()) == []


def drawn_lines(axis):
    """(x, y) -> style of each line that has points."""
    return {
        (tuple(map(float, line.get_xdata())), tuple(map(float, line.get_ydata()))): (
            line.get_color(), line.get_marker(), line.get_linestyle(),
        )
        for line in axis.get_lines()
        if len(line.get_xdata())
    }  # fmt: skip


def test_the_picture_is_the_records(tmp_path, figures):
    cells = gpu_run()
    found = panels(cells, gpu_ceilings())
    path = roofline.draw(gpu_env(cells), found, tmp_path / "plots")
    assert path == tmp_path / "plots" / "roofline.png"
    half, single = figures["roofline.png"].axes
    for axis in (half, single):
        assert axis.get_xscale() == axis.get_yscale() == "log"
        assert "FLOP per HBM byte" in axis.get_xlabel() and "TFLOP/s" in axis.get_ylabel()
    lines = drawn_lines(half)
    three = lines.pop(((10.0, 10.0), (20.48, 20.48)))  # 10.24 GFLOP in half a ms
    online = lines.pop(((1024.0, 4096.0), (25.0 * 1024, 25.0 * 1024)))
    assert three[0] != online[0] and three[1] != online[1]  # told apart in grey too
    low, high = half.get_xlim()
    assert set(lines) == {((low, 25.0), (4.0 * low, 100.0)), ((25.0, high), (100.0, 100.0))}
    labels = [text.get_text() for text in figures["roofline.png"].legends[0].get_texts()]
    assert labels == ["3 three", "5 online"]


def test_a_cpu_is_drawn_in_gflops(tmp_path, figures):
    cells = [make_cell(flops=6_000_000, hbm_bytes=200_000, time_ms=2.0)]
    roofs = [
        ceiling(0.1, dtype="float32", precision="ieee", device="cpu", threads=1),
        ceiling(0.02, "copy", device="cpu", threads=1),
    ]
    roofline.draw(make_env(cells), panels(cells, roofs), tmp_path)
    [axis] = figures["roofline.png"].axes
    assert "GFLOP/s" in axis.get_ylabel()
    low, high = axis.get_xlim()
    assert set(drawn_lines(axis)) == {
        ((30.0,), (3.0,)),  # 6 MFLOP in 2 ms
        ((low, 5.0), (1e3 * 0.02 * low, 100.0)),
        ((5.0, high), (100.0, 100.0)),
    }


def files(tmp_path, cells, roofs, **changes):
    run = write_run(tmp_path / "run.jsonl", gpu_env(cells), cells)
    return run, write_run(tmp_path / "ceilings.jsonl", gpu_env([]) | changes, roofs)


@pytest.mark.slow
def test_the_command_prints_the_table_and_draws(tmp_path):
    cells = [*gpu_run(), make_cell(0, "scalar", n=64, device="cuda", flops=12345)]
    run, roofs = files(tmp_path, cells, gpu_ceilings())
    done = in_turn("roofline", run, "--ceilings", roofs, "--out", tmp_path / "plots")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    # 20.5 of 40 TFLOP/s at 10 FLOP/byte, as far as memory lets it
    assert ["3", "three", "1024", "10", "20.5", "TFLOP/s", "51%", "memory"] in rows
    assert "roof of float16: 100 TFLOP/s, 4 TB/s, they meet at 25 FLOP/byte" in done.stdout
    assert "roof of float32 ieee: 50 TFLOP/s" in done.stdout
    assert "scalar" not in done.stdout  # a CPU stage has no place under a GPU's roof
    assert "above 100%" in done.stdout  # stage 5 is made up to be
    assert (tmp_path / "plots" / "roofline.png").is_file()
    dark = in_turn("roofline", run, "--ceilings", roofs, "--out", tmp_path / "plots", "--dark")
    assert dark.returncode == 0 and (tmp_path / "plots" / "roofline-dark.png").is_file()
    assert "roofline-dark.png" in dark.stdout


def test_the_command_says_what_it_has_no_roof_for(tmp_path):
    cells = [make_cell(n=1024, **GPU, precision="tf32", flops=10**9, hbm_bytes=10**8)]
    run, roofs = files(tmp_path, cells, gpu_ceilings())
    done = in_turn("roofline", run, "--ceilings", roofs, "--out", tmp_path)
    assert done.returncode == 0
    said = "no matrix rate for float32 tf32 among the ceilings: the bandwidth roof alone"
    assert said in done.stdout
    assert ["3", "torch_three_gemm", "1024", "10", "1", "TFLOP/s", "-", "-"] in [
        line.split() for line in done.stdout.splitlines()
    ]
    assert "%" not in done.stdout.replace("% of the roof", "")


def test_the_ends_of_a_line_are_named_first():
    three = [Point(make_cell(n=n), float(n), 1.0) for n in (1, 2, 3, 4)]
    panel = Panel("cpu", {}, [*three, Point(make_cell(5, "online", n=1), 1.0, 1.0)])
    assert [point.cell["nk"] for point in roofline.by_weight(panel)] == [1, 4, 1, 2, 3]
