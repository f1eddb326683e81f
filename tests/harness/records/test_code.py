"""What a stage's files are, and which records an edit of one of them makes stale."""

import shutil

import pytest

from course.report import text
from harness.records import code
from harness.records.jsonl import read

# stage -> the stages and peers whose results its files compute
CONCERNED = {n: {n} for n in range(6)} | {
    3: {3, 10}, 6: {6, 7, 9, 10}, 7: {7, 9, 10}, 8: {8, 9, 10}, 9: {9, 10}, 10: {10},
}  # fmt: skip
CONCERNED |= {twin: {twin} for twin in ("cpu 4", "cpu 5")}  # written once more for a CPU
ALSO = {"paged_cache.py": {108}}  # a peer reads the same pages
ALONE = "first.py"  # a stage's smallest version, a row of its own


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the stages and peers, to be edited."""
    for folder in ("stages", "harness/peers", "csrc"):
        shutil.copytree(code.ROOT / folder, tmp_path / folder)
    monkeypatch.setattr(code, "ROOT", tmp_path)
    monkeypatch.setattr(code, "STAGES", tmp_path / "stages")
    monkeypatch.setattr(code, "PEERS", tmp_path / "harness" / "peers")


def codes():
    """number -> the digest of what is behind it, of every stage and peer; "cpu 4" of a twin."""
    files = [*code.built_in_files(), *code.peer_files()]
    found = {code.read_declared(path)["number"]: code.code_of(path) for path in files}
    return found | {f"cpu {code.number_of(path)}": code.code_of(path) for path in code.twin_files()}


def files_of(stage):
    """The files of a stage in CONCERNED."""
    return code.files_of(code.twin_file(int(stage[4:])) if isinstance(stage, str) else stage)


def test_every_file_in_stages_belongs_to_one_stage_or_is_shared():
    files = [path for stage in CONCERNED for path in files_of(stage)]
    assert len(files) == len(set(files))
    assert all(code.part_of(path) for path in files if code.STAGES in path.parents)
    others = {*code.STAGES.rglob("*.py")} - {*files}
    shared = {code.STAGES / name for name in ("__init__.py", "contract.py", "cpu/__init__.py")}
    assert others - shared == {*code.STAGES.glob("common/*.py")}


def test_a_folders_first_file_comes_first_and_csrc_is_stage_2s():
    assert [path.name for path in code.files_of(2)][1:] == [
        "value_graph.hpp", "attention.cpp", "bindings.cpp",
    ]  # fmt: skip
    for number in (7, 8, 9, 10):
        first, *rest = code.files_of(number)
        assert (first.name, code.number_of(first)) == (code.FIRST, number)
        assert code.files_of(first.parent) == code.files_of(first) == [first, *rest]
    with pytest.raises(KeyError):
        code.files_of(99)


@pytest.mark.parametrize("stage", CONCERNED)
def test_an_edit_of_any_file_of_a_stage_marks_exactly_what_it_concerns(stage, copied):
    for path in files_of(stage):
        before, whole = codes(), path.read_bytes()
        alone = code.code_of(path) if path.name == ALONE else ""
        comment = b"# a comment\n" if path.suffix == ".py" else b""
        path.write_bytes(whole + comment)
        assert codes() == before
        path.write_bytes(whole + b"edited = 1;\n")
        after = codes()
        marked = {n for n in after if after[n] != before[n]}
        own = set() if path.name == ALONE else CONCERNED[stage]
        assert marked == own | ALSO.get(path.name, set()), path.name
        assert path.name != ALONE or code.code_of(path) != alone
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "files",
    [
        {"mine.py": "import helped", "helped.py": ""},
        {"mine.py": "from helped import x", "helped/__init__.py": "from . import y",
         "helped/y.py": ""},
        {"mine/__init__.py": "from .k import x", "mine/k.py": "import helped", "helped.py": ""},
    ],
    ids=["a file", "a package", "beside a folder"],
)  # fmt: skip
def test_what_somebodys_stage_imports_from_beside_it_is_behind_it(tmp_path, files):
    for name, imports in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        whole = f"import torch\nfrom stages.contract import Stage\n{imports}\n"
        (tmp_path / name).write_text(whole)
    first = code.first_file(tmp_path / next(iter(files)).partition("/")[0])
    assert {*code.behind(first)} == {tmp_path / name for name in files}
    (tmp_path / "torch.py").touch()
    for name in files:
        before, path = code.code_of(first), tmp_path / name
        path.write_text(path.read_text() + "edited = True\n")
        assert code.code_of(first) != before


def test_what_computes_nothing_marks_nothing(copied):
    before = codes()
    for path in code.STAGES.glob("common/*.py"):
        path.write_text("edited = True\n")
    after = codes()
    # what the kernels of stages 4 to 9 share is computed with
    assert {n for n in after if after[n] != before[n]} == {4, 5, 6, 7, 8, 9, 10, 108}


def test_a_stage_that_was_edited_since_is_named_and_one_of_unknown_code(copied):
    env, _ = read(text.GPU / "table-4.3.jsonl")
    for stage in env["rungs"]:
        kind, place = ("s", code.STAGES) if stage["stage"] < 100 else ("p", code.PEERS)
        [path] = place.glob(f"{kind}{stage['stage']:02d}_{stage['name']}*")
        stage["code"] = code.code_of(path)
    assert "since" not in text.machine(env)
    for name in ("s00_scalar_autograd", "s05_triton_online"):  # the first isn't in that table
        assert "since" not in text.machine(env)
        with (code.STAGES / f"{name}.py").open("a") as file:
            file.write("edited = True\n")
    assert text.machine(env).endswith("; stage 5 edited since.")
    [stage] = [stage for stage in env["rungs"] if stage["stage"] == 4]
    stage["code"] = ""
    assert text.machine(env).endswith("; stages 4, 5 edited since.")


OLD = '''"""Words."""

STAGE = Stage(number=9, title="a title", idea="an idea", still_hurts="this " "and that")
SHOWN = Plot(title="a title")

def attend(q):
    """More words."""
    if q is None:
        raise ValueError(f"q: got {q}")
    return q * 2  # why
'''
WORDS = OLD.replace("Words", "Others").replace("More", "\n").replace("# why", "# because\n\n")
WORDS = WORDS.replace("got {q}", "expected another")
WORDS = WORDS.replace('9, title="a', '9, title="another').replace("and that", "or this")


def test_words_are_no_edit_and_code_is():
    assert code.digest(WORDS) == code.digest(OLD)
    for edit in (("* 2", "* 3"), ("is None", "is not None"), ("ValueError", "TypeError"),
                 ("9", "8"), ('Plot(title="a', 'Plot(title="b'), ('"an idea"', "f()")):  # fmt: skip
        assert code.digest(OLD.replace(*edit)) != code.digest(OLD), edit
    # a constant that stands where a docstring may is one; anywhere else it is code
    assert code.digest("x = 1\n'a'") != code.digest("x = 1\n'b'")
