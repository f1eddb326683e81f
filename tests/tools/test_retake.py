"""The command printed for a record asks for what the record's own env line says."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import retake

from harness.records.code import built_in_files, code_of, number_of, peer_files, read_declared
from harness.records.jsonl import read
from ladder import app, bench, old, run

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("results/*/*.jsonl"))


@pytest.mark.slow
def test_each_record_of_a_run_or_a_bench_is_asked_for_as_it_was(tmp_path, monkeypatch):
    asked = []
    for module, name in ((bench, "new_bench"), (run, "new_run")):
        monkeypatch.setattr(module, name, lambda *given: asked.append(given) or 0)
    made = 0
    for path in FILES:
        kept = old.arguments(read(path, None)[0]["arguments"])
        if kept.get("command", "run") not in retake.COMMANDS or "text" in kept:
            with pytest.raises(ValueError, match="neither ladder run nor ladder bench"):
                retake.commands(path, tmp_path)
            continue
        command = shlex.split(retake.commands(path, tmp_path)[-1])
        with pytest.raises(SystemExit, match="0"):
            app.main(command[1:])
        arguments, stages, out, _ = asked.pop()
        usual = retake.COMMANDS[command[1]]
        want = {**usual, **{x: kept[x] for x in kept if x in usual}}
        if want["suite"]:  # whose problems have their own inputs
            arguments["inputs"] = want["inputs"]
        assert arguments == want, path
        gone = [line for line in retake.commands(path, tmp_path) if line.startswith("# without")]
        assert len(stages) + len(gone) == len(kept.get("stage", []))
        assert out == tmp_path / path.name
        made += 1
    assert made > 20
    assert asked == []


@pytest.mark.slow
def test_only_records_whose_stages_were_edited_are_asked_for(tmp_path):
    text = (ROOT / "results" / "h200" / "hopper.jsonl").read_text(encoding="utf-8")
    first, *rest = text.splitlines(keepends=True)
    env = json.loads(first)
    files = {number_of(path): path for path in built_in_files()}
    files |= {read_declared(path)["number"]: path for path in peer_files()}
    for stage in env["rungs"]:
        stage["code"] = code_of(files[stage["stage"]])
    for name, changed in (("kept", {}), ("edited", {"code": "0" * 64})):
        env["rungs"][0] |= changed
        (tmp_path / f"{name}.jsonl").write_text("".join([json.dumps(env) + "\n", *rest]))
    made = [str(tmp_path / f"{name}.jsonl") for name in ("kept", "edited")]
    command = [sys.executable, retake.__file__, "--edited", *made]
    said = subprocess.check_output(command, text=True)
    assert f"# {made[1]}" in said and made[0] not in said
