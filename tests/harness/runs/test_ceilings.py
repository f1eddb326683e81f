"""What a machine can do at the best: what is measured, with what inputs, and what is recorded."""

import time
from dataclasses import asdict

import pytest
import torch
from ladder_command import run_here
from made_up import make_ceiling, make_env, write_run

from harness.measures import bandwidth
from harness.measures.timing import time_call
from harness.records import jsonl, schema
from harness.records.units import show_rate
from harness.runs import ceilings
from harness.runs.ceilings import Ceiling, last_level_cache, plan, prepare
from harness.views import machine

SMALL = [
    Ceiling("matmul", "cpu", 64, "float32", "ieee", 1),
    Ceiling("matmul", "cpu", 48, "float64", "float64", 2),
    Ceiling("copy", "cpu", 1 << 16, threads=1),
]


def test_the_rate_is_the_work_over_the_time():
    """10^9 multiplications and as many additions in 2 ms are a TFLOP/s."""
    product = make_ceiling(size=1000, time_ms=2.0)
    assert (product["value"], product["unit"]) == (1.0, "TFLOP/s")
    # 4 GB read and 4 GB written in 2 ms are 4 TB/s
    copy = make_ceiling("copy", size=8_000_000_000, time_ms=2.0)
    assert (copy["value"], copy["unit"]) == (4.0, "TB/s")
    assert copy["dtype"] is copy["precision"] is copy["threads"] is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"what": "sort"}, "what"), ({"unit": "GB/s"}, "unit"), ({"value": None}, "value"),
     ({"time_ms": None}, "time_ms"), ({"threads": 1.5}, "threads"), ({"device": "tpu"}, "device"),
     ({"dtype": "int8"}, "dtype"), ({"size": "8192"}, "size"), ({"extra": 1}, "extra")],
)  # fmt: skip
def test_the_schema_of_a_ceiling_is_kept(changes, why):
    with pytest.raises(schema.BadRecord, match=why):
        schema.check_record(make_ceiling() | changes)


def test_the_ceilings_of_a_gpu():
    planned = plan("cuda")
    products = [(c.dtype, c.precision) for c in planned if c.what == "matmul"]
    assert sorted(products) == [
        ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "ieee"), ("float32", "tf32"),
    ]  # fmt: skip
    assert {c.size for c in planned if c.what == "matmul"} == {8192}
    [copy] = [c for c in planned if c.what == "copy"]
    assert copy.size >= 4_000_000_000  # several GB: no cache holds a part of it that matters
    [read] = [c for c in planned if c.what == "read"]
    assert read.size >= 1 << 30 and read.size % (4 * 8192) == 0
    assert all((c.device, c.threads) == ("cuda", None) for c in planned)


@pytest.mark.parametrize(("cores", "threads"), [(1, [1]), (2, [1, 2]), (64, [1, 64])])
def test_the_ceilings_of_a_cpu_with_one_thread_and_all(monkeypatch, cores, threads):
    monkeypatch.setattr(ceilings.environment, "cores", lambda: cores)
    for each in threads:
        own = [c for c in plan("cpu") if c.threads == each]
        products = [(c.dtype, c.precision, c.size) for c in own if c.what == "matmul"]
        assert products == [("float32", "ieee", 2048), ("float64", "float64", 2048)]
        assert [c.what for c in own].count("copy") == 1
    assert {c.threads for c in plan("cpu")} == set(threads)


@pytest.mark.parametrize("cache", [None, 1 << 20, 512 << 20])
def test_a_copy_on_a_cpu_is_larger_than_the_caches(monkeypatch, cache):
    monkeypatch.setattr(ceilings, "last_level_cache", lambda: cache)
    monkeypatch.setattr(ceilings.environment, "memory_bytes", lambda: 1 << 40)
    for copy in (c for c in plan("cpu") if c.what == "copy"):
        read = copy.size // 2
        assert read >= 4 * (cache or 32 << 20)
        assert read % 4 == 0


def test_a_copy_leaves_a_small_machine_its_memory(monkeypatch):
    monkeypatch.setattr(ceilings.environment, "memory_bytes", lambda: 1 << 30)
    assert {c.size for c in plan("cpu") if c.what == "copy"} == {2 << 27}


def test_the_last_level_cache_is_all_of_them(tmp_path):
    """Four CPUs, two L3 caches that two CPUs share each; the smaller levels don't count."""

    def write(cpu, index, level, shared, size):
        cache = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
        cache.mkdir(parents=True)
        for name, text in (("level", level), ("shared_cpu_list", shared), ("size", size)):
            (cache / name).write_text(f"{text}\n")

    assert last_level_cache(tmp_path) is None
    for cpu in range(4):
        write(cpu, 0, 1, cpu, "48K")
        write(cpu, 2, 2, cpu, "1024K")
        write(cpu, 3, 3, "0-1" if cpu < 2 else "2-3", "32768K")
    (tmp_path / "cpufreq" / "cache" / "index3").mkdir(parents=True)
    assert last_level_cache(tmp_path) == 2 * (32 << 20)
    (tmp_path / "cpu0" / "cache" / "index3" / "size").write_text("much\n")
    (tmp_path / "cpu1" / "cache" / "index3" / "size").unlink()
    assert last_level_cache(tmp_path) == 32 << 20


@pytest.mark.parametrize("threads", [1, 2])
def test_a_call_is_timed_with_its_threads(monkeypatch, one_thread, threads):
    """torch's Timer sets one thread around what it times."""
    seen = []
    multiply = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda *a, **k: (seen.append(torch.get_num_threads()), multiply(*a, **k))[1]
    )
    time_call(prepare(Ceiling("matmul", "cpu", 8, "float32", "ieee", threads)), "cpu", 1e-3)
    assert set(seen) == {threads}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_product_is_of_two_random_matrices(monkeypatch, one_thread, dtype):
    given = []
    multiply = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda a, b, out: (given.extend([a, b]), multiply(a, b, out=out))[1]
    )
    product = prepare(Ceiling("matmul", "cpu", 128, dtype, dtype, 1))()
    a, b = given
    assert a.shape == b.shape == product.shape == (128, 128)
    assert a.dtype == b.dtype == product.dtype == getattr(torch, dtype)
    for x in (a, b):  # zeros, or a constant, run faster on a GPU
        assert x.unique().numel() > 0.9 * x.numel()
        assert (x < 0).any() and (x > 0).any()
    assert not torch.equal(a, b)
    assert torch.equal(product, multiply(a, b))


def test_the_copy_moves_half_its_bytes_each_way(monkeypatch, one_thread):
    made = []
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x: (made.append(x), empty_like(x))[1])
    call = prepare(Ceiling("copy", "cpu", 1 << 16, threads=1))
    [source] = made
    target = call()
    assert target.data_ptr() != source.data_ptr()
    assert torch.equal(target, source)
    assert source.nbytes + target.nbytes == 1 << 16
    assert source.unique().numel() > 0.9 * source.numel()


@pytest.mark.slow
def test_each_ceiling_is_measured_and_a_failure_costs_its_own():
    bad = Ceiling("matmul", "cpu", -1, "float32", "ieee", 1)
    first, why, *rest = ceilings.measure_ceilings([SMALL[0], bad, *SMALL[1:]], seconds=0.01)
    assert "RuntimeError" in why and "-1" in why
    for ceiling, record in zip(SMALL, [first, *rest], strict=True):
        schema.check_record(record)
        assert {name: record[name] for name in asdict(ceiling)} == asdict(ceiling)
        work = 2 * ceiling.size**3 if ceiling.what == "matmul" else ceiling.size
        assert record["value"] == work / (record["time_ms"] * 1e9)
        assert record["samples"] >= 1 and record["time_ms"] > 0


def test_every_way_to_read_looks_at_every_number():
    """One NaN, wherever it is, is in the sum; more tiles than programs, and fewer."""
    for tiles in (1, 7, 20):
        x = torch.randn(8192 * tiles)
        found = bandwidth.methods(x)
        assert len(found) == 1 + len(bandwidth.SHAPES)
        for call in found.values():
            torch.testing.assert_close(
                call().sum().double(), x.double().sum(), atol=1e-2, rtol=1e-4
            )
    for place in (0, 8191, 8192 * 9 + 5, 8192 * 20 - 1):
        bad = x.clone()
        bad[place] = float("nan")
        assert all(call().sum().isnan() for call in bandwidth.methods(bad).values())


def test_the_record_of_reading_says_which_way_was_the_fastest(monkeypatch):
    size = 8192 * 4 * 5
    [record] = ceilings.measure_ceilings([Ceiling("read", "cpu", size)], seconds=0.01)
    schema.check_record(record)
    assert record["how"] in bandwidth.methods(torch.zeros(8192))
    assert record["value"] == size / (record["time_ms"] * 1e9) and record["unit"] == "TB/s"
    assert f"read, 160 KB ({record['how']})" == machine.ceiling_title(record)
    calls = {"slow": lambda: time.sleep(0.01), "quick": lambda: None}
    monkeypatch.setattr(bandwidth, "methods", lambda x: calls)
    assert bandwidth.fastest(64, "cpu") == ("quick", calls["quick"])


def test_ceilings_from_before_there_were_several_ways_are_read(tmp_path):
    record = make_ceiling("copy")
    older = {name: value for name, value in record.items() if name != "how"}
    path = write_run(tmp_path / "ceilings.jsonl", make_env([]), [older])
    assert jsonl.read(path, "ceiling")[1] == [record] and record["how"] is None


@pytest.mark.timing
def test_a_product_of_twice_the_side_takes_eight_times_as_long():
    """The rate is that of the work: about the same at both sizes, though not at all the same."""
    sides = (512, 1024)
    asked = [Ceiling("matmul", "cpu", side, "float64", "float64", 1) for side in sides]
    small, large = ceilings.measure_ceilings(asked, seconds=0.5)
    assert 4 < large["time_ms"] / small["time_ms"] < 16
    assert 0.5 < large["value"] / small["value"] < 2


@pytest.fixture
def measure(monkeypatch, capsys):
    """`ladder ceilings` of those given, in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # --device cpu sets it

    def run(planned, out):
        monkeypatch.setattr(ceilings, "plan", lambda device: planned)
        return run_here(capsys, "ceilings", "--device", "cpu", "--out", out)

    return run


@pytest.mark.slow
def test_the_command_records_and_shows(measure, tmp_path):
    out = tmp_path / "ceilings.jsonl"
    code, shown, progress = measure(SMALL, out)
    assert code == 0
    env, records = jsonl.read(out, kind="ceiling")
    assert (env["kind"], env["device"], env["plan"], env["rungs"]) == ("env", "cpu", [], [])
    assert [(r["what"], r["size"], r["threads"]) for r in records] == [
        ("matmul", 64, 1), ("matmul", 48, 2), ("copy", 1 << 16, 1),
    ]  # fmt: skip
    for record in records:
        assert show_rate(record["value"], record["unit"]) in shown
    for title in ("float32 product, 64^3, 1 thread ", "float64 product, 48^3, 2 threads",
                  "copy, 32 KB, 1 thread"):  # fmt: skip
        assert title in shown and title.strip() in progress
    assert env["device_name"] in shown and str(out) in shown
    # a run's commands say that it is no run
    with pytest.raises(schema.BadRecord, match="line 2 is of kind 'ceiling', expected 'cell'"):
        jsonl.read(out)


def test_a_ceiling_that_fails_is_said_and_the_exit_code_is_1(measure, tmp_path):
    bad = Ceiling("matmul", "cpu", -1, "float32", "ieee", 1)
    out = tmp_path / "ceilings.jsonl"
    code, _, said = measure([bad, SMALL[0]], out)
    assert code == 1
    assert "[1/2]" in said and "failed: RuntimeError" in said
    assert len(jsonl.read(out, kind="ceiling")[1]) == 1


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(790.4, "TFLOP/s", "790 TFLOP/s"), (4.264, "TB/s", "4.26 TB/s"), (0.0374, "TB/s", "37.4 GB/s"),
     (1.0, "TFLOP/s", "1 TFLOP/s"), (0.9997, "TFLOP/s", "1 TFLOP/s"), (1234.0, "TB/s", "1230 TB/s"),
     (4.09e-5, "TFLOP/s", "40.9 MFLOP/s"), (2e-10, "TFLOP/s", "0.2 kFLOP/s")],
)  # fmt: skip
def test_rates_for_people(value, unit, text):
    assert show_rate(value, unit) == text
