"""What is read from a stage's text is what an import of it says."""

import pytest

import stages
from harness.records.code import built_in_files, peer_files, read_declared, twin_files

FILES = [*built_in_files(), *twin_files(), *peer_files()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_read_is_what_an_import_says(path):
    stage = stages.load(path).STAGE
    declared = read_declared(path)
    assert {"number", "name", "title", "idea"} <= declared.keys()
    assert type(stage)(**declared) == stage


@pytest.mark.parametrize(
    "text",
    ["", "x = 1\n", "STAGE = make()\n", "stage = Stage(number=1)\n", "STAGE = Stage(1, 'name')\n"],
)
def test_a_file_without_a_declaration_is_refused(tmp_path, text):
    path = tmp_path / "s90_mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"s90_mine\.py: no STAGE"):
        read_declared(path)
