"""A stage with texts replaced is that stage in all else, in a file or a folder of its own."""

import contextlib
import re

import pytest
import torch

import stages
from course.edits import changed, replace_once, texts_of, write_changed
from course.emulator import Misuse, Stuck, emulated


@pytest.mark.parametrize(("text", "found"), [("b", 0), ("a a", 2)])
def test_a_text_that_is_not_there_once_is_refused_with_its_place(text, found):
    with pytest.raises(ValueError, match=f"^mine.py: found {found} times, expected once: 'a'"):
        replace_once(text, "a", "c", "mine.py")
    assert replace_once("a b", "a", "c", "mine.py") == "c b"


def test_a_text_that_a_folder_lacks_is_told_with_its_files_and_the_mistakes_name():
    with pytest.raises(ValueError, match="s09_gluon_hopper: a wait: found 0 times") as raised:
        changed(9, [("no such text", "")], "a wait")
    assert all(file in str(raised.value) for file in texts_of(9))


def test_the_files_of_a_changed_folder_import_each_other(tmp_path):
    path = write_changed(8, [("class PagedCache", "class OtherCache")], tmp_path, "mine")
    with pytest.raises(ImportError, match="PagedCache"):
        stages.load(path)
    assert not any(re.search(r"stages\.s08", text) for text in texts_of(path).values())


COPY = """
import torch
from stages.common.gluon import TensorDescriptor, async_load, fence_async_shared
from stages.common.gluon import gl, gluon, mbarrier
from stages.contract import Stage

STAGE = Stage(number=90, name="copy", title="copy", idea="one tile")


@gluon.jit
def copy_kernel(desc, o_ptr):
    tile = gl.allocate_shared_memory(desc.dtype, [4, 8], desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), 1)
    fence_async_shared()
    mbarrier.expect(bars.index(0), 64)
    async_load(desc, [0, 0], bars.index(0), tile)
    mbarrier.wait(bars.index(0), 0)
    at = gl.arange(0, 4)[:, None] * 8 + gl.arange(0, 8)[None, :]
    gl.store(o_ptr + at, tile.load(None))


def attend(q, k, v):
    o = torch.empty_like(q)
    desc = TensorDescriptor(q, [4, 8], [8, 1], [4, 8], None)
    copy_kernel[(1,)](desc, o)
    return o
"""


@pytest.mark.parametrize(
    ("without", "error"),
    [
        ("nothing", None),
        ("    mbarrier.wait", AssertionError),
        ("    mbarrier.expect", Stuck),
        ("    fence_async", Misuse),
    ],
)
def test_the_emulator_runs_anyones_file_and_finds_what_it_lacks(tmp_path, without, error):
    path = tmp_path / "copy.py"
    path.write_text(COPY, encoding="utf-8")
    q = torch.randn(4, 8).half()
    lines = [line for line in COPY.splitlines(keepends=True) if line.startswith(without)]

    with pytest.raises(error) if error else contextlib.nullcontext():
        for seed in range(8):
            with emulated(path, [(line, "") for line in lines], seed) as stage:
                assert torch.equal(stage.attend(q, q, q), q)
