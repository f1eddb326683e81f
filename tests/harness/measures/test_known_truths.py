"""The meters held to known truths: 20 ms read 20 ms, 200 MB read 200 MB."""

import subprocess

import pytest
from ladder_command import RUN, by_name, fakes, in_turn

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


HOLDS_TWICE = """
import torch
import stages
from stages.contract import Stage

STAGE = Stage(number=92, name="holds_twice", title="holds_twice", idea="the same memory twice",
              gradients=True)


class Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o):
        hold()
        return o.clone()

    @staticmethod
    def backward(ctx, dO):
        hold()
        return dO


def hold():
    pieces = [torch.ones(16384) for _ in range({size} // 65536)]


def attend(q, k, v):
    return Holds.apply(stages.by_number(3).attend(q, k, v))
"""


@pytest.mark.timing
def test_a_sleep_of_20_ms_reads_20_ms(tmp_path):
    out = tmp_path / "run.jsonl"
    done = in_turn(*RUN, "--stages", 3, "--n", 16, *fakes("naps"), "--out", out, briefly=False)
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
    stage = tmp_path / "holds_cpp.py"
    stage.write_text(HOLDS_CPP.format(path=str(library), size=HELD))
    out = tmp_path / "run.jsonl"
    done = in_turn(
        *RUN, "--stages", 3, "--n", "16,32", "--memory", "1G",
        *fakes("held_before", "holds_python", "holds_torch"), "--stage", stage, "--out", out,
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
    done = in_turn("run", "--stages", 3, "--n", 200_000, "--nq", 1, "--out", out)
    assert done.returncode == 0, done.stderr
    [cell] = by_name(out)["torch_three_gemm"]
    inputs = 2 * 200_000 * 64 * 4
    assert inputs > 90 * MB
    assert cell["peak_bytes"] < 10 * MB


@pytest.mark.timing
def test_the_scores_of_stage_3_are_its_peak(tmp_path):
    """S and P, N x N each, are what stage 3 is known to hold."""
    out = tmp_path / "run.jsonl"
    done = in_turn("run", "--stages", 3, "--n", 2048, "--out", out)
    assert done.returncode == 0, done.stderr
    [cell] = by_name(out)["torch_three_gemm"]
    matrix = 2048 * 2048 * 4
    # q k^T and its scaled copy, or the scaled copy and P: two at a time
    assert cell["peak_bytes"] == pytest.approx(2 * matrix, rel=0.15)


@pytest.mark.timing
@pytest.mark.parametrize(("direction", "matrices"), [("bwd", 2), ("train", 3)])
def test_what_a_backward_pass_of_stage_3_holds_is_its_peak(tmp_path, direction, matrices):
    """dP and dS, N x N each, above what the forward pass has left (P); with it, P too.

    What the forward pass took and gave back must not hide them.
    """
    out = tmp_path / "run.jsonl"
    done = in_turn("run", "--mode", direction, "--stages", 3, "--n", 2048, "--out", out)
    assert done.returncode == 0, done.stderr
    [cell] = by_name(out)["torch_three_gemm"]
    assert cell["memory_meter"] == "process-rss"
    assert cell["peak_bytes"] == pytest.approx(matrices * 2048 * 2048 * 4, rel=0.15)


@pytest.mark.timing
def test_memory_that_a_forward_pass_gave_back_is_the_backward_passs_own(tmp_path):
    """200 MB in small pieces, which the C library keeps when they're freed, then again."""
    stage = tmp_path / "holds_twice.py"
    stage.write_text(HOLDS_TWICE.format(size=HELD))
    out = tmp_path / "run.jsonl"
    done = in_turn(
        *RUN, "--mode", "bwd", "--stages", 3, "--n", 32, "--memory", "1G", "--stage", stage,
        "--out", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [cell] = by_name(out)["holds_twice"]
    assert cell["peak_bytes"] == pytest.approx(HELD, rel=0.1)


@pytest.mark.timing
def test_a_backward_call_is_timed_without_its_forward_pass(tmp_path):
    """A forward pass that sleeps 20 ms costs training all of them, and a backward call none."""
    for direction in ("bwd", "train"):
        out = tmp_path / f"{direction}.jsonl"
        done = in_turn(*RUN, "--mode", direction, "--stages", 3, "--n", 16,
                      *fakes("naps"), "--out", out, briefly=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        [nap] = by_name(out)["naps"]
        assert (nap["time_ms"] >= 20) == (direction == "train")
