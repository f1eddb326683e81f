"""`ladder ring` on two GPUs of one host: times of the slowest rank, memory, the link.

Skipped where there are fewer GPUs.
"""

import pytest
import torch
from ladder_command import by_name, ladder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SIZES = ("--n", 4096, "--h", 16, "--d", 128, "--dtype", "bf16", "--causal", "on")


@pytest.mark.parametrize("mode", ["fwd", "train"])
def test_every_contestant_is_right_and_has_its_time(tmp_path, mode):
    path = tmp_path / "ring.jsonl"
    asked = ("--mode", mode, "--warmup", 2, "--repeat", 3, "--out", path)
    done = ladder("ring", "--world", 2, "--device", "cuda", *SIZES, *asked, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, [cell] in by_name(path).items():
        assert cell["status"] in ("ok", "skipped"), (name, cell["reason"])
        if cell["status"] == "ok":
            assert cell["time_ms"] and cell["x_one_gpu"] and cell["link_gb_s"], name
            assert cell["peak_bytes"] and cell["memory_meter"] == "cuda-allocator", name
    assert {"ring", "ring_group", "one_gpu"} <= {
        name for name, [cell] in by_name(path).items() if cell["status"] == "ok"
    }
