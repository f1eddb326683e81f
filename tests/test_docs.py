"""README, docs and notebooks keep what they promise: links lead somewhere, commands run, figures
are made from records.

A command is a line of a fenced `sh` block, or inline code that begins with `ladder` or `python`
and has arguments. It is run in a folder of its own, with the files that it names put there first,
and must end as its page says: exit code 0, or the N of a comment "exit code N". A shell runs it;
calls of `ladder` and nothing else are carried out in one process. What needs a GPU, as its line
says, isn't run, nor what NOT_RUN lists; of those the options are checked.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from ladder_command import environ, in_turn, installed, one_process

from harness.records.code import built_in_files, read_declared
from harness.records.environment import own_files
from harness.records.jsonl import read
from ladder import app

ROOT = Path(__file__).parents[1]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [
    ROOT / "README.md",
    CONTRIBUTING,
    ROOT / "harness" / "data" / "README.md",
    *own_files("docs/**/*.md"),
    *own_files("notebooks/*.ipynb"),
]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.M | re.S)
ALONE = re.compile(r"(\S*/)?ladder [^;|&<>$\n]+")  # a call of `ladder`, nothing for a shell to do
PATIENCE = 200  # seconds; a safety net, no test is decided by it


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def text_of(page):
    """The Markdown of a page; of a notebook, that of its Markdown cells."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(x["source"]) for x in cells if x["cell_type"] == "markdown")


def prose_of(page):
    """The text of a page without its code, fenced or inline."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text_of(page)))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# ---- length

GENERATED = re.compile(r"<!-- begin ([\w.-]+) -->.*?<!-- end \1 -->", re.S)
PICTURE = re.compile(
    r"<picture>\n"
    r' *<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\n'
    r' *<img src="([^"]+)" alt="([^"]+)">\n'
    r"</picture>"
)
MOST_WORDS = {"docs/hopper.md": 1800, "docs/lecturer.md": 1800}  # by hand
MOST_ON_A_PAGE = {"docs/hopper.md": 3400}  # with what is generated
# By hand. Several GPUs and the climb of the backward pass came when it was full: their pages are
# counted apart
MOST_IN_ALL = 25_000
APART = {"docs/walkthrough/10-ring.md": 500, "docs/ring.md": 600, "docs/backward.md": 650}


def words(text):
    """How many words a text has: runs of characters without a space, and with a letter or digit."""
    return len(re.findall(r"\S*\w\S*", text))


def by_hand(text):
    """A page's text without code blocks, pictures' descriptions, and what is made from records."""
    return PICTURE.sub("", FENCE.sub("", GENERATED.sub("", text)))


def test_what_is_written_by_hand_stays_short():
    """Tables typed by hand count, notebooks don't; `pytest -s` shows the words of every page."""
    pages = [*PAGES, *(ROOT / x for x in ("CHANGELOG.md", "notebooks/README.md",
                                          "course/lab/handout.md"))]  # fmt: skip
    texts = {name_of(page): text_of(page) for page in pages if page.suffix == ".md"}
    hand = {name: words(by_hand(text)) for name, text in texts.items()}
    table = [f"{count:6} by hand, {words(texts[name]):6} in all: {name}"
             for name, count in sorted(hand.items())]  # fmt: skip
    print(*table, f"{sum(hand.values()):6} by hand", sep="\n")
    assert {name: hand[name] for name, most in MOST_WORDS.items() if hand[name] > most} == {}
    assert [x for x, most in MOST_ON_A_PAGE.items() if words(texts[x]) > most] == []
    assert {name: hand[name] for name, most in APART.items() if hand[name] > most} == {}
    assert sum(count for name, count in hand.items() if name not in APART) <= MOST_IN_ALL


# ---- links


def links_of(page):
    """Every target that a page links to or shows."""
    text = prose_of(page)
    found = re.findall(r"\]\(<?([^)\s>]+)>?[^)]*\)", text)
    return found + re.findall(r"\b(?:src|srcset|href)=\"([^\"\s]+)[^\"]*\"", text)


def anchors_of(page):
    """The anchors that a code host gives the headings of a page; of HTML, its sections'."""
    if page.suffix == ".html":
        return re.findall(r'<section id="([\w-]+)"', page.read_text(encoding="utf-8"))
    anchors = []
    for heading in re.findall(r"^#+ +(.+?) *#*$", FENCE.sub("", text_of(page)), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        again = anchors.count(slug)
        anchors.append(f"{slug}-{again}" if again else slug)
    return anchors


def dead(page, target):
    """Why a link of `page` leads nowhere, or None."""
    if re.match(r"https?://|mailto:|data:", target):
        return None
    path, _, anchor = target.partition("#")
    there = (page.parent / path).resolve() if path else page
    if not there.exists():
        return f"{target}: no such file"
    if ROOT not in (there, *there.parents):
        return f"{target}: outside the checkout"
    if anchor and anchor.partition("?")[0] not in anchors_of(there):  # after it, the page's state
        return f"{target}: no such heading; there are {', '.join(anchors_of(there))}"
    return None


@every_page
def test_links_lead_somewhere(page):
    assert [why for target in links_of(page) if (why := dead(page, target))] == []


def test_every_stage_has_its_page_and_every_page_is_linked():
    """A page that nothing leads to is read by nobody."""
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in links_of(page)
        if "://" not in target
    }
    pages = [page for page in PAGES if page.name != "README.md" and page.suffix == ".md"]
    assert [name_of(page) for page in pages if page not in linked] == []
    stages = {str(read_declared(path)["number"]) for path in built_in_files()}
    walked = {path.name.split("-")[0] for path in own_files("docs/walkthrough/[0-9]*.md")}
    assert stages == walked


# ---- commands


@dataclass(frozen=True)
class Command:
    """A command as its page has it, the exit code and the GPU that it needs, as the page says."""

    page: Path
    text: str
    code: int = 0
    gpu: bool = False

    @property
    def calls(self):
        """The arguments of each call of `ladder` in it."""
        found = re.findall(r"(?:^|[\s/])ladder +([^;|>&\n]+)", self.text)
        return [shlex.split(x) for x in found]


def commands_of(page):
    """Every command of a page."""
    text = text_of(page)
    found = []
    for _, language, block in FENCE.findall(text):
        if language != "sh":
            continue
        for line in block.replace("\\\n", " ").splitlines():
            before, _, comment = line.partition(" #")
            if command := " ".join(before.split()):
                code = re.search(r"exit code (\d)", comment)
                gpu = "needs a GPU" in comment
                found.append(Command(page, command, int(code[1]) if code else 0, gpu))
    starts = r"(?:\S*/)?ladder |python -m pytest |python tools/"
    inline = re.findall(rf"`((?:{starts})[^`]*)`", FENCE.sub("", text).replace("\n", " "))
    # a mere name, such as `ladder bench`, is no command to type
    found += [Command(page, " ".join(x.split())) for x in inline if len(x.split()) > 2]
    return found


# command -> why it isn't run here; "..." stands for anything that follows
GPU = "needs a GPU"
LONG = "minutes"
TOUR = "tests/harness/runs/test_tour.py runs it"
TRAINED = "tests/models/test_train.py trains stage 7"
IN_A_NOTEBOOK = "tests/course/test_notebooks.py executes it"
NOT_RUN = {
    "make ladder": "installs; whoever runs these tests has done it",
    "make test": "these are the tests",
    "python3 -m venv .venv": "installs, as make does",
    "python -m pip install ...": "installs, as make does",
    "pip install .": "installs, as make does",
    "make test-all": "these are the tests",
    "python -m pytest tests/stages/test_hopper_emulated.py": "these are tests",
    "python -m pytest tests/stages/test_ring.py": "these are tests",
    "ladder run --stage mine.py": f"the tour, and one stage more: {TOUR}",
    "ladder run --inputs real --n 128,256,512 --h 12": f"twelve heads interpreted: {LONG}",
    "ladder run --stages 3,4,5 --stage mine.py ...": IN_A_NOTEBOOK,
    "ladder run --expect results/cpu/tour.jsonl": f"{TOUR}; tests/ladder/test_expect.py compares",
    "ladder run --mode train": TOUR,
    "ladder run --mode bwd": TOUR,
    "ladder lab check ...": "tests/course/test_lab.py checks",
    "ladder lab grade ...": "tests/course/test_grade.py grades",
    "sh tools/contained.sh graded submissions --stage 5": "needs the rights to make namespaces",
    "ladder run --stages 3 --stage mine_5.py": "tests/course/test_lab.py runs a file of one's own",
    "ladder train --stage 3 --save gpt.pt ...": "tests/models/test_generate.py loads what it saves",
    "ladder generate --stage 3 --context 256,1024 ...": f"{LONG}; there are shorter texts",
    "ladder train --stage 3": "tests/models/test_train.py trains stage 3",
    "ladder run --suite ...": GPU,
    "ladder io ...": GPU,
    "ladder bench --suite ...": GPU,
    "ladder bench --stages 6 --stage build/variants/...": "tests/tools/test_make_variants.py",
    "ladder bench --stage mine.py": "tests/harness/isolation/test_hostile.py gives bench files",
    "ladder train --stage 7 --out train.jsonl": "a record without a GPU is none",
    "ladder train --stage mine.py --stage 7": TRAINED,
    "ladder train --stage 7 ...": TRAINED,
    "ladder model ...": "needs transformers; tests/models/test_model.py has a model made up",
    "ladder ceilings ...": f"{LONG}; tests/harness/runs/test_ceilings.py measures smaller ones",
    "python -m pytest tests/gpu...": GPU,
    "python tools/read_loops.py ...": "half a minute; tests/tools/test_read_loops.py reads two",
}


def why_not_run(command):
    """Why a command isn't run here, or None."""
    text = command.text.removeprefix(".venv/bin/")
    if command.gpu:
        return GPU
    return next((why for pattern, why in NOT_RUN.items() if stands_for(pattern, text)), None)


def stands_for(pattern, text):
    start = pattern.removesuffix("...")
    return text == pattern or (start != pattern and f"{text} ".startswith(start))


def unique(commands):
    """Each command once, whichever page has it; what comes before it on its page may differ."""
    return list({(x.text, x.code, tuple(before_it(x))): x for x in commands}.values())


def before_it(command):
    """What its page does before it that isn't `ladder`: it may make what the command reads."""
    earlier = [x.text for x in commands_of(command.page)]
    earlier = earlier[: earlier.index(command.text)]
    return [x for x in earlier if re.match(r"(sed|python tools/make_variants)\b", x)]


def command_id(command):
    return f"{command.page.stem}: {command.text}"


COMMANDS = [command for page in PAGES for command in commands_of(page)]
RUN = unique(x for x in COMMANDS if not why_not_run(x))

RESULTS = ROOT / "results"
# what is shown where a page says FILE, by the page
RECORDS = {"benchmarks": "bench-004", "training": "train"}


def environ_of(folder):
    """An environment in which `ladder` and `python` are those of this checkout."""
    bin = folder / ".venv" / "bin"
    bin.mkdir(parents=True)
    for word, start in (("ladder", "-m harness "), ("python", "")):
        path = bin / word
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {start}"$@"\n')
        path.chmod(0o755)
    return environ(PATH=f"{bin}{os.pathsep}{os.environ['PATH']}")


def mine(page):
    """The file mine.py that a page's commands mean: CONTRIBUTING's own, else stage 3 renamed."""
    if page == CONTRIBUTING:
        blocks = [x for _, language, x in FENCE.findall(text_of(page)) if language == "python"]
        block = next(x for x in blocks if "STAGE = Stage(" in x)
        indent = len(block) - len(block.lstrip())
        return re.sub(rf"^ {{{indent}}}", "", block, flags=re.M)
    text = (ROOT / "stages" / "s03_torch_three_gemm.py").read_text()
    return text.replace("number=3,", "number=90,").replace('"torch_three_gemm"', '"mine"')


def put_there(command, folder, env):
    """Put what a command reads into `folder`."""
    for part in ("stages", "tools", "results"):
        (folder / part).symlink_to(ROOT / part)
    (folder / "mine.py").write_text(mine(command.page))
    for earlier in before_it(command):
        subprocess.run(["sh", "-c", earlier], cwd=folder, env=env, check=True, capture_output=True)
    for name, *words in command.calls:
        for option, word in zip(["", *words], words, strict=False):
            path = folder / word
            if path.suffix != ".jsonl" or option == "--out" or path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if option == "--resume":
                begun = in_turn(name, "--stages", 3, "--n", 8, "--out", word, cwd=folder)
                assert begun.returncode == 0, begun.stderr
            else:
                shown = RECORDS.get(command.page.stem, "table-4.4")
                record = "ceilings" if option == "--ceilings" else shown
                shutil.copy(RESULTS / "h200" / f"{record}.jsonl", path)


def slow(command):
    """The mark of a command that measures or draws, or that takes a shell; tables have none."""
    takes_long = r"ladder (run|bench|ring|train|generate|report)\b(?!.* --help\b)|plot"
    quick = ALONE.fullmatch(command.text) and not re.search(takes_long, command.text)
    return () if quick else pytest.mark.slow


@pytest.mark.skipif(os.name != "posix", reason="the commands are a Unix shell's")
@pytest.mark.parametrize("command", [pytest.param(x, id=command_id(x), marks=slow(x)) for x in RUN])
def test_a_command_runs_as_its_page_says(command, tmp_path):
    env = environ_of(tmp_path)
    put_there(command, tmp_path, env)
    if ALONE.fullmatch(command.text):
        [arguments] = command.calls
        # the reader looks at times of minutes there; what else is shown is the same at any N, and
        # of two rounds
        arguments = ["128" if word == "1024,4096" else word for word in arguments]
        said = {"--repeat", "--resume", "--predict"} & {*arguments}
        if arguments[0] in ("bench", "ring") and not said:
            arguments += ["--repeat", "2"]
        done = in_turn(*arguments, cwd=tmp_path)
    else:
        done = subprocess.run(
            ["sh", "-c", command.text], cwd=tmp_path, env=env, capture_output=True, text=True,
            timeout=PATIENCE, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert done.returncode == command.code, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_call_of_ladder_has_options_that_there_are(page):
    """Those that aren't run, too."""
    import typer

    known = typer.main.get_command(app.app).commands
    text = FENCE.sub("", text_of(page)).replace("\n", " ")
    named = set(re.findall(r"`ladder +([a-z]+)`", text))
    assert named - known.keys() == set()
    for command in commands_of(page):
        for name, *arguments in command.calls:
            assert name in known, command.text
            if "--help" not in arguments:
                known[name].make_context(name, list(arguments))  # raises what typer would say


def test_what_is_not_run_is_on_a_page_and_make_knows_its_words():
    texts = [x.text.removeprefix(".venv/bin/") for x in COMMANDS]
    assert [x for x in NOT_RUN if not any(stands_for(x, text) for text in texts)] == []
    words = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        said = re.findall(r"`make ([a-z-]+)`", text_of(page))
        said += [x.text.split("make ")[1] for x in commands_of(page) if "make " in x.text]
        assert set(said) <= words, page
    assert len(COMMANDS) > 60 and len(RUN) > 20  # they are found at all


# ---- CONTRIBUTING: a stage in ten minutes


@pytest.mark.slow
def test_a_stage_in_ten_minutes_by_following_contributing(tmp_path):
    """mine.py moved into stages/, with check_inputs: a row. (Its command is run above, outside.)"""
    env = installed(tmp_path)
    text = mine(CONTRIBUTING)
    checked = text.replace("import Stage\n", "import Stage, check_inputs\n").replace(
        "def attend(q, k, v):\n", "def attend(q, k, v):\n    check_inputs(STAGE, q, k, v)\n"
    )
    assert checked.count("check_inputs") == 2
    (tmp_path / "stages" / "s90_mine.py").write_text(checked)
    asked = ("run", "--stages", "90", "--n", "65", "--inputs", "peaky")
    dtypes = ("float32", "float16")  # tests/stages asks every dtype that a stage declares
    with one_process(env) as ladder:
        ran = [
            ladder(*asked, "--dtype", dtype, "--out", f"{dtype}.jsonl", cwd=tmp_path)
            for dtype in dtypes
        ]
    for dtype, done in zip(dtypes, ran, strict=True):
        assert done.returncode == 0 and "my stage" in done.stdout, done.stderr
        _, cells = read(tmp_path / f"{dtype}.jsonl")
        assert [(x["stage"], x["status"]) for x in cells] == [(90, "ok")]


# ---- pictures

LEAST_WORDS = 20  # to say what is to be seen


def pictures_of(page):
    """(dark, light, words) of each picture of a page."""
    return PICTURE.findall(text_of(page))


@every_page
def test_every_picture_is_for_light_and_dark_and_has_words(page):
    text = text_of(page)
    assert len(pictures_of(page)) == text.count("<img") == text.count("<picture>")
    assert not re.search(r"!\[[^\]]*\]\(", prose_of(page)), "shown on light pages alone"
    for dark, light, words in pictures_of(page):
        path = Path(light)
        assert Path(dark) == path.with_name(f"{path.stem}-dark{path.suffix}")
        assert len(words.split()) >= LEAST_WORDS, light


def test_every_picture_is_on_a_page():
    shown = {
        (page.parent / path).resolve()
        for page in PAGES
        for dark, light, _ in pictures_of(page)
        for path in (dark, light)
    }
    assert sorted(set(own_files("docs/figures/*")) - shown) == []


# ---- figures

UNIT = r"(?:x| ?(?:[mun]s|%|per cent|[KMGT]?FLOP/s|[KMGT]B/s))"
FIGURE = re.compile(
    # "64 times as many" is counted, "1.5 times" was measured
    rf"(?<![\w.-])(?:\d[\d.,]*(?: to \d[\d.,]*)?{UNIT}|\d+\.\d+ times)(?![\w/])"
)


def figures_of(page):
    """Numbers with units of measurement in a page's prose, outside what is made from records."""
    text = GENERATED.sub("", text_of(page))
    return [
        " ".join(x.split()) for x in FIGURE.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text)))
    ]


# page -> figure -> where it's from: defined by the code, or cited
CITED = {
    "docs/hopper.md": {"1.0x": "by definition: the kernel that others are held to"},
    "docs/measuring.md": {"2 ms": "harness/measures/timing.py: SAMPLE_SECONDS"},
    "docs/profiling.md": {
        "1.5 times": "a profiler's flaw, said of the record's machine: no result"
    },
    "docs/source-tables.md": {"3 to 4 TFLOP/s": "source 004", "61%": "source 004"},
    "notebooks/06_to_09.ipynb": {"989 TFLOP/s": "Shah et al. 2024, section 3.1"},
    "notebooks/00_to_01.ipynb": {"3.9 times": "counted: (4 * 64 + 3) / (4 * 16 + 3)"},
}


@every_page
def test_no_figure_without_a_record(page):
    """A measured figure is made from a record; what stands in prose is defined, or cited, here."""
    known = CITED.get(name_of(page), {})
    assert sorted(set(figures_of(page)) - known.keys()) == [], (
        "made from no record: cite it, or say it in words"
    )
    assert sorted(known.keys() - set(figures_of(page))) == [], "no longer on the page"


MARK = re.compile(r"^(ladder .*)$|^<!-- begin (hopper[\w-]*) -->$", re.M)


def test_a_table_of_a_comparison_comes_after_the_command_that_made_its_record():
    compared = []
    for page in (x for x in PAGES if x.suffix == ".md"):
        above = ""
        for command, name in MARK.findall(text_of(page)):
            above = command or above
            file = ROOT / "results" / "h200" / f"{name}.jsonl"
            if command or not file.exists():
                continue
            with file.open(encoding="utf-8") as lines:
                asked = json.loads(next(lines))["arguments"]
            if asked["command"] == "bench":
                words = shlex.split(above, comments=True)
                for option in ("stages", "n", "dtype", "mode", "suite"):
                    # a mode that isn't on the page is the usual one
                    here = [*words, f"--{option}", "fwd" if option == "mode" else None]
                    wanted = here[here.index(f"--{option}") + 1]
                    assert (asked[option] or here[-1]) == wanted, name
                assert asked["graph"] == ("--graph" in words), name
                compared.append(name)
    assert len(compared) >= 9
