"""What tools/same_code.py notes in records: the code of now, for a stage that came out the same."""

import itertools
import json
import shutil

import pytest
import same_code
from same_code import Code

from harness.records import code


def test_only_records_with_the_code_of_before_are_noted(tmp_path):
    """And none of the host's own times."""
    (tmp_path / "gpu").mkdir()
    rest = '{"kind": "cell", "stage": 6, "dtype": "float16", "direction": "fwd", "x": 1.50}\n'
    for name, codes in {"same": "ab", "older": "xb", "none": "", "host": "ab"}.items():
        stages = [{"stage": 6 + i, "code": code} for i, code in enumerate(codes)]
        env = {"kind": "env", "rungs": stages}
        cell = rest.replace('"cell"', '"host"') if name == "host" else rest
        (tmp_path / "gpu" / f"{name}.jsonl").write_text(json.dumps(env) + "\n" + cell)
    same = {6: {("float16", 64, "forward")}}
    changed = same_code.note(
        {6: Code("a", "-"), 7: Code("b", "-")},
        {6: Code("A", "-"), 7: Code("B", "-")},
        same,
        set(),
        tmp_path,
    )
    assert changed == ["gpu/same.jsonl"]
    first, *others = (tmp_path / "gpu" / "same.jsonl").read_text().splitlines(keepends=True)
    assert [stage["code"] for stage in json.loads(first)["rungs"]] == ["A", "b"]
    assert others == [rest]
    older, *_ = (tmp_path / "gpu" / "older.jsonl").read_text().splitlines()
    assert [stage["code"] for stage in json.loads(older)["rungs"]] == ["x", "b"]


def test_a_record_is_noted_where_its_own_kinds_came_out_the_same(tmp_path):
    """Float32 of a GPU in IEEE is six products, that of a CPU isn't."""
    (tmp_path / "some").mkdir()
    cells = {
        "half": ("bfloat16", "bfloat16", "cuda"), "cpu": ("float32", "ieee", "cpu"),
        "tf32": ("float32", "tf32", "cuda"), "split": ("float32", "ieee", "cuda"),
        "narrow": ("float16", "float16", "cuda", 40), "wide": ("float16", "float16", "cuda", 72),
        "trained": ("float16", "float16", "cuda", 64, "train"),
    }  # fmt: skip
    for name, (dtype, precision, device, *rest) in cells.items():
        d, direction = (*rest, *(64, "fwd")[len(rest) :])
        cell = {"stage": 6, "dtype": dtype, "precision": precision, "device": device, "d": d}
        cell["direction"] = direction
        lines = (
            {"rungs": [{"stage": 6, "code": "a"}]},
            cell,
            cell | {"stage": 3, "dtype": "float64"},
        )
        (tmp_path / "some" / f"{name}.jsonl").write_text(
            "".join(json.dumps(x) + "\n" for x in lines)
        )
    same = {6: {("float16", 64, "forward"), ("float32", 64, "forward")}}
    assert same_code.note({6: Code("a", "-")}, {6: Code("A", "-")}, same, set(), tmp_path) == [
        "some/cpu.jsonl",
        "some/half.jsonl",
        "some/narrow.jsonl",
    ]


def test_what_launches_stage_9_is_the_same_where_its_own_files_are(tmp_path):
    (tmp_path / "gpus").mkdir()
    rungs = [{"stage": 10, "code": "a"}, {"stage": 116, "code": "b"}, {"stage": 3, "code": "c"}]
    cells = [{"stage": n, "dtype": "float16", "d": 64, "direction": "fwd"} for n in (10, 116, 3)]
    path = tmp_path / "gpus" / "ring.jsonl"
    lines = [json.dumps(x) + "\n" for x in ({"rungs": rungs}, *cells)]
    before = {10: Code("a", "ring"), 116: Code("b", "one"), 3: Code("c", "")}
    now = {10: Code("A", "ring"), 116: Code("B", "other"), 3: Code("C", "")}
    for kinds, want in (({("float16", 64, "forward")}, "Abc"), (set(), "abc")):
        path.write_text("".join(lines))
        same_code.note(before, now, {9: kinds}, set(), tmp_path)
        noted = json.loads(path.read_text().splitlines()[0])["rungs"]
        assert "".join(stage["code"] for stage in noted) == want


SIZES = {"b": 1, "h": 16, "hk": 16, "nq": 16384, "nk": 16384, "d": 128}


def a_cell(**other):
    cell = {"kind": "cell", "stage": 9, "dtype": "float16", "direction": "bwd", "seqlens_k": None}
    return cell | SIZES | {"causal": True} | other


@pytest.mark.parametrize(("kind", "alike", "noted"), [
    ("cell", [], False), ("cell", [{"nk": 1}], False), ("cell", [{}], True),
    ("bench", [{}], False), ("loop", [], True),
])  # fmt: skip
def test_a_record_is_noted_where_stage_9_launches_its_problems_alike(tmp_path, kind, alike, noted):
    (tmp_path / "gpu").mkdir()
    path = tmp_path / "gpu" / "some.jsonl"
    lines = {"rungs": [{"stage": 9, "code": "a"}]}, a_cell(kind=kind)
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    same_code.note(
        {9: Code("a", "")},
        {9: Code("A", "")},
        {9: {("float16", 128, which) for which in same_code.PLACES}},
        {same_code.problem_of(a_cell(**other)) for other in alike},
        tmp_path,
    )
    [stage] = json.loads(path.read_text().splitlines()[0])["rungs"]
    assert (stage["code"] == "A") is noted


def test_problems_are_launched_alike_where_grids_and_numbers_are(tmp_path):
    """Two checkouts: in the other one a section may have fewer heads, and so has it, causal."""
    shutil.copytree(same_code.ROOT / "stages", tmp_path / "other" / "stages")
    path = tmp_path / "other" / "stages" / "s09_gluon_hopper" / "launch.py"
    path.write_text(path.read_text().replace("FEWEST_HEADS = 8", "FEWEST_HEADS = 1"))
    cells = [a_cell(), a_cell(causal=False), a_cell(nk=1024), a_cell(direction="fwd", d=64)]
    (tmp_path / "results" / "gpu").mkdir(parents=True)
    lines = [*cells, a_cell(dtype="float32"), a_cell(stage=8), {"kind": "env"}]
    text = "".join(json.dumps(x) + "\n" for x in lines)
    (tmp_path / "results" / "gpu" / "some.jsonl").write_text(text)
    found = same_code.launched_alike(same_code.ROOT, tmp_path / "other", tmp_path / "results")
    assert found == {same_code.problem_of(cells[i]) for i in (1, 3)}
    (tmp_path / "older").mkdir()
    assert same_code.launched_in(tmp_path / "older", [same_code.problem_of(a_cell())]) == [None]


def test_the_code_of_here_is_read_for_stages_and_what_ranks_are_compared_with():
    found = same_code.codes_of(same_code.ROOT)
    assert {*range(11), 116} <= {*found}
    assert found[9].rest != found[9].whole
    launch = same_code.ROOT / "stages" / "s09_gluon_hopper" / "launch.py"
    assert code.digest(launch.read_bytes(), True) in found[10].rest.split()
    assert found[10].rest


def test_a_stage_is_the_same_where_all_kernels_that_it_launches_are():
    """Stage 9 hands float32 to the kernels of stages 6 to 8."""
    before = dict.fromkeys(
        (f"{stage} a_kernel 64 {dtype} 90 plain" for stage in same_code.TRITON
         for dtype in ("float16", "bf16x6")), "a"
    ) | {"forward 64 bfloat16 THREE_CTAS causal": "a"}  # fmt: skip
    half = {*itertools.product(["float16"], same_code.WIDTHS, same_code.PLACES)}
    both = half | {*itertools.product(["bf16x6"], same_code.WIDTHS, same_code.PLACES)}
    assert same_code.same_kinds(before, before) == dict.fromkeys(range(4, 10), both)
    for changed, others in ((6, (7, 9)), (7, (9,)), (8, (9,))):
        now = before | {f"{same_code.TRITON[changed - 4]} a_kernel 64 bf16x6 90 plain": "b"}
        found = same_code.same_kinds(before, now)
        assert {number for number in found if found[number] == half} == {changed, *others}
    now = before | {f"{same_code.TRITON[4]} a_kernel 64 float16 90 plain": "b"}
    assert same_code.same_kinds(before, now)[9] == both  # which it never hands on
    # stage 9's kernels are of one width each
    for kernel in ("forward 80 bfloat16 D_80 plain", "backward 128 bfloat16 postprocess plain"):
        found = same_code.same_kinds(before, before | {kernel: "new"})
        which, d, *_ = kernel.split()
        assert found[9] == both - {("float16", int(d), which)}
