"""The decode suite: its plan, stages that read from a paged cache, and its tables."""

import inspect
import json
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import held
import pytest
import torch
from made_up import (
    cells_of,
    make_bench,
    make_bench_env,
    make_cell,
    make_run,
    problem,
    text_of,
    write_run,
)

import stages
from course import suites
from course.report import comparisons, sources, text
from harness.isolation.roster import describe_files, read_stages
from harness.problems import cost
from harness.records import environment
from harness.records.code import PEERS, peer_files, read_declared
from harness.records.schema import check_record
from harness.runs import plan
from harness.views import cell_tables, plots
from ladder import bench
from stages.common import machine
from stages.contract import StageUnavailable

TINY = problem(inputs="peaky", b=2, h=4, hk=2, nq=2, nk=150, d=16)
LIMITS = plan.Limits(budget=60.0, memory=2 << 30, warmup=1, rounds=3)

# a stage without kernels, whose cache copies k and v page by page
OWN = """
import torch
import stages
from stages.contract import Stage
STAGE = Stage(number=90, name={name!r}, title="own", idea="a fake", options=("gqa", "paged"))
attend = stages.by_number(3).attend


class PagedCache:
    def __init__(self, pages, page_size, Hk, d, dtype, device, *, sequences):
        self.k = torch.full((pages, Hk, page_size, d), float("nan"), dtype=dtype)
        self.v = self.k.clone()
        self.page_size, self.free_pages, self.held = page_size, list(range(pages)), {{}}

    def append(self, sequence, k, v):
        pages = [self.free_pages.pop() for _ in range(-(-k.shape[1] // self.page_size))]
        self.held[sequence] = (pages, k.shape[1])
        for j, page in enumerate(pages):
            for mine, x in ((self.k, k), (self.v, v)):
                part = x[:, j * self.page_size : (j + 1) * self.page_size]
                mine[page, :, : part.shape[1]] = part

    def free(self, sequence):
        self.free_pages += self.held.pop(sequence)[0]


def whole(x, held):
    pages, length = held
    return x[pages].transpose(0, 1).flatten(1, 2)[:, :length]


def attend_paged(q, cache, sequences, *, causal=True):
    assert not causal
    k, v = (torch.stack([whole(x, cache.held[s]) for s in sequences]) for x in (cache.k, cache.v))
    {body}
    return attend(q, k, v)
"""


@pytest.fixture
def make_own(tmp_path):
    def make(body="", name="own"):
        path = tmp_path / f"{name}.py"
        path.write_text(OWN.format(body=body, name=name))
        return path

    return make


def stage_files(*numbers):
    return [stage.path for stage in read_stages() if stage.number in numbers]


def hold(*paths, problem=TINY, page_sizes=(None, 16, 64)):
    """(name, page size) -> record of one comparison."""
    return held.hold(*paths, problem=problem, limits=LIMITS, page_sizes=page_sizes)


# ---- the plan


def test_the_suite_is_eight_shapes_and_a_sweep_of_query_rows():
    problems = suites.SUITES["decode"].problems(replace(TINY, inputs="normal", device="cuda"))
    assert len(set(problems)) == len(problems)
    whole = [p for p in problems if p.page_size is None]
    shapes = {(p.b, p.h, p.hk, p.nk, p.d) for p in problems}
    assert len(shapes) == 8
    assert {(1, 32, 8, 131072, 128), (8, 64, 8, 16384, 64)} < shapes
    for shape in shapes:
        rows = {p.nq for p in whole if (p.b, p.h, p.hk, p.nk, p.d) == shape}
        assert rows in ({1, 8}, {1, 2, 4, 8, 16})
    assert {p.nq for p in whole} == {1, 2, 4, 8, 16}
    assert {(p.dtype, p.precision, p.causal, p.direction) for p in problems} == {
        ("bfloat16", "bfloat16", False, "fwd")
    }
    # whatever lies in pages stands beside the same keys in one piece
    assert {replace(p, page_size=None) for p in problems} == set(whole)
    assert {p.page_size for p in problems} == {None, 16, 64, 256}
    # the rows that are promised come first, cut off or not
    assert {p.nq for p in whole[:16]} == {1, 8} and len(whole) == 22


def test_the_masks_are_measured_on_shapes_that_have_pages_too():
    """Each shape in four ways, next to nothing hidden, stage 8 alone."""
    problems = suites.SUITES["decode-masks"].problems(replace(TINY, device="cuda"))
    ways = {(False, False), (True, False), (False, True), (True, True)}
    shapes = {(p.b, p.h, p.hk, p.nk, p.d) for p in problems}
    paged = suites.SUITES["decode"].problems(TINY)
    assert shapes == {(p.b, p.h, p.hk, p.nk, p.d) for p in paged if p.page_size}
    for shape in shapes:
        alike = [p for p in problems if (p.b, p.h, p.hk, p.nk, p.d) == shape]
        assert {(p.causal, p.seqlens_k is not None) for p in alike} == ways and len(alike) == 4
        assert {p.seqlens_k for p in alike} == {None, (shape[3],) * shape[0]}
    able = [replace(s, unavailable={"cuda": None}) for s in describe_files(stage_files(3, 6, 8))]
    plans = plan.plan_comparisons(able, problems, [], suites.SUITES["decode-masks"].takes)
    assert {cell.problem for cell in plans} == set(problems)
    assert {cell.stage.number for cell in plans} == {8}


def test_odd_problems_are_measured_beside_the_even_one():
    """Each with another N, with grouped heads and with lengths; nothing else differs."""
    problems = suites.SUITES["hopper-odd"].problems(replace(TINY, device="cuda"))
    even = [p for p in problems if p.nk % 128 == 0 and p.hk == p.h and not p.seqlens_k]
    assert {(p.d, p.causal, p.nk) for p in even} == {
        *product((64, 128), (False, True), (1024, 4096))
    }
    for p in even:
        ragged = {1024: 1000, 4096: 4095}[p.nk]
        odd = {
            replace(p, nq=ragged, nk=ragged),
            replace(p, hk=p.h // 4),
            replace(p, seqlens_k=(p.nk,) * p.b),
            replace(p, seqlens_k=(ragged,) * p.b),
        }
        assert odd < set(problems)
    assert len(problems) == 5 * len(even)


def test_nq_chooses_among_the_problems_of_the_suite():
    given = {
        name: p.default for name, p in inspect.signature(bench.bench_command).parameters.items()
    }
    parts = [
        bench.make_problems({**given, "suite": "decode", "nq": nq}, "cuda")
        for nq in ("1", "8", "2,4,16", None)
    ]
    assert [{p.nq for p in part} for part in parts[:3]] == [{1}, {8}, {2, 4, 16}]
    assert set().union(*parts[:3]) == set(parts[3])


def test_a_page_size_is_a_stage_and_not_another_comparison():
    stages = describe_files(stage_files(3, 8))
    problems = [replace(TINY, page_size=size) for size in (None, 16, 64)]
    problems += [replace(TINY, nq=1)]
    first, second = plan.group(plan.plan_comparisons(stages, problems, []), LIMITS)
    assert first.problem == TINY and second.problem == replace(TINY, nq=1)
    assert [(cell.stage.number, cell.problem.page_size) for cell in first.cells] == [
        (3, None), (8, None), (8, 16), (8, 64)
    ]  # fmt: skip
    assert [stage.number for stage in second.stages] == [3, 8]


def test_the_stages_of_the_suite_by_default():
    """Stage 6 beside stage 8, and the tuned peer, which other suites go without."""
    every = describe_files(stage_files(3, 6, 8) + peer_files())
    whole = [replace(TINY, nq=nq) for nq in (1, 150)]
    names = {stage.name for stage in plan.usual_stages(every, whole[:1])}
    assert "flex_attention_tuned" in names
    assert "flex_attention_tuned" not in {s.name for s in plan.usual_stages(every, whole[1:])}
    asked = [replace(p, device="cuda") for p in suites.SUITES["decode"].problems(TINY)]
    numbers = {6, 8, 100, 101, 102, 103, 106, 108}
    able = [replace(s, unavailable={"cuda": None}) for s in every if s.number in {3, 104} | numbers]
    planned = plan.plan_comparisons(able, asked, [], suites.decodes)
    assert {cell.stage.number for cell in planned if cell.problem.page_size} <= {8, 108}
    for each in plan.group([cell for cell in planned if not cell.problem.page_size], LIMITS):
        compiled = {103, 106} if each.problem.nq in (2, 4, 16) else set()
        assert {stage.number for stage in each.stages} == numbers - compiled


def test_a_plan_is_read_again_as_it_was_written_pages_too():
    every = describe_files(stage_files(3, 8))
    asked = [replace(TINY, page_size=size) for size in (None, 16, 64)]
    asked += [replace(TINY, inputs="normal", b=2, seqlens_k=(5, 150))]
    cells = plan.plan_comparisons(every, asked, [stage.path for stage in every])
    entries = json.loads(json.dumps([cell.to_json() for cell in cells]))
    known = {(stage.number, stage.name): stage for stage in every}
    assert plan.read_cells(entries, known) == cells
    planned = plan.group(cells, LIMITS)
    assert len(planned) == 2
    assert plan.unfinished(planned, entries) == []
    paged = [entry for entry in entries if entry["page_size"] == 64]
    for entry in paged:
        assert plan.unfinished(planned, [x for x in entries if x is not entry]) == planned[:1]
    assert {entry["name"] for entry in paged} == {stage.name for stage in every}


def test_the_versions_of_what_peers_are_made_of_are_kept_and_shown(monkeypatch):
    """Under a table only of those that it may have; under one of an older record, none."""
    titles = {read_declared(path)["title"] for path in peer_files()}
    assert titles >= {*environment.PEER_PACKAGES.values()}
    assert {*environment.PEER_PACKAGES} == {*machine.PACKAGES}
    monkeypatch.setattr(environment, "version", lambda package: f"{len(package)}.0")
    found = environment.peer_versions()
    assert found["FlashInfer"] == "17.0" and found["FlashAttention-4"] == "12.0"
    known = {"CUDA": "13.0", "cuDNN": "9.15", "FlashInfer": "17.0", "FlashAttention-4": "12.0"}
    env = {"rungs": [{"title": "SDPA, cuDNN"}, {"title": "FlashInfer"}], "versions": known}
    assert text.versions(env) == ", CUDA 13.0, cuDNN 9.15, FlashInfer 17.0"
    assert text.versions(env | {"rungs": []}) == ", CUDA 13.0"
    assert text.versions(env | {"versions": None}) == text.versions({"rungs": []}) == ""


def test_a_tuned_peer_is_in_no_table_of_a_source():
    every = [replace(peer, unavailable={"cuda": None}) for peer in describe_files(peer_files())]
    cells = suites.SUITES["table-4.2"].cells(every, replace(TINY, device="cuda"))
    others = {106, 107, 108}  # 107 takes no float16
    assert {cell.stage.number for cell in cells} == {peer.number for peer in every} - others


def test_what_is_read_from_pages_takes_its_time(monkeypatch, make_own):
    """One stage in one piece and two in pages: three are waited for."""
    once = cost.flops(TINY) * (LIMITS.warmup + LIMITS.rounds) / plan.THREAD_RATE
    [own] = describe_files([make_own()])
    for sizes, times in (((), 1), ((16, 64), 3)):
        problems = [replace(TINY, page_size=size) for size in (None, *sizes)]
        cells = [plan.Cell(own, problem, paired=True) for problem in problems]
        for patience, late in ((times + 0.5, False), (times - 0.5, True)):
            monkeypatch.setattr(plan, "PATIENCE", patience * once)
            assert bool(plan.why_too_long(cells, LIMITS)) == late


def test_one_head_has_stage_8_in_table_4_2():
    cells = suites.SUITES["table-4.2"].cells(read_stages(), replace(TINY, device="cuda"))
    eight = [cell for cell in cells if cell.stage.number == 8]
    assert {(c.problem.h, c.problem.d) for c in eight} == {(1, 64)}
    assert {c.problem.precision for c in eight} == {"ieee", "tf32", "float16"}
    assert sorted({c.problem.nk for c in eight}) == [1024, 2048, 4096, 8192, 16384]
    assert {c.paired for c in eight} == {False, True}
    alone = {c.problem for c in cells if c.stage.number == 5 and not c.paired}
    assert {c.problem for c in eight} == {problem for problem in alone if problem.h == 1}


# ---- stages with pages


def test_stage_8_reads_from_pages_in_the_interpreter():
    records = hold(*stage_files(3, 8))
    split = "triton_split_kv"
    for size in (None, 16, 64):
        record = records[split, size]
        assert (record["status"], record["mode"]) == ("ok", "interpreted"), record["reason"]
        assert record["time_ms"] is None and 0 < record["err_f64_max"] < 1e-4
    assert records["torch_three_gemm", None]["status"] == "ok"
    for size in (16, 64):  # asked for by its file, and no reader of pages
        skipped = records["torch_three_gemm", size]
        assert skipped["status"] == "skipped" and "attend_paged" in skipped["reason"]
    # the same minimum for all, whatever holds the keys
    # stage 3 declares what its kernels write and read again, too
    moved = {record["hbm_bytes"] for record in records.values() if record["stage"] != 3}
    assert moved == {4 * 16 * 2 * (2 * 4 * 2 + 2 * 2 * 150)} == {cost.hbm_bytes(TINY)}


def test_pages_are_timed_in_turns_with_the_keys_in_one_piece(make_own):
    records = hold(make_own())
    assert {record["status"] for record in records.values()} == {"ok"}
    assert {record["samples"] for record in records.values()} == {3}


@pytest.mark.parametrize(
    ("body", "why"),
    [("v = v.flip(2)", "max error"),
     ("o = getattr(cache, 'o', None)\n    cache.o = attend(q, k, v) if o is None else o\n"
      "    return cache.o", "after v changed"),
     ("q.neg_()", "changed its input q")],
)  # fmt: skip
def test_pages_read_wrong_are_found_out(make_own, body, why):
    """In a wrong order; an answer remembered while the cache was filled anew; q written to."""
    records = hold(make_own(body))
    for size in (16, 64):
        assert records["own", size]["status"] == "wrong"
        assert why in records["own", size]["reason"]
    assert records["own", None]["status"] == "ok"


def test_the_pages_of_a_sequence_lie_in_no_order(make_own):
    """A stage that takes the pages in the order in which a new cache hands them out is wrong."""
    body = "k = torch.stack([cache.k.flip(0).transpose(0, 1).flatten(1, 2)[:, :150]])"
    record = hold(make_own(body), problem=replace(TINY, b=1))["own", 16]
    assert record["status"] == "wrong" and "changed" not in record["reason"]  # at its first call


# ---- the tables


def made(stage, name, time_ms, page_size=None, **changes):
    """A bench record of the suite with that time."""
    big = {"b": 64, "h": 32, "hk": 8, "nq": 1, "nk": 8192, "d": 128, "dtype": "bfloat16"}
    fields = {**big, "precision": "bfloat16", "page_size": page_size, **changes}
    record = make_bench(6, **fields) | {"stage": stage, "name": name, "time_ms": time_ms}
    check_record(record)
    return record


def load_anywhere(name, monkeypatch):
    """A peer that takes float32 on a CPU."""
    peer = stages.load(PEERS / name)
    anywhere = replace(peer.STAGE, devices=("cpu",), needs=(), dtypes=("float32",), capability=None)
    monkeypatch.setattr(peer, "STAGE", anywhere)
    return peer


class FakeWrapper:
    """FlashInfer's wrappers as they are documented, computed page by page by stage 3."""

    def __init__(self, workspace, layout, use_tensor_cores=None):
        assert layout == "HND" and workspace.numel() == 128 << 20
        self.plans = []

    def plan(self, *numbers, causal=False, q_data_type, kv_data_type):
        *self.ends, H, Hk, d, self.page_size = numbers
        self.causal, self.shape = causal, (H, Hk, d)
        assert q_data_type == kv_data_type
        FakeWrapper.planned += 1

    def run(self, q, cache):
        *rows, indptr, indices, last = self.ends
        rows = rows[0] if rows else torch.arange(len(indptr))  # decoding: one row each
        found = []
        for b, length in enumerate(last):
            pages = indices[indptr[b] : indptr[b + 1]]
            n = (len(pages) - 1) * self.page_size + length
            k, v = (x[pages].transpose(0, 1).flatten(1, 2)[None, :, :n] for x in cache)
            own = q[rows[b] : rows[b + 1]].transpose(0, 1)[None]  # (1, H, Nq, d)
            assert own.shape[1] == self.shape[0] and k.shape[1] == self.shape[1]
            o = stages.by_number(3).attend(own, k, v, causal=self.causal)
            found.append(o[0].transpose(0, 1))
        return torch.cat(found)


@pytest.mark.parametrize(("Nq", "causal"), [(1, False), (1, True), (3, False), (3, True)])
def test_flashinfer_is_given_rows_and_pages_as_it_reads_them(monkeypatch, Nq, causal):
    """By a fake: in one piece, from pages in any order, and again after more tokens."""
    names = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    fake = SimpleNamespace(**dict.fromkeys(names, FakeWrapper))
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    FakeWrapper.planned = 0
    peer = load_anywhere("p108_flashinfer.py", monkeypatch)
    q, k, v = (torch.randn(2, H, n, 16) for H, n in ((4, Nq), (2, 40), (2, 40)))
    expected = stages.by_number(3).attend(q, k, v, causal=causal)
    assert torch.equal(peer.attend(q, k, v, causal=causal), expected)
    cache = peer.PagedCache(9, 16, 2, 16, torch.float32, "cpu", sequences=2)
    for first, last in ((0, 23), (23, 40)):  # the sequences' pages lie mixed
        for b in (1, 0):
            cache.append(b, k[b, :, first:last], v[b, :, first:last])
    before = FakeWrapper.planned
    for _ in range(2):
        assert torch.equal(peer.attend_paged(q, cache, [0, 1], causal=causal), expected)
    assert FakeWrapper.planned == before + 1  # one plan while the pages stay as they are
    cache.append(1, k[1, :, :1], v[1, :, :1])
    peer.attend_paged(q, cache, [0, 1], causal=causal)
    assert FakeWrapper.planned == before + 2
    if causal:
        with pytest.raises(ValueError, match="expected a key for each row"):
            peer.attend(torch.randn(1, 2, 5, 16), k[:1, :, :4], v[:1, :, :4], causal=True)


def test_flash_attention_3_is_given_rows_before_heads_and_its_refusal_is_said(monkeypatch):
    def flash_attn_func(q, k, v, causal):
        if q.shape[-1] % 8:
            raise RuntimeError("head_size should be a multiple of 8\nException raised from ...")
        return stages.by_number(3).attend(
            *(x.transpose(1, 2) for x in (q, k, v)), causal=causal
        ).transpose(1, 2)  # fmt: skip

    fake = SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", fake)
    peer = load_anywhere("p107_flash_attention_3.py", monkeypatch)
    q, k, v = (torch.randn(2, H, n, 16) for H, n in ((4, 5), (2, 7), (2, 7)))
    expected = stages.by_number(3).attend(q, k, v, causal=True)
    assert torch.equal(peer.attend(q, k, v, causal=True), expected)
    with pytest.raises(StageUnavailable, match="does not take this problem: head_size should be"):
        peer.attend(*(x[..., :12] for x in (q, k, v)))
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    with pytest.raises(StageUnavailable, match="can't be loaded here"):
        peer.attend(q, k, v)


OURS, CUDNN, FLEX = (8, "triton_split_kv"), (101, "sdpa_cudnn"), (103, "flex_attention")
READ = {"what": "read", "value": 4.5, "device": "cuda", "threads": None, "dtype": None,
        "precision": None}  # fmt: skip


def rows_of(records, ceilings=()):
    """Header -> text, for each row of the table."""
    rungs = [{**r, "title": r["name"]} for r in records]
    table = cell_tables.decode_table({"rungs": rungs}, records, ceilings)
    heads = [column.header for column in table.columns]
    return [dict(zip(heads, row, strict=True)) for row in table.rows]


def test_the_table_has_rates_the_best_peer_the_share_and_what_pages_cost():
    records = [
        made(6, "triton_flash2", 1.0), made(*OURS, 0.5), made(*CUDNN, 0.55), made(*FLEX, 0.6),
        made(*OURS, 0.625, 16), made(*OURS, 0.52, 64),
        made(*OURS, 0.6, nq=8), made(*FLEX, 0.54, nq=8),
    ]  # fmt: skip
    one, eight = rows_of(records, [READ])
    moved = 2 * 128 * 64 * (2 * 32 + 2 * 8 * 8192)
    assert {record["hbm_bytes"] for record in records if record["nq"] == 1} == {moved}
    assert one["B, H, Hk, N, d"] == "64, 32, 8, 8192, 128"
    assert (one["Nq"], eight["Nq"]) == ("1", "8")
    assert one["#6"] == f"{moved / 1e9:.2f}" and one["#8"] == f"{moved / 0.5 / 1e9:.2f}"
    assert one["best peer"] == f"{moved / 0.55 / 1e9:.2f} #101" and one["over it"] == "1.10x"
    assert one["of read"] == f"{100 * moved / 0.5 / 1e9 / 4.5:.0f}%"
    assert (one["pages of 16"], one["pages of 64"]) == ("0.800x", "0.962x")
    assert eight["best peer"].endswith("#103") and eight["over it"] == "0.900x"
    assert (eight["#6"], eight["pages of 16"]) == ("-", "-")
    assert {row["of read"] for row in rows_of(records)} == {"-"}


def test_a_stage_without_a_time_is_in_no_ratio():
    records = [
        made(*OURS, None, status="wrong", reason="max error", samples=0),
        made(*CUDNN, None, status="skipped", reason="takes no such", samples=0),
        made(*FLEX, 0.6), made(*OURS, 0.6, 16),
    ]  # fmt: skip
    [row] = rows_of(records, [READ])
    assert row["#8"] == "wrong" and row["best peer"].endswith("#103")
    assert row["over it"] == row["of read"] == row["pages of 16"] == "-"
    [nobody] = rows_of(records[1:2])
    assert nobody["best peer"] == "-"


def test_the_page_of_a_run_shows_few_rows_apart_from_the_others(tmp_path):
    why = "takes no paged cache"
    skipped = made(*CUDNN, None, 16, status="skipped", reason=why, samples=0)
    few = [made(*OURS, 0.5), made(*CUDNN, 0.55), skipped]
    other = make_run((6, 100), (1024,))
    env = make_bench_env([*few, *other])
    both, alone = text_of(env, [*few, *other]), text_of(env, other)
    assert any("64, 32, 8, 8192, 128" in line for line in both)
    assert "skipped #101: takes no paged cache" in both
    assert [line for line in alone if line in both] == alone
    assert max(map(len, both)) <= 80
    assert plots.plot(env, few, tmp_path) == []


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Write records made up here to a file where the pages look for those of the GPU."""
    monkeypatch.setattr(text, "GPU", tmp_path)
    for page in (comparisons.decoding, comparisons.parts, comparisons.masks):
        assert page().startswith("Not measured yet")

    def write(name, records, **env):
        write_run(tmp_path / name, make_bench_env(records, **env), records)

    return write


def test_the_docs_have_the_table_once_it_is_measured(save):
    records = [made(*OURS, 0.5), made(*CUDNN, 0.55)]
    save("ceilings.jsonl", [])
    save("decode.jsonl", records)
    assert "| 64, 32, 8, 8192, 128 | 1 |" in comparisons.decoding()
    assert "not measured" not in comparisons.decoding()
    more = [made(*OURS, 0.5, page_size, nq=nq) for nq in (1, 2, 8) for page_size in (None, 16)]
    save("decode.jsonl", records, plan=more)
    assert "Of 3 problems 2 are not measured: a run was cut off." in comparisons.decoding()


def test_the_docs_lay_the_model_beside_what_was_measured(save):
    one, large = {"b": 1}, {"b": 64}
    # of 8 programs the model makes 16 parts, of 512 one: "at most 8" is parts_8's time, or its own
    times = {1: 0.9, 4: 0.3, 8: 0.15, 16: 0.1, 24: 0.125}
    records = [made(80 + n, f"parts_{n}", ms, **one) for n, ms in times.items()]
    records += [made(*OURS, 0.11, **one), made(95, "query_heads", 0.3, **one)]
    records += [made(*OURS, 0.5, 16, **one)]  # in pages: no part of it
    late = {"status": "timeout", "reason": "late", "samples": 0}
    records += [made(80, "parts_1", 0.4, **large), made(84, "parts_4", None, **late, **large)]
    records += [made(88, "parts_8", 0.5, **large), made(95, "query_heads", 0.4, **large)]
    records += [made(*OURS, 0.4, **large), made(*OURS, 0.4, nq=8, **large)]
    for who, ms in ((OURS, 0.2), ((80, "parts_1"), 0.5), ((88, "parts_8"), 0.3)):
        records.append(made(*who, ms, b=1, hk=32))  # 32 programs: four parts
    records.append(made(95, "query_heads", 0.2, b=1, hk=32))
    save("splits.jsonl", records)
    header, small, large, four = cells_of(comparisons.parts())
    assert four[2:] == ["4", "200 us", "8", "1.00x", "2.50x", "1.00x", "1.00x"]
    ratios = header.index("model")
    assert small[:ratios] == ["1, 32, 8, 8192, 128", "1", "16", "110 us", "16"]
    assert small[ratios:] == ["1.10x", "9.00x", "1.50x", "3.00x"]
    assert large[1:ratios] == ["1", "1", "400 us", "1"]
    assert large[ratios:] == ["1.00x"] * 4


def test_the_docs_say_what_masks_cost(save):
    records = [
        made(*OURS, ms, b=b, nq=8, causal=causal, seqlens_k=lengths)
        for b in (1, 2)
        for causal, lengths, ms in (
            (False, None, 0.1), (True, None, 0.125 * b), (False, [8192] * b, 0.1),
            (True, [8192] * b, 0.2),
        )
    ]  # fmt: skip
    save("masks.jsonl", records)
    assert cells_of(comparisons.masks())[1:] == [
        ["1, 32, 8, 8192, 128", "8", "100 us", "~0.80x", "~1.00x", "~0.50x"],
        ["2, 32, 8, 8192, 128", "8", "100 us", "~0.40x", "~1.00x", "~0.50x"],
    ]
    assert [row["B, H, Hk, N, d"] for row in rows_of(records[:4])] == [
        f"1, 32, 8, 8192, 128{masks}" for masks in ("", " causal", " lengths", " causal lengths")
    ]


def test_table_4_2_shows_stage_8_beside_the_source_and_the_stages_before_it():
    at = {"dtype": "float32", "precision": "ieee", "paired": True, "device": "cuda"}
    cells = [
        make_cell(stage, f"s{stage}", n=n, time_ms=ms * n, rounds_ms=None, **at)
        for n in (1024, 2048, 16384)
        for stage, ms in ((3, 0.06), (5, 0.04), (8, 0.02))
    ]
    rows = sources.split(cells, "ieee")
    assert len(rows) == 3 and sources.split(cells, "tf32") == []
    assert rows[0][:5] == [1024, "2.1x", "61.4", "41", "20.5"] and rows[2][1] == "-"
    assert rows[0][5].startswith("**3") and rows[0][6].startswith("**2")
