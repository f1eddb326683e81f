"""`ladder generate`: the same text with a cache and without, and what is told of it."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from ladder_command import in_turn

import stages
from attention_ladder.models.training import plan, writing
from attention_ladder.models.training.gpt import GPT
from attention_ladder.models.training.loop import Run, save
from attention_ladder.models.training.plan import Shape
from harness.records import jsonl
from ladder import generate

SHAPE = Shape(layers=2, heads=2, head_dim=16, block=24, batch=1, lr=1e-3)
IDS = torch.arange(12)[None] % 7


def model_of(module):
    """A model with random weights, no near-ties in what it writes."""
    torch.manual_seed(0)
    model = GPT(7, SHAPE, module.attend)
    for weight in model.parameters():  # at first all logits are nearly the same
        weight.data *= 4
    return model


def written(number, cached, ids=IDS, count=6):
    """What it writes with that stage."""
    module = stages.by_number(number)
    return list(writing.write(model_of(module), module, ids, count, cached))


@pytest.mark.parametrize("number", [3, 8])
def test_a_cache_changes_no_token(number):
    plain, cached = written(number, False), written(number, True)
    assert plain == cached == written(3, False) and len(plain) == 6
    assert len(set(plain)) > 1, "a text of one token shows nothing"
    assert written(number, True, IDS.flip(1)) != plain


@pytest.mark.parametrize("number", [3, 8])
@pytest.mark.parametrize("broken", ["forgets", "shifts"])
def test_a_cache_broken_by_hand_is_seen(monkeypatch, number, broken):
    """Its values, all but the newest, are gone, or are those of the token before."""
    really = writing.Cache.__call__

    def call(cache, q, k, v, *, causal):
        if k.shape[2] > 1:
            v = torch.zeros_like(v) if broken == "forgets" else v.roll(1, 2)
        return really(cache, q, k, v, causal=causal)

    plain = written(number, False)
    monkeypatch.setattr(writing.Cache, "__call__", call)
    assert written(number, True) != plain


# what a paged cache keeps on the host, and what a wrong step would
HOST = "free_pages", "free_rows", "row", "pages", "length", "count"


class FakeGraph:
    """Calls the step at each replay, with all that the host knows as it was at the capture.

    A CUDA graph has what Python computed at the capture, and the device's memory as it is.
    """

    def __init__(self, step):
        self.step = step
        self.owners = [step, *(cache.pages for cache in step.caches)]
        self.then = deepcopy(self.known())

    def known(self):
        return [{name: vars(x)[name] for name in HOST if name in vars(x)} for x in self.owners]

    def set(self, known):
        for owner, state in zip(self.owners, known, strict=True):
            vars(owner).update(state)

    def __call__(self):
        now = self.known()
        self.set(deepcopy(self.then))
        self.step()
        self.set(now)


def replayed(count, ids=IDS, capture=FakeGraph):
    """As `written`, by stage 8 and by replays."""
    module = stages.by_number(8)
    return list(writing.replay(model_of(module), module, ids, count, capture=capture))


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_replays_write_the_same_tokens(count):
    """12 tokens after 12 begin a second page; the host's own counts are as without replays."""
    steps = []
    assert replayed(count, capture=lambda s: steps.append(s) or FakeGraph(s)) == written(
        3, True, count=count
    )
    for step in steps:
        assert step.position.item() == 12 + count - 1
        for cache in step.caches:
            assert cache.pages.length == {0: 12 + count - 1}
            assert cache.pages.lengths.tolist() == [12 + count - 1]


def test_a_step_that_depends_on_the_host_is_seen(monkeypatch):
    def call(step):  # the position is a number of Python's
        logits = step.model.logits(step.token, step.count)
        step.token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        step.position += 1
        step.count += 1

    monkeypatch.setattr(writing.Step, "__call__", call)
    begin = writing.Step.__init__
    monkeypatch.setattr(
        writing.Step, "__init__", lambda self, *a: begin(self, *a) or vars(self).update(count=12)
    )
    assert replayed(12) != written(3, True, count=12)


def test_one_slow_token_and_the_first_two_do_not_count(monkeypatch):
    # the seconds at which a token is asked for, and arrives
    times = iter([0, 9, 9, 18, 20, 21, 30, 31, 40, 90, 90, 91])
    sent = []

    class Scripted:
        def ready(self):
            pass

        def send(self, message):
            sent.append(message)

        def receive(self, kind, seconds, late):
            given.append(seconds)
            return kind("x")

    given, clock = [], iter(range(0, 10_000, 150))
    monkeypatch.setattr(generate.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(generate.time, "perf_counter", lambda: next(times))
    assert generate.write(Scripted(), 12, 6, True) == ("xxxxxx", 1)
    assert given == [450, 300, 150, 0, 0, 0]  # the limit is one for the whole text
    assert sent == [{"context": 12, "cached": True, "graph": False}] + 6 * [{}]


@pytest.mark.slow
def test_no_token_is_written_before_it_is_asked_for(tmp_path, monkeypatch):
    """Else a command that is slow to read finds many at once, and takes that for a speed.

    What writes has been trained before, and is saved.
    """
    monkeypatch.setitem(plan.DEFAULT_STEPS, "cpu", 2)
    asked = iter([{"context": 20, "cached": True, "graph": False}, {}, {}, {}])
    events = []

    def hear(connection):
        events.append("asked")
        return next(asked)

    monkeypatch.setattr(writing, "hear", hear)
    monkeypatch.setattr(writing, "say", lambda connection, event, **_: events.append(event))
    order = {"path": stages.by_number(3).__file__, "device": "cpu", "contexts": [20], "prompt": ""}
    order |= {"tokens": 3, "load": None, "save": str(tmp_path / "gpt.pt")}
    writing.write_texts(None, order)
    assert events == ["ready", *3 * ["asked", "wrote"], "asked", "asked", "failed"]
    assert writing.load(order["save"])[0].shape.block == 23


def run_command(*arguments, cwd):
    return in_turn("generate", "--device", "cpu", "--prompt", "", *arguments, cwd=cwd)


def write_one(*arguments, cwd):
    """The record of a command that writes one text, and what it printed."""
    done = run_command(*arguments, "--out", "run.jsonl", cwd=cwd)
    assert done.returncode == 0, done.stderr
    [record] = jsonl.read(cwd / "run.jsonl", "generate")[1]
    return record, done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model as the command trains it, in fewer steps, and the records of what it wrote."""
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(plan.DEFAULT_STEPS, "cpu", 120)
        save(*writing.train(28, "cpu"), str(folder / "gpt.pt"))
    out = ("--load", "gpt.pt", "--out", "run.jsonl")
    done = run_command("--context", "8,20", "--tokens", 8, *out, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "gpt.pt", done.stdout


@pytest.mark.slow
def test_what_the_command_records_and_shows(model):
    path, shown = model
    env, records = jsonl.read(path.with_name("run.jsonl"), "generate")
    assert [record["context"] for record in records] == [8, 20] and env["device"] == "cpu"
    for record in records:
        assert record["same"] and record["page_size"] is None and record["stage"] == 3
        assert len(record["text"]) == record["tokens"] == 8
        assert record["text"].strip(), "a text of spaces shows nothing"
        assert record["tokens_per_s"] > 0 and record["cached_tokens_per_s"] > 0
        # 2 layers of 2 heads of 32: K and V of each token once, q and o of one row, or of all
        kv, weights = 2 * 2 * 64 * 4 * record["context"], 4 * record["parameters"]
        assert record["cached_bytes_per_token"] == weights + kv + 2 * 2 * 64 * 4
        assert record["bytes_per_token"] == weights + 2 * kv
    assert shown.count(" tokens/s,") == shown.count(" bytes/token,") == 2, "two columns each"
    assert "Not by replays of a CUDA graph" in shown
    assert repr(records[-1]["text"]) in shown
    assert (path.parent / "run-plots" / "generate.png").stat().st_size > 0
    again = in_turn("generate", "--show", "run.jsonl", cwd=path.parent)
    assert (again.returncode, again.stdout) == (0, shown)


@pytest.mark.slow
def test_a_record_of_another_stage_than_its_run_had_is_refused(model, tmp_path):
    text = model[0].with_name("run.jsonl").read_text()
    (tmp_path / "run.jsonl").write_text(
        text.replace('"generate", "stage": 3', '"generate", "stage": 4')
    )
    done = in_turn("generate", "--show", "run.jsonl", cwd=tmp_path)
    assert done.returncode == 2 and "expected one of the rungs of line 1" in done.stderr
    (tmp_path / "run.jsonl").write_text(text.replace('"same": true', '"same": false'))
    assert in_turn("generate", "--show", "run.jsonl", cwd=tmp_path).returncode == 1


@pytest.mark.slow
def test_stage_8_interpreted_writes_the_same_and_shows_no_speed(model, tmp_path):
    options = ("--stage", 8, "--context", 20, "--load", model[0])
    record, shown = write_one(*options, cwd=tmp_path)
    assert (record["mode"], record["tokens"], record["page_size"]) == ("interpreted", 4, 16)
    assert record["tokens_per_s"] is record["cached_tokens_per_s"] is None
    assert "tokens/s" not in shown and "pages of 16" in shown
    of_three = jsonl.read(model[0].with_name("run.jsonl"), "generate")[1][1]
    assert record["text"] == of_three["text"][:4]


@pytest.mark.slow
def test_what_ladder_train_saves_is_loaded(tmp_path):
    """The first seed's model of the first stage that is asked for, with its characters."""
    train = ("train", "--stage", 3, "--device", "cpu", "--steps", 2, "--seeds", 2)
    done = in_turn(*train, "--save", "new/gpt.pt", "--out", "train.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "model:   new/gpt.pt" in done.stdout
    model, alphabet = writing.load(str(tmp_path / "new" / "gpt.pt"))
    run = Run(stages.by_number(3).attend, plan.SHAPES["tiny"], 2, "float32", "cpu")
    for seed, same in ((1, False), (0, True)):
        list(run.train(seed))
        pairs = zip(run.model.parameters(), model.parameters(), strict=True)
        near = [torch.allclose(a, b, atol=1e-5) for a, b in pairs]
        assert all(near) == same
    assert alphabet == "".join(run.alphabet)
    options = ("--load", "new/gpt.pt", "--context", 20, "--tokens", 8)
    record, _ = write_one(*options, cwd=tmp_path)
    assert record["same"] and len(record["text"]) == 8


def test_a_full_disk_is_named_where_a_model_is_saved():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(OSError, match="No space left"):
        save(GPT(7, SHAPE, torch.add), "abcdefg", "/dev/full")


@pytest.mark.parametrize("command", ["train", "generate"])
def test_a_file_that_cant_be_saved_is_said_before_anything_is_trained(tmp_path, command):
    (tmp_path / "text").write_text("no folder")
    options = ("--stage", 3, "--device", "cpu", "--save")
    for path, why in (("text/gpt.pt", "it can't be written"), ("text", "is there already")):
        done = in_turn(command, *options, path, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert done.stderr.startswith("ladder: --save: text") and why in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


FAKE = """
import time
import stages
from stages.contract import Stage
STAGE = Stage(number=90, name="off", title="off", idea="a fake", options=("causal",), {fields})


def attend(q, k, v, *, causal=False):
    {before}
    return ({factor}) * stages.by_number(3).attend(q, k, v, causal=causal)
"""


def fake(factor="1.0", fields="", before="pass"):
    """The text of a stage whose output is `factor` times what it should be."""
    return FAKE.format(factor=factor, fields=fields, before=before)


ABSENT = "raise stages.contract.StageUnavailable('not here')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (fake(), ""),
        # where there are fewer queries than keys: with a cache alone
        (fake("-1.0 if q.shape[2] < k.shape[2] else 1.0"), "wrong: before it wrote: max error"),
        (fake("x if q.shape[2] < k.shape[2] else 1.0"), "crashed: before it wrote: NameError"),
        # with a cache and without: the tokens are the same
        (fake("1.01"), "wrong: before it wrote: max error"),
        # as soon as there are more tokens than the context has
        (fake("1.0 if k.shape[2] % 20 == 0 else 1.01"), "wrong: before it wrote: max error"),
        (
            fake("1.01", "exact_up_to=8"),
            "wrong-by-design: before it wrote: declared exact up to Nk = 8 only",
        ),
        (fake(fields="few_queries=True", before=ABSENT), "skipped: before it wrote"),
    ],
)
def test_only_what_is_judged_to_be_right_writes(model, tmp_path, text, why):
    (tmp_path / "off.py").write_text(text)
    options = ("--stage", "off.py", "--context", 20, "--tokens", 8, "--load", model[0])
    done = run_command(*options, cwd=tmp_path)
    assert done.returncode == bool(why), done.stderr
    assert f"ladder: 90 off {why}" in done.stderr or not why
    assert ("tokens/s" in done.stdout) != bool(why)


@pytest.mark.slow
def test_a_clock_that_a_stage_has_changed_makes_no_speed(model, tmp_path):
    """Two layers: a token takes 10 ms at least, whatever the process that writes says."""
    clock = (
        "import sys, time\nreal = time.perf_counter\n"
        "if 'attention_ladder.models.training.writing' in sys.modules:  # not where it is checked\n"
        "    time.perf_counter = lambda: real() / 1000\n"
    )
    (tmp_path / "off.py").write_text(clock + fake(before="time.sleep(0.005)"))
    options = ("--stage", "off.py", "--context", 20, "--tokens", 8, "--load", model[0])
    record, _ = write_one(*options, cwd=tmp_path)
    assert 0 < record["tokens_per_s"] < 100 and 0 < record["cached_tokens_per_s"] < 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [(("--load", "text"), "text: no model that --save has written\n"),
     (("--context", "900"), "positions, and 932 are asked for"),
     (("--context", "9", "--tokens", "4", "--prompt", "\u732b"),
      "--prompt: '\u732b' is none of the model's characters")],
)  # fmt: skip
def test_what_a_model_can_not_write_is_refused_in_one_line(model, tmp_path, options, why):
    (tmp_path / "text").write_text("no model")
    done = in_turn("generate", "--device", "cpu", "--load", model[0], *options, cwd=tmp_path)
    assert done.returncode == 2
    assert why in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_docs_have_the_table_once_it_is_measured(model, tmp_path, monkeypatch):
    from course.report import comparisons, text

    monkeypatch.setattr(text, "GPU", tmp_path)
    assert comparisons.generated().startswith("Not measured yet")
    (tmp_path / "generate.jsonl").write_bytes(model[0].with_name("run.jsonl").read_bytes())
    shown = comparisons.generated()
    assert [row.split("|")[1].strip() for row in shown.splitlines()[4:6]] == ["8", "20"]
    assert "Measured on" in shown
