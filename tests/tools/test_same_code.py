"""What tools/same_code.py notes in records: the code of now, for a stage that came out the same."""

import json

import same_code


def test_only_records_with_the_code_of_before_are_noted(tmp_path):
    (tmp_path / "gpu").mkdir()
    rest = '{"kind": "cell", "x": 1.50}\n'
    for name, codes in {"same": "ab", "older": "xb", "none": ""}.items():
        stages = [{"stage": 6 + i, "code": code} for i, code in enumerate(codes)]
        env = {"kind": "env", "rungs": stages}
        (tmp_path / "gpu" / f"{name}.jsonl").write_text(json.dumps(env) + "\n" + rest)
    changed = same_code.note({6: "a", 7: "b"}, {6: "A", 7: "B"}, {6}, tmp_path)
    assert changed == ["gpu/same.jsonl"]
    first, *others = (tmp_path / "gpu" / "same.jsonl").read_text().splitlines(keepends=True)
    assert [stage["code"] for stage in json.loads(first)["rungs"]] == ["A", "b"]
    assert others == [rest]
    older, *_ = (tmp_path / "gpu" / "older.jsonl").read_text().splitlines()
    assert [stage["code"] for stage in json.loads(older)["rungs"]] == ["x", "b"]
