"""The meters held to known truths: 20 ms read 20 ms, 200 MB read 200 MB."""

import subprocess

import pytest
from ladder_command import by_name, fakes, ladder

MB = 1 << 20
HELD = 200 * MB

HOLDER = """
#include <cstdlib>
#include <cstring>
extern "C" void hold(size_t size) {
    char *held = static_cast<char *>(std::malloc(size));
    std::memset(held, 1, size);
    asm volatile("" : : "r"(held) : "memory");  // or the compiler finds that nobody needs it
    std::free(held);
}
"""

HOLDS_CPP = """
import ctypes
import stages
from stages.contract import Stage

STAGE = Stage(number=91, name="holds_cpp", title="holds_cpp", idea="200 MB of C++'s for a moment")
library = ctypes.CDLL({path!r})
library.hold.argtypes = [ctypes.c_size_t]


def attend(q, k, v):
    library.hold({size})
    return stages.by_number(3).attend(q, k, v)
"""


@pytest.mark.timing
def test_a_sleep_of_20_ms_reads_20_ms(tmp_path):
    out = tmp_path / "run.jsonl"
    done = ladder("run", "--stages", 3, "--n", 16, *fakes("naps"), "--out", out)
    assert done.returncode == 0, done.stderr
    [nap] = by_name(out)["naps"]
    assert nap["time_ms"] == pytest.approx(20, rel=0.1)
    assert nap["first_call_ms"] == pytest.approx(20, rel=0.2)
    assert nap["samples"] >= 5
    assert 0 <= nap["time_iqr_ms"] < 2
    [stage3] = by_name(out)["torch_three_gemm"]
    assert stage3["time_ms"] < 2


@pytest.mark.timing
def test_200_mb_held_for_a_moment_read_200_mb(tmp_path):
    """By Python, torch and C++ alike; in a process that held 200 MB before it, too."""
    source, library = tmp_path / "hold.cpp", tmp_path / "libhold.so"
    source.write_text(HOLDER)
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
    rung = tmp_path / "holds_cpp.py"
    rung.write_text(HOLDS_CPP.format(path=str(library), size=HELD))
    out = tmp_path / "run.jsonl"
    done = ladder(
        "run", "--stages", 3, "--n", "16,32", "--memory", "1G",
        *fakes("held_before", "holds_python", "holds_torch"), "--stage", rung, "--out", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = by_name(out)
    for name in ("holds_python", "holds_torch", "holds_cpp"):
        for cell in cells[name]:
            assert cell["peak_bytes"] == pytest.approx(HELD, rel=0.1), name
            assert cell["memory_meter"] == "process-rss"
    # a high-water mark from before the call is not the call's
    for cell in cells["torch_three_gemm"] + cells["held_before"]:
        assert cell["peak_bytes"] < 5 * MB


@pytest.mark.timing
def test_the_inputs_are_no_part_of_the_peak(tmp_path):
    out = tmp_path / "run.jsonl"
    done = ladder("run", "--stages", 3, "--n", 200_000, "--nq", 1, "--out", out)
    assert done.returncode == 0, done.stderr
    [cell] = by_name(out)["torch_three_gemm"]
    inputs = 2 * 200_000 * 64 * 4
    assert inputs > 90 * MB
    assert cell["peak_bytes"] < 10 * MB


@pytest.mark.timing
def test_the_scores_of_stage_3_are_its_peak(tmp_path):
    """S and P, N x N each, are what stage 3 is known to hold."""
    out = tmp_path / "run.jsonl"
    done = ladder("run", "--stages", 3, "--n", 2048, "--out", out)
    assert done.returncode == 0, done.stderr
    [cell] = by_name(out)["torch_three_gemm"]
    matrix = 2048 * 2048 * 4
    # q k^T and its scaled copy, or the scaled copy and P: two at a time
    assert cell["peak_bytes"] == pytest.approx(2 * matrix, rel=0.15)
