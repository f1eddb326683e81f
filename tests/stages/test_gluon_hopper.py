"""Stage 9's way from attend to the launch, with a driver that is faked; the rest needs a GPU."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_driver import SHAPES

import stages

ROOT = Path(__file__).parents[2]
STAGE = stages.by_number(9)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no wheel of triton for this machine"
)


def launches(folder, *jobs):
    """What fake_driver.py says of the two launches of each job; `folder` keeps what is compiled."""
    script = str(Path(__file__).with_name("fake_driver.py"))
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }
    command = [sys.executable, script, *(",".join(map(str, job)) for job in jobs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = list(map(json.loads, done.stdout.splitlines()))
    assert len(said) == 2 * len(jobs)
    return list(zip(said[::2], said[1::2], strict=True))


@pytest.mark.parametrize(
    ("d", "causal", "lengths"),
    [(128, 0, 0), pytest.param(64, 1, 1, marks=pytest.mark.slow)],
)
def test_the_kernel_gets_what_it_is_to_get_at_the_first_launch_and_at_the_next(
    d, causal, lengths, cubins
):
    (B, H, Nq), (_, Hk, Nk) = SHAPES
    config = STAGE.plan(d, bool(causal or lengths), Nk)
    [(first, again)] = launches(cubins, (d, causal, lengths))
    assert first == again
    blocks = -(-Nq // (64 * config.CONSUMERS))
    grid = min(132 * config.ctas, B * H * blocks)
    assert first.pop("grid") == [grid, 1, 1]
    assert first.pop("qk_scale") == pytest.approx(math.log2(math.e) / math.sqrt(d))
    assert first.pop("section") == (B * H if causal else H // Hk)  # all K and V fit
    assert first == {
        "H": H, "group": H // Hk, "Nq": Nq, "Nk": Nk, "blocks": blocks, "heads": B * H,
        "tiles": B * H * blocks, "CAUSAL": bool(causal), "HAS_SEQLENS": bool(lengths),
        "MASKED": 2 if causal else 1, "LSE": False,
        **{name: x for name, x in config._asdict().items() if name not in ("ctas", "maxnreg")},
    }  # fmt: skip


@pytest.mark.slow
def test_each_variant_compiles_and_is_launched(tmp_path, cubins):
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools" / "make_variants.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    written = {path.stem: path for path in tool.write(tmp_path, 9)}
    B, H, Nq = SHAPES[0]
    names = [*tool.OF_STAGE_9]
    made = launches(cubins, *((64, 1, 0, written[name]) for name in names))
    said = {name: again for name, (_, again) in zip(names, made, strict=True)}
    assert said["launched"]["grid"] == [B * H * -(-Nq // 128), 1, 1]
    assert said["heads_first"]["section"] == B * H
    assert said["two_consumers"]["BLOCK_N"] == 128
    assert not said["in_turn"]["OVERLAP"]
    assert said["static"] == said["whole_sums"] == said["unguarded"]
