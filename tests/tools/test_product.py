"""The product that stage 9 is held against has as many FLOPs as the problem, and takes turns."""

import product
import pytest
from made_up import write_run

from course.report import hopper, text
from harness.problems.cost import flops
from harness.problems.problem import Problem
from harness.records.jsonl import read


@pytest.fixture
def tool(monkeypatch):
    for name, less in (("HEADS_TIMES_D", 32), ("BATCH_TIMES_N", 64), ("WARMUP", 1), ("ROUNDS", 3)):
        monkeypatch.setattr(product, name, less)
    return product


@pytest.mark.parametrize(
    ("b", "h", "n", "d"), [(4, 16, 4096, 128), (1, 32, 16384, 64), (1, 3, 7, 5)]
)
def test_the_product_has_the_flops_of_the_problem(tool, b, h, n, d):
    problem = Problem("normal", 0, b, h, h, n, n, d, "float32", "ieee", False, None, "cpu")
    rows, inner, columns = tool.shape_of(b * h * n * d, n)
    assert 2 * rows * inner * columns == flops(problem)
    assert rows <= columns
    if n >= 4096:
        assert rows == columns == 8192


def test_each_problem_has_a_record_and_a_row(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "GPU", tmp_path)
    assert hopper.share().startswith("Not measured yet")
    out = tmp_path / "hopper-product.jsonl"
    tool.main(3, [32, 64], [16], "cpu", out)
    env, records = read(out, "share")
    assert [rung["stage"] for rung in env["rungs"]] == [3]
    assert [record["nk"] for record in records] == [32, 64]
    for record in records:
        assert len(record["rounds_ms"]) == len(record["product_rounds_ms"]) == 3
    out.unlink()
    records[0] |= {"flops": 10**12, "time_ms": 2.0, "product_ms": 1.0}
    records[0] |= {"rounds_ms": [1.0, 1.0, 5.0], "product_rounds_ms": [0.2, 0.4, 3.0]}
    write_run(out, env, records[:1])
    assert "| d = 16, N = 32 | 500 | 1000 | 40% (30-50) |" in hopper.share()


def test_it_says_why_it_can_not_measure_and_leaves_no_file(tool, tmp_path):
    out = tmp_path / "share.jsonl"
    with pytest.raises(SystemExit, match=r"stage 9: .*GPU"):
        tool.main(9, [32], [16], "cpu", out)
    assert not out.exists()
    out.touch()
    with pytest.raises(SystemExit, match=r"is there already"):
        tool.main(3, [32], [16], "cpu", out)
    assert not out.read_bytes()
