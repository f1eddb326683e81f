"""Files that are no records, or nearly: one line says so, whatever command reads them."""

import json
from itertools import cycle
from pathlib import Path

import pytest

from attention_ladder.models import views
from course.report import text
from harness.records.jsonl import parse, read
from harness.records.schema import SCHEMA_VERSION, BadRecord, as_today
from ladder.app import main

RESULTS = Path(__file__).parents[3] / "results"
ESCAPES = "\x1b[2J\x1b]0;mine\x07\r\n\x9b31m\u202e\u2028"
DEEP = 10**5
NESTED = json.loads("[" * 200 + "]" * 200)
NASTY = [
    None, True, float("nan"), float("inf"), -1, 0, 0.0, -0.5, 5e-324, 1e308, 10**400, 10**30, "",
    "x" * 10**6, ESCAPES, "\ud800", "[/red]", "$x^{$", [], {}, [None], [[]], {"a": None}, NESTED,
    {ESCAPES: ESCAPES}, [10**400], [float("nan")],
]  # fmt: skip

# kind -> a committed file, how many of its records are enough, the commands that show it
KINDS = {
    "cell": ("cpu/gradients.jsonl", 4, [("table", *form) for form in (
        (), ("--format", "csv"), ("--format", "json"), ("--format", "markdown"))]),
    "bench": ("h200/bench-steps.jsonl", 3, [("bench", "--show")]),
    "train": ("h200/train.jsonl", 3, [("train", "--show")]),
    "ceiling": ("h200/ceilings.jsonl", 5, [
        ("roofline", RESULTS / "h200/gradients.jsonl", "--out", "plots", "--ceilings"),
        ("bench", "--show", RESULTS / "h200/bench-steps.jsonl", "--ceilings")]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def show(capsys):
    def run(*arguments):
        """Carry a command out in this process; its exit code, where it said no more than it may."""
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        for line in (out + err).split("\n"):  # splitlines would hide what is to be found
            assert line.replace("\N{NO-BREAK SPACE}", " ").isprintable(), (arguments, line)
        if ended.value.code == 2:
            assert out == "" and err.startswith("ladder: ") and err.count("\n") == 1, (out, err)
            assert len(err) < 1000
        else:
            assert ended.value.code in (0, 1) and err == ""
            if "json" in arguments:
                json.loads(out, parse_constant=pytest.fail)
        return ended.value.code

    return run


def lines_of(kind):
    """The lines of a committed file of that kind, as bytes, and the records in them."""
    name, count, _ = KINDS[kind]
    lines = (RESULTS / name).read_bytes().splitlines(keepends=True)[: 1 + count]
    return lines, [as_today(json.loads(line)) for line in lines]


GARBAGE = {
    "nothing": b"", "a blank line": b"\n", "no end": b"{}", "null": b"null\n", "a list": b"[]\n",
    "a text": b'"x"\n', "a number": b"7\n", "not a number": b"NaN\n", "an object": b"{}\n",
    "another's": b'{"a": 1}\n', "no kind": b'{"kind": null}\n', "a list as kind": b'{"kind": []}\n',
    "an unknown kind": b'{"kind": "\\u001b[2J"}\n', "a kind alone": b'{"kind": "env"}\n',
    "nested lists": b"[" * DEEP + b"]" * DEEP + b"\n",
    "nested objects": b'{"kind":' * DEEP + b"1" + b"}" * DEEP + b"\n",
    "open lists": b"[" * DEEP + b"\n",
    "a kind of nested lists": b'{"kind": ' + b"[" * DEEP + b"]" * DEEP + b"}\n",
    "5000 digits": b'{"kind": ' + b"7" * 5000 + b"}\n", "10 to the 400": b'{"kind": 1e400}\n',
    "no UTF-8": b"\xff\xfe\x00\n", "UTF-16": '{"kind": "env"}\n'.encode("utf-16"),
    "half a surrogate pair": b'{"kind": "\\ud800"}\n', "zeros": bytes(10**4) + b"\n",
    "escape codes": b"\x1b[2J\x1b]0;mine\x07\n", "a picture": b"\x89PNG\r\n\x1a\n" * 9,
    "another's CSV": b"a,b\n1,2\n", "two objects": b'{"kind": "env"}{"kind": "env"}\n',
    "a carriage return": b'{"kind":\r"env"}\n', "single quotes": b"{'kind': 'env'}\n",
    "a long line": b"x" * 10**6 + b"\n",
}  # fmt: skip


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("kind", KINDS)
def test_garbage_instead_of_a_line_is_refused_in_one(tmp_path, show, kind, garbage):
    lines, _ = lines_of(kind)
    path = tmp_path / "run.jsonl"
    for whole in ([garbage], [garbage, *lines[1:]], [lines[0], garbage, *lines[1:]]):
        path.write_bytes(b"".join(whole))
        if b"".join(whole) != b"".join(lines):  # no bytes between two lines are nothing
            assert show(*KINDS[kind][2][0], path) == 2


def mutants(record):
    """(Where, a copy of `record` in which one value is nasty, and left away), again and again."""
    for name in record:
        yield name, {key: value for key, value in record.items() if key != name}
        for value in NASTY:
            yield name, record | {name: value}
        inner = record[name]
        if name in ("plan", "rungs") and inner:
            for where, mutant in mutants(inner[0]):
                yield f"{name}[0].{where}", record | {name: [mutant, *inner[1:]]}
        elif name in ("losses", "rounds_ms", "seqlens_k") and inner:
            for value in NASTY:
                yield f"{name}[0]", record | {name: [value, *inner[1:]]}
        elif name == "arguments" and inner:
            for key in ("suite", "budget"):
                for value in NASTY:
                    yield f"{name}.{key}", record | {name: inner | {key: value}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_nasty_value_in_any_field_is_refused_or_shown(tmp_path, show, kind, monkeypatch):
    monkeypatch.setattr(views, "plot", lambda *_: False)  # has its own test, below
    _, records = lines_of(kind)
    path = tmp_path / "run.jsonl"
    commands = cycle(KINDS[kind][2])
    shown = refused = 0
    before = ""
    for index in (0, 1):
        for where, mutant in mutants(records[index]):
            changed = [*records[:index], mutant, *records[index + 1 :]]
            try:
                parse(json.dumps(mutant).encode())  # refuses most; the files above take their time
                read(save(path, changed), None)
            except BadRecord as error:  # a command shows just that: the test above
                refused += 1
                said = str(error)
                assert said.isprintable() and len(said) < 1000, where
            else:
                shown += 1
                if where != before:  # of a field's values, one: a command takes its time
                    show(*next(commands), path)
                before = where
    assert shown and refused > shown


TITLES = ("$x^{$", "[/red]", "_", "x" * 200)
# command -> a committed file, and which of its records: there is a stage for each of the titles
OF_FOUR = {
    "plot": ("cpu/gradients.jsonl", slice(4)), "bench": ("h200/bench-004.jsonl", slice(4)),
    "train": ("h200/train.jsonl", slice(0, 12, 3)), "roofline": ("h200/table-4.1.jsonl", slice(40)),
}  # fmt: skip


def change(records, **changes):
    """The records with titles and values as no honest run has them."""
    env = records[0]
    stages = list(dict.fromkeys((record["stage"], record["name"]) for record in records[1:]))
    titles = dict(zip(stages, cycle(TITLES)))
    assert len(stages) >= len(TITLES)
    rungs = [r | {"title": titles.get((r["stage"], r["name"]), "-")} for r in env["rungs"]]
    env |= {"rungs": rungs}
    values = {name: value for name, value in changes.items() if name in records[1]}
    return [env, *(record | values for record in records[1:])]


def save(path, records):
    """A results file of these records, of whatever kind they are."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    "changes",
    [{"nk": 0}, {"nk": 2**64}, {"nk": "64"}, {"hk": 3}, {"seqlens_k": []}, {"seqlens_k": [10**9]},
     {"paired": None}, {"stage": 77}, {"name": "nobody"}, {"extra": 1}, {"direction": "up"}],
    ids=str,
)  # fmt: skip
def test_a_malformed_plan_is_not_gone_on_with(tmp_path, show, changes):
    _, (env, *cells) = lines_of("cell")
    for plan in ([env["plan"][0] | changes, *env["plan"][1:]], [{}], [env["plan"][0], [changes]]):
        path = save(tmp_path / "run.jsonl", [env | {"plan": plan}, *cells])
        assert show("run", "--resume", path) == 2


@pytest.mark.parametrize(
    "changes",
    [{"budget": value} for value in ("60", None, 0, -1.0, [])]
    + [{"memory": value} for value in ("much", 7, ["4G"], ESCAPES)],
    ids=str,
)  # fmt: skip
def test_arguments_that_no_run_was_begun_with_are_refused(tmp_path, show, changes):
    _, (env, *cells) = lines_of("cell")
    env["arguments"] |= changes
    assert show("run", "--resume", save(tmp_path / "run.jsonl", [env, *cells])) == 2
    assert show("table", tmp_path / "run.jsonl") == 0  # which asks for neither


def test_a_record_beside_the_plan_is_not_gone_on_with(tmp_path, show, capsys):
    _, (env, *cells) = lines_of("cell")
    path = save(tmp_path / "run.jsonl", [env | {"plan": env["plan"][1:]}, *cells])
    assert show("run", "--resume", path) == 2


def test_a_file_of_a_newer_ladder_is_refused_in_a_line_that_says_so(tmp_path):
    _, (env, *cells) = lines_of("cell")
    env |= {"schema": SCHEMA_VERSION + 1, "a new field": 1}
    with pytest.raises(BadRecord, match=r"line 1 .*got 2, expected 1, .*older than the file"):
        read(save(tmp_path / "run.jsonl", [env, *cells]))


def test_results_that_lack_what_a_page_shows_are_named(tmp_path, show, monkeypatch):
    lines, _ = lines_of("cell")
    (tmp_path / "cpu").mkdir()
    for text_of_it in (b"".join(lines), b"garbage\n"):
        (tmp_path / "cpu" / "steps.jsonl").write_bytes(text_of_it)
        monkeypatch.setattr(text, "CPU", tmp_path / "cpu")
        assert show("readme", "--check") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "command"),
    [("cell", ("plot", "--out", "plots")), ("train", ("train", "--show")),
     ("bench", ("bench", "--plots", "plots", "--show")),
     ("cell", ("roofline", "--out", "plots", "--ceilings", RESULTS / "h200/ceilings.jsonl"))],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)  # fmt: skip
def test_pictures_of_extreme_values_and_odd_titles_are_drawn(tmp_path, show, kind, command):
    """Each title is that of a stage in the same picture."""
    name, chosen = OF_FOUR[command[0]]
    env, *lines = (RESULTS / name).read_text().splitlines()
    records = [json.loads(line) for line in (env, *lines[chosen])]
    path = tmp_path / "run.jsonl"
    for extreme in ({}, {"time_ms": 1e-9, "err_f64_max": 1e308, "nk": 2**63 - 1},
                    {"time_ms": 1e15, "peak_bytes": 10**36, "flops": 10**36, "val_loss": -1e15,
                     "losses": [1e15] * 500}):  # fmt: skip
        changed = change(records, **extreme)
        read(save(path, changed), None)
        assert show(*command, path) in (0, 1)
