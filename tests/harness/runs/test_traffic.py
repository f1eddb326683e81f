"""`ladder io`: what ncu prints is read, added up and shown; where it can't be, a line says so."""

import pytest
from made_up import make_cell

from harness.records.schema import PROBLEM, check_record
from harness.runs import traffic
from harness.views import machine

CSV = """==PROF== Connected to process 7
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"
"","","byte","byte","ns"
"0","void at::native::vectorized_elementwise_kernel<8, F>(int)","1,000","0","2,000"
"1","attention_kernel","3000000","1000000","4000000"
==PROF== Disconnected
"""
ENV = {"rungs": [{"stage": 3, "name": "torch_three_gemm", "title": "torch, three GEMMs"},
                 {"stage": 5, "name": "triton_online", "title": "Triton Online"}]}  # fmt: skip


def io_record(kernel, stage=5, name="triton_online", **changes):
    cell = make_cell(stage, name)
    fields = {field: cell[field] for field in ("stage", "name", *PROBLEM)}
    record = {
        "kind": "io", **fields, "launch": 0, "kernel": kernel, "time_ms": 2.0,
        "dram_read_bytes": 3 << 30, "dram_write_bytes": 1 << 30, "predicted_bytes": 4 << 30,
    }  # fmt: skip
    check_record(record | changes)
    return record | changes


def test_ncus_page_is_read_in_base_units():
    assert traffic.parse(CSV) == [
        {
            "kernel": "void at::native::vectorized_elementwise_kernel<8, F>(int)",
            "dram_read_bytes": 1000.0, "dram_write_bytes": 0.0, "time_ns": 2000.0,
            "waits": {}, "units": {},
        },
        {
            "kernel": "attention_kernel",
            "dram_read_bytes": 3e6, "dram_write_bytes": 1e6, "time_ns": 4e6,
            "waits": {}, "units": {},
        },
    ]  # fmt: skip


def test_waits_are_shares_of_a_warps_time_and_units_of_their_peak():
    stalled = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    columns = {
        stalled.format("wait"): "3.0", stalled.format("math_pipe_throttle"): "1.0",
        stalled.format("sleeping"): "0", stalled.format("gmma"): "n/a",
        "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "25",
    }  # fmt: skip
    names, units, first, second = CSV.splitlines()[1:5]
    lines = [
        ",".join([names, *(f'"{name}"' for name in columns)]), units + '""' * len(columns),
        *(",".join([row, *(f'"{x}"' for x in columns.values())]) for row in (first, second)),
    ]  # fmt: skip
    for counts in traffic.parse("\n".join(lines)):
        assert counts["waits"] == {"wait": 0.75, "math_pipe_throttle": 0.25}
        assert counts["units"] == {"xu": 0.25}


def test_a_counter_that_ncu_lacks_is_named():
    with pytest.raises(traffic.NoProfiler, match="dram__bytes_write"):
        traffic.parse(CSV.replace("dram__bytes_write.sum", "something.else"))


@pytest.mark.parametrize(
    ("kernel", "short", "piece"),
    [
        ("void at::vectorized_elementwise_kernel<8, at::F<x>>(int)",
         "vectorized_elementwise_kernel", "scale q"),
        ("void <unnamed>::softmax_warp_forward<c10::Half, c1>(x)", "softmax_warp_forward",
         "softmax"),
        ("void at::<unnamed>::cunn_SoftMaxForwardReg<c10::Ha", "cunn_SoftMaxForwardReg", "softmax"),
        ("nvjet_sm90_hsh_64x256_64x5", "nvjet_sm90_hsh_64x256_64x5", "GEMM"),
        ("attention_kernel", "attention_kernel", "fused"),
    ],
)  # fmt: skip
def test_kernels_have_names_for_people(kernel, short, piece):
    assert machine.short(kernel) == short
    assert machine.piece(kernel) == piece


def test_the_table_adds_a_stages_kernels_up():
    records = [
        io_record("gemm", 3, "torch_three_gemm"),
        io_record("softmax", 3, "torch_three_gemm", launch=1),
        io_record("attention_kernel"),
    ]
    lines = machine.traffic_table(ENV, records).text(100).splitlines()
    three = next(line for line in lines if line.startswith("3 "))
    # 6 GB read, 2 GB written in 4 ms, twice what was predicted
    assert three.split()[-8:] == ["6", "GB", "2", "GB", "2.15", "4", "GB", "2.00"]
    assert next(line for line in lines if line.startswith("5 ")).split()[-1] == "1.00"
    assert max(map(len, lines)) <= 100
