"""The contract: what every stage gives, what a Stage takes, and where one can run."""

import dataclasses
import math
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from stage_checks import (
    FAKES,
    TWINS,
    attend,
    device_of,
    every_stage,
    for_each,
    gradients,
    normal,
)

import stages
from harness.records.code import built_in_files, files_of, label, twin_files
from stages.common import inputs, machine
from stages.common.contract import NEEDS, Stage, StageUnavailable, why_not, why_not_dtype
from stages.common.inputs import check_inputs, input_precision

SHAPE = (2, 2, 3, 4, 8)


# ---- what comes out


@for_each([stage for stage in FAKES if not stage.STAGE.gradients])
def test_no_gradient_is_promised_where_there_is_none(stage):
    """An output that carries none, or a refusal; without torch's graph, an output all the same."""
    q, k, v, _ = (x.requires_grad_() for x in normal(SHAPE, 0, device=device_of(stage)))
    try:
        assert not attend(stage, q, k, v).requires_grad
    except ValueError as refusal:
        assert str(refusal).startswith("q: got requires_grad=True, expected none")
    with torch.no_grad():
        assert not attend(stage, q, k, v).requires_grad


@every_stage
def test_one_output_does_not_change_with_the_next_call(stage):
    device = device_of(stage)
    first = attend(stage, *normal(SHAPE, 0, device=device)[:3])
    kept = first.clone()
    attend(stage, *normal(SHAPE, 1, device=device)[:3])
    assert torch.equal(first, kept)


# ---- Stage


FOUR = {"number": 90, "name": "mine", "title": "Mine", "idea": "an idea"}


def test_a_stage_needs_four_fields_only():
    stage = Stage(**FOUR)
    assert stage.devices == ("cpu", "cuda")
    assert stage.dtypes == ("float16", "bfloat16", "float32", "float64")
    assert (stage.needs, stage.options, stage.gradients) == ((), (), False)
    assert (stage.exact_up_to, stage.capability, dict(stage.worth_up_to)) == (None, None, {})
    for name in FOUR:
        with pytest.raises(TypeError, match=name):
            Stage(**{key: value for key, value in FOUR.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *[("number", x, "an int of at least 0") for x in (-1, True, "5", 5.0, None)],
        *[(name, x, "a text") for name in ("name", "title", "idea") for x in ("", "  ", None, 5)],
        ("needs", ("gpu",), f"some of {', '.join(NEEDS)}"),
        ("devices", ("tpu",), "some of cpu, cuda"),
        ("dtypes", ("float32", "int8"), "some of float16, bfloat16, float32, float64"),
        ("dtypes", (torch.float32,), "some of float16, bfloat16, float32, float64"),
        ("options", ("dropout",), "some of causal, seqlens_k, gqa, paged, world"),
        ("options", "causal", "some of causal, seqlens_k, gqa, paged, world"),  # a text is no tuple
        *[
            (name, x, "some of cpu, cuda")
            for name in ("devices",)
            for x in (None, (), 5, [["cpu"]])
        ],
        *[
            (name, x, f"at most {most} characters, all of which print")
            for name, most in (("name", 60), ("title", 100), ("idea", 400), ("still_hurts", 400))
            for x in ("\x1b[2J", "two\nlines", "\ud800", "\u202e", "x" * 10**6)
        ],
        ("still_hurts", None, "a text"),
        ("number", 10**400, "an int of at least 0"),
        *[
            ("exact_up_to", x, "None or an int of at least 0")
            for x in (math.inf, math.nan, "64", 64.0, True, -1, 10**400)
        ],
        *[("only_major", x, "None or an int of at least 0") for x in ("9", 9.0, (9, 0), True, -1)],
        *[
            ("worth_up_to", x, "an int of at least 0 for cpu, cuda or both")
            for x in (
                None,
                64,
                "cpu",
                {"tpu": 64},
                {"cpu": "64"},
                {"cpu": float("inf")},
                {"cpu": -1},
            )
        ],
        *[
            ("capability", x, "two ints, such as (9, 0)")
            for x in (9, "9.0", (9,), (9.0, 0), ("9", "0"))
        ],
        *[
            (name, x, "True or False")
            for name in ("gradients", "few_queries", "splits_keys", "rounds_scores")
            for x in (1, None, "no")
        ],
        *[("traffic", x, "one of fused, three-kernel") for x in ("", None, ["fused"])],
    ],
)  # fmt: skip
def test_a_stage_refuses(name, value, expected):
    with pytest.raises(ValueError) as error:
        Stage(**(FOUR | {name: value}))
    message = str(error.value)
    assert message.startswith(f"Stage.{name}: got "), message
    assert message.endswith(f", expected {expected}"), message


def test_a_stage_is_not_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Stage(**FOUR).number = 5


def test_mode():
    native, triton = Stage(**FOUR), Stage(**FOUR, needs=("triton",))
    assert [native.mode(x) for x in ("cpu", "cuda")] == ["native", "native"]
    assert [triton.mode(x) for x in ("cpu", "cuda")] == ["interpreted", "compiled"]


def test_the_built_in_stages_go_by_their_files():
    ours = [stage for stage in FAKES if stage not in TWINS]
    numbers = [stage.STAGE.number for stage in ours]
    assert numbers == sorted(set(numbers))
    assert numbers[:8] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert {twin.STAGE.number for twin in TWINS} <= {*numbers}
    for path, stage in zip([*built_in_files(), *twin_files()], [*ours, *TWINS], strict=True):
        assert label(path).removesuffix(".py") == f"s{stage.STAGE.number:02d}_{stage.STAGE.name}"
        assert (stages.by_number(stage.STAGE.number) is stage) == (stage in ours)
    with pytest.raises(KeyError):
        stages.by_number(99)


# ---- where a stage can run


def test_a_stage_for_another_device():
    gpu, cpu = Stage(**FOUR, devices=("cuda",)), Stage(**FOUR, devices=("cpu",))
    assert re.fullmatch("computes on .* only", why_not(gpu, "cpu"))
    assert "9.x" in why_not(dataclasses.replace(gpu, only_major=9), "cpu")  # not on any GPU
    assert why_not(cpu, "cpu") is None
    # a CPU stage takes a GPU's tensors, and works on the CPU
    assert [cpu.computes_on(x) for x in ("cpu", "cuda")] == ["cpu", "cpu"]
    assert [Stage(**FOUR).computes_on(x) for x in ("cpu", "cuda")] == ["cpu", "cuda"]


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "no GPU: it is at the cleaner's")
    assert why_not(Stage(**FOUR), "cuda") == "no GPU: it is at the cleaner's"
    assert why_not(Stage(**FOUR), "cpu") is None
    # whatever device its tensors are on
    assert why_not(Stage(**FOUR, needs=("cuda",)), "cpu") == "no GPU: it is at the cleaner's"


@pytest.mark.parametrize(
    ("have", "asked", "needs"),
    [
        ((8, 6), {}, None), ((8, 6), {"capability": (9, 0)}, "9.0"),
        ((8, 6), {"capability": (8, 6)}, None), ((8, 6), {"capability": (8, 0)}, None),
        ((9, 0), {"only_major": 9}, None), ((8, 9), {"only_major": 9}, "9.x"),
        ((10, 0), {"only_major": 9}, "9.x"),
    ],
)  # fmt: skip
def test_a_gpu_that_is_too_old_or_of_another_generation(monkeypatch, have, asked, needs):
    monkeypatch.setattr(machine, "why_no_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: have)
    reason = f"needs compute capability {needs}; this GPU has {have[0]}.{have[1]}"
    found = why_not(Stage(**FOUR, needs=("cuda",), **asked), "cuda")
    assert found == (reason if needs else None)


def test_each_gpu_is_asked_for_itself(monkeypatch):
    """Two that are unlike, of which the first is the current one."""
    capabilities = {None: (9, 0), 0: (9, 0), 1: (7, 5)}
    monkeypatch.setattr(machine, "why_no_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_capability",
        lambda device=None: capabilities[getattr(device, "index", device)],
    )
    stage = Stage(**FOUR, needs=("cuda",), only_major=9)
    for device, reason in (("cuda", None), ("cuda:0", None), ("cuda:1", "this GPU has 7.5")):
        for where in (device, torch.device(device)):
            found = why_not(stage, where)
            assert found is None if reason is None else reason in found
            compiled = Stage(**FOUR, needs=("triton",))
            found = why_not_dtype(compiled, "bfloat16", where)
            assert found is None if reason is None else reason in found


@pytest.mark.parametrize(("version", "runs"), [("3.5.1", False), ("3.6.0", True), ("3.10.0", True)])
def test_versions_without_gluon(monkeypatch, version, runs):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    reason = machine.why_no_gluon()
    assert reason is None if runs else "take triton >= 3.6" in reason


@pytest.mark.parametrize("package", machine.PACKAGES)
@pytest.mark.parametrize("installed", [False, True])
def test_a_peers_package_is_there_or_not(monkeypatch, package, installed):
    monkeypatch.setattr(machine, "why_no_gpu", lambda: None)
    module = machine.PACKAGES[package][0]
    monkeypatch.setitem(sys.modules, module, ModuleType(module) if installed else None)
    reason = why_not(Stage(**FOUR, needs=("cuda", package)), "cuda")
    assert reason is None if installed else f"pip install {package}" in reason


def test_good_input_that_this_machine_cannot_run(monkeypatch):
    monkeypatch.setattr(machine, "why_no_triton", lambda device: "triton is on holiday")
    stage, good = Stage(**FOUR, needs=("triton",)), normal(SHAPE, 0)[:3]
    with pytest.raises(StageUnavailable, match=r"mine.*: triton is on holiday"):
        check_inputs(stage, *good)
    # what is wrong with the input is said first: it is wrong everywhere
    with pytest.raises(ValueError, match=r"^k: "):
        check_inputs(stage, good[0], good[1].half(), good[2])


@pytest.mark.parametrize(
    ("triton", "numpy", "runs"),
    [
        ("3.6.0", "2.4.0", False),
        ("3.6.0", "2.5.1", False),
        ("3.6.0", "2.3.9", True),
        ("3.7.1", "2.4.6", True),
        ("3.10.0", "2.4.0", True),
    ],
)
def test_versions_whose_interpreter_is_broken(monkeypatch, triton, numpy, runs):
    pytest.importorskip("triton", reason="no wheel of triton for this machine")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("triton.__version__", triton)
    monkeypatch.setattr("numpy.__version__", numpy)
    monkeypatch.setattr("triton.language.zeros", None)  # no compiled function, also on a GPU
    reason = machine.why_no_triton("cpu")
    assert (reason is None) == runs
    assert runs or (triton in reason and numpy in reason)


def test_triton_imported_too_early_to_interpret_is_a_reason(monkeypatch):
    triton = pytest.importorskip("triton", reason="no wheel of triton for this machine")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    compiled = triton.JITFunction.__new__(triton.JITFunction)
    monkeypatch.setattr("triton.language.zeros", compiled)
    assert "import stages first" in machine.why_no_triton("cpu")


@pytest.mark.parametrize(
    ("system", "hint"),
    [("Linux", "run `pip install triton`"), ("Darwin", "no wheels of it for macOS"),
     ("Windows", "`pip install triton-windows`"), ("Haiku", "for Haiku")],
)  # fmt: skip
def test_without_triton_each_system_is_told_what_it_can_do(monkeypatch, system, hint):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("platform.system", lambda: system)
    for device in ("cpu", "cuda"):
        assert hint in machine.why_no_triton(device)


@pytest.mark.parametrize(
    ("device", "interpret", "gpu", "reason"),
    [
        ("cpu", "0", True, "a GPU is there, so kernels are compiled; set TRITON_INTERPRET=1"),
        ("cpu", "0", False, "no GPU to compile kernels for, and TRITON_INTERPRET=0"),
        ("cuda", "1", True, "unset it"),
        ("cuda", "0", True, None),
    ],
)
def test_interpreted_or_compiled_not_both(monkeypatch, device, interpret, gpu, reason):
    pytest.importorskip("triton", reason="no wheel of triton for this machine")
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    got = machine.why_no_triton(device)
    assert got is None if reason is None else reason in got


@for_each([stage for stage in FAKES if "bfloat16" in stage.STAGE.dtypes])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_bfloat16_is_refused_where_triton_can_not_multiply_it(stage, capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    reason = why_not_dtype(stage.STAGE, "bfloat16", "cuda")
    assert (reason is None) == (capability == (8, 0) or "triton" not in stage.STAGE.needs)
    for words in ("from compute capability 8.0", "has 7.5", "use float16 or float32"):
        assert reason is None or words in reason
    assert why_not_dtype(stage.STAGE, "float32", "cuda") is None


INTERPRETED = [
    stage
    for stage in FAKES
    if stage.STAGE.mode("cpu") == "interpreted" and "cpu" in stage.STAGE.devices
]


# ---- TF32 is torch's switch


@pytest.mark.parametrize(
    ("device", "dtype", "switch", "capability", "precision"),
    [
        ("cuda", torch.float32, "ieee", (8, 0), "bf16x6"),
        ("cuda", torch.float32, "tf32", (8, 0), "tf32"),
        ("cuda", torch.float32, "ieee", (7, 5), "ieee"),
        ("cuda", torch.float32, "tf32", (7, 5), "ieee"),
        ("cuda", torch.float16, "tf32", (8, 0), "ieee"),
        ("cpu", torch.float32, "tf32", (8, 0), "ieee"),
    ],
)
@pytest.mark.parametrize("torch_is", ["new", "old"])
def test_input_precision_follows_torch_and_the_card(
    monkeypatch, torch_is, device, dtype, switch, capability, precision
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    state = {"fp32_precision": switch} if torch_is == "new" else {"allow_tf32": switch == "tf32"}
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(**state))
    monkeypatch.setattr(inputs, "asked_for", set())
    x = SimpleNamespace(device=torch.device(device), dtype=dtype)
    assert input_precision(x) == precision
    # what records call the products, where there is a choice
    assert inputs.asked_for == ({precision} - {"ieee"})


def kernels_with_products(stage):
    """The names of the kernels of `stage`'s file that say in which precision they multiply."""
    return {
        name
        for name, kernel in vars(stage).items()
        if name.endswith("_kernel") and "PRECISION" in kernel.arg_names
    }


@for_each(INTERPRETED)
@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16x6"])
def test_triton_stages_state_their_precision(stage, monkeypatch, precision):
    tensors = normal(SHAPE, 0, device=device_of(stage))
    # tl.dot's own default on a GPU is TF32; the interpreter knows one precision, and can't tell
    texts = [path.read_text(encoding="utf-8") for path in files_of(stage.STAGE.number)]
    dots = re.findall(r"\bdot\(.*", "".join(texts))
    assert dots and all(re.search(r", PRECISION[,)]", dot) for dot in dots)
    assert "tl.dot(" not in "".join(texts).replace("`tl.dot(", "")
    launched = []

    class Kernel:
        def __init__(self, name):
            self.name = self.__name__ = name

        def __getitem__(self, grid):
            return lambda *args, **options: launched.append(
                (self.name, options["PRECISION"], options["REDO"])
            )

    expected = set()
    for module in INTERPRETED:  # one stage may launch another's kernels
        monkeypatch.setattr(module, "input_precision", lambda x: precision)
        for name in kernels_with_products(module):
            monkeypatch.setattr(module, name, Kernel(name))
            if module is stage:
                expected.add(name)
    if stage.STAGE.gradients:
        gradients(stage, *tensors)
    else:
        attend(stage, *tensors[:3])
    assert expected <= {name for name, *_ in launched}
    assert {said for _, said, redo in launched if not redo} == {precision}
    # what six products can't hold is computed once more by each kernel
    redone = [(name, said) for name, said, redo in launched if redo]
    again = [(name, "ieee") for name, _, redo in launched if not redo]
    assert redone == (again if precision == "bf16x6" else [])
