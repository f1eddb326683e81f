"""`ladder train` broken off: what was trained to its end is there, and is shown."""

import signal

import pytest
from ladder_command import Started

from harness.records.jsonl import WriteFailed, Writer, read
from ladder import app

TINY = ("train", "--stage", "3", "--device", "cpu", "--seeds", "40", "--steps")


@pytest.mark.slow
def test_ctrl_c_leaves_a_valid_file_a_table_and_a_plot_of_what_is_done(tmp_path):
    path = tmp_path / "run.jsonl"
    with Started(*TINY, "30", "--out", path, log=tmp_path / "log") as run:
        run.wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= 3, "two seeds")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(60) == 130
        assert run.wait_until_gone() == []
        text = run.text()
    assert "Traceback" not in text
    assert "SDPA, flash" in text and f"records: {path}" in text
    assert path.read_bytes().endswith(b"\n")
    env, records = read(path, "train")
    assert 2 <= len(records) < len(env["plan"]) == 120
    assert f"{len(records)} seeds" in text or len(records) > 40
    picture = tmp_path / "run-plots" / "loss.png"
    assert f"plot:    {picture}" in text and picture.stat().st_size > 0


@pytest.mark.slow
def test_ctrl_c_before_the_first_end_says_that_there_is_nothing(tmp_path):
    path = tmp_path / "run.jsonl"
    with Started(*TINY, "99999", "--out", path, log=tmp_path / "log") as run:
        run.wait_for(lambda: path.exists() and run.at_work(), "its file, and the first training")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(60) == 130
        assert run.wait_until_gone() == []
        # a process that is just being started may have words of its own, as Python ends it
        assert f"{path}: nothing was trained to its end" in run.text().splitlines()


@pytest.mark.slow
def test_a_full_disk_is_said_below_what_is_done(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run.jsonl"

    def append(writer, record, really=Writer.append):
        if path.read_bytes().count(b"\n") > 2:
            raise WriteFailed(f"{path} can't be written any more: No space left on device")
        really(writer, record)

    monkeypatch.setattr(Writer, "append", append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # --device cpu sets it, here in this process
    with pytest.raises(SystemExit) as ended:
        app.main([*TINY, "2", "--out", str(path)])
    assert ended.value.code == 2
    said = capsys.readouterr()
    last = f"ladder: {path} can't be written any more: No space left on device"
    assert said.err.splitlines()[-1] == last
    assert "SDPA, flash" in said.out and f"records: {path}" in said.out
    assert not (tmp_path / "run-plots").exists()  # on a full disk, one error is enough
    assert len(read(path, "train")[1]) == 2
