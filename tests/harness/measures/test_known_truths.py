"""The meters held to known truths: 20 ms read 20 ms, 200 MB read 200 MB."""

import subprocess

import pytest
from ladder_command import FAKES, RUN, YARDSTICK, fakes, measured

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


@pytest.mark.timing
def test_a_sleep_of_20_ms_reads_20_ms(tmp_path):
    asked = (*RUN, "--stages", 3, "--n", 16)
    _, cells = measured(tmp_path, *asked, *fakes("naps"), briefly=False)
    [nap], [stage3] = cells["naps"], cells[YARDSTICK]
    assert nap["time_ms"] == pytest.approx(20, rel=0.1)
    assert nap["first_call_ms"] == pytest.approx(20, rel=0.2)
    assert nap["samples"] >= 5 and 0 <= nap["time_iqr_ms"] < 2
    assert stage3["time_ms"] < 2


@pytest.mark.timing
def test_200_mb_held_for_a_moment_read_200_mb(tmp_path):
    """By Python, torch and C++ alike; in a process that held 200 MB before it, too."""
    source, library = tmp_path / "hold.cpp", tmp_path / "libhold.so"
    source.write_text(HOLDER)
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
    holders = ("holds_python", "holds_torch", "holds_cpp")
    stage = tmp_path / "holds_cpp.py"
    stage.write_text(FAKES.text("holds_cpp").replace("LIBRARY", str(library)))
    asked = (*RUN, "--stages", 3, "--n", "16,32", "--memory", "1G", "--stage", stage)
    _, cells = measured(tmp_path, *asked, *fakes("held_before", *holders[:2]))
    for name in holders:
        for cell in cells[name]:
            assert cell["peak_bytes"] == pytest.approx(HELD, rel=0.1), name
            assert cell["memory_meter"] == "process-rss"
    # a high-water mark from before the call is not the call's
    for cell in cells[YARDSTICK] + cells["held_before"]:
        assert cell["peak_bytes"] < 5 * MB


MATRIX = 2048 * 2048 * 4  # bytes


@pytest.mark.timing
@pytest.mark.parametrize(
    ("direction", "matrices"),
    [("fwd", 2),  # q k^T and its scaled copy, or the scaled copy and P
     ("bwd", 2),  # dP and dS above what the forward pass has left, P
     ("train", 3)],  # with the forward pass, P too
)  # fmt: skip
def test_the_matrices_that_stage_3_holds_are_its_peak(tmp_path, direction, matrices):
    """What the forward pass took and gave back must not hide them."""
    _, cells = measured(tmp_path, "run", "--mode", direction, "--stages", 3, "--n", 2048)
    [cell] = cells[YARDSTICK]
    assert cell["memory_meter"] == "process-rss"
    assert cell["peak_bytes"] == pytest.approx(matrices * MATRIX, rel=0.15)


@pytest.mark.timing
def test_the_inputs_are_no_part_of_the_peak(tmp_path):
    _, cells = measured(tmp_path, "run", "--stages", 3, "--n", 200_000, "--nq", 1)
    inputs = 2 * 200_000 * 64 * 4
    assert inputs > 90 * MB and cells[YARDSTICK][0]["peak_bytes"] < 10 * MB


@pytest.mark.timing
def test_a_backward_call_is_measured_without_its_forward_pass(tmp_path):
    """A forward pass that sleeps 20 ms costs training all of them, and a backward call none.

    What a forward pass took in small pieces, which the C library keeps when they're freed, is the
    backward pass's own where that takes as much again.
    """
    for direction in ("bwd", "train"):
        asked = (*RUN, "--mode", direction, "--stages", 3, "--n", 16, "--memory", "1G")
        _, cells = measured(tmp_path, *asked, *fakes("naps", "holds_twice"), briefly=False)
        assert (cells["naps"][0]["time_ms"] >= 20) == (direction == "train")
        if direction == "bwd":
            assert cells["holds_twice"][0]["peak_bytes"] == pytest.approx(HELD, rel=0.1)
