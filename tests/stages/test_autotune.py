"""The tuner: what it times, what it keeps on disk, what it finds there again, and who may disturb.

There is no GPU here: a fake one (fake_card.py) has a clock that launches move on.
"""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_card import Card, Kernel, like
from stage_checks import device_of, for_each, gradients, normal

import stages
from stages.common import tuner
from stages.common.machine import has_module

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and not has_module("triton"), reason="no triton for this machine"
)

HERE = Path(__file__).parent
KERNEL = Kernel()
USUAL = {"precision": "ieee", "d": 64, "causal": False, "n": 1000}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where choices are kept, for this test alone; nothing is there, nor in memory."""
    monkeypatch.setenv("LADDER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuner, "chosen", {})
    monkeypatch.setattr(tuner, "latest", {})
    return tmp_path / "cache" / "tuner.json"


@pytest.fixture
def card(cache, monkeypatch):
    """A card on which BLOCK_M = 32 is the fastest."""
    card = Card({16: 3.0, 32: 1.0, 64: 2.0})
    card.put_in(monkeypatch.setattr)
    return card


def choose(card, kernel=None, dtype=torch.float16, shape=(2, 8, 1000, 64), **changes):
    """The BLOCK_M that is chosen on `card`."""
    q = like(dtype, shape=shape)
    choice = tuner.choose(
        kernel or KERNEL, card.candidates, card.launch, like=q, **(USUAL | changes)
    )
    assert choice in card.candidates
    assert tuner.latest == {(kernel or KERNEL).__name__: choice}
    tuner.latest.clear()
    return choice["BLOCK_M"]


def forget():
    """As a new process does, which has nothing but the file."""
    tuner.chosen.clear()


def kept(cache):
    return json.loads(cache.read_text())


def out_of_resources():
    from triton.runtime.errors import OutOfResources

    return OutOfResources(300_000, 232_448, "shared memory")


# ---- what is timed


def test_the_fastest_is_chosen_all_taking_turns(card):
    assert choose(card) == 32
    assert card.launched == [16, 32, 64] * (1 + tuner.ROUNDS)


def test_one_outlier_does_not_decide(card):
    """The median: neither a lucky launch nor one that was disturbed."""
    launches = {16: 0, 32: 0}

    def lucky():
        launches[16] += 1
        return 0.001 if launches[16] == 4 else 3.0

    def disturbed():
        launches[32] += 1
        return 1000.0 if launches[32] in (1, 5) else 1.0  # the first one compiles

    card.costs |= {16: lucky, 32: disturbed}
    assert choose(card) == 32


def test_what_does_not_fit_the_card_is_left_out(card, cache):
    from triton.runtime.errors import PTXASError

    card.costs |= {32: out_of_resources()}
    assert choose(card) == 64
    assert [tried["config"]["BLOCK_M"] for tried in kept(cache)[0]["of"]] == [16, 64]
    forget()
    card.costs |= {64: PTXASError("too many registers")}
    assert choose(card, d=128) == 16


def test_where_none_fits_it_says_so(card, cache):
    card.costs = {16: out_of_resources(), 32: out_of_resources()}
    with pytest.raises(RuntimeError, match=r"^none of 2 configurations fits this GPU: .*232448"):
        choose(card)
    assert not cache.exists()


def test_any_other_error_is_the_kernels_own(card, cache):
    card.costs |= {32: ValueError("a bug")}
    with pytest.raises(ValueError, match="a bug"):
        choose(card)
    assert not cache.exists()


def test_nothing_is_timed_without_a_gpu(card, cache):
    config = tuner.choose(Kernel(), card.candidates, card.launch, like=like(device="cpu"), **USUAL)
    assert config == card.candidates[0]
    assert card.launched == [] and not cache.exists()


def test_nothing_is_timed_where_there_is_no_choice(card, cache):
    card.costs = {16: 3.0}
    assert choose(card) == 16
    assert card.launched == [] and not cache.exists()


def test_nothing_is_timed_while_a_graph_is_captured(card, cache):
    card.capturing = True
    assert choose(card) == 16  # the first, and it isn't taken for a choice
    assert card.launched == [] and not cache.exists()
    card.capturing = False
    assert choose(card) == 32
    card.capturing = True
    assert choose(card) == 32  # what is known is used


@for_each([stages.by_number(number) for number in (6, 7)])
def test_interpreted_stages_time_nothing_and_keep_nothing(stage, cache, monkeypatch):
    monkeypatch.setattr(tuner, "time_each", lambda *_: pytest.fail("timed in the interpreter"))
    tensors = normal((1, 1, 5, 9, 8), 0, device=device_of(stage))
    gradients(stage, *tensors) if stage.STAGE.gradients else stage.attend(*tensors[:3])
    assert not cache.exists()


def test_stages_tell_the_tuner_what_they_launch(cache, monkeypatch):
    asked = []

    def choose(kernel, candidates, launch, *, like, **key):
        asked.append((kernel.__name__, like.dtype, key))
        return candidates[0]

    monkeypatch.setattr(tuner, "choose", choose)
    q, k, v, dO = normal((1, 4, 5, 9, 8), 0, torch.float16)
    k, v = k[:, ::2], v[:, ::2]  # two heads of q share each of them
    gradients(stages.by_number(7), q, k, v, dO, causal=True)
    key = {"precision": "ieee", "d": 8, "causal": True, "n": 9}
    by_keys = key | {"heads": 2, "nq": 10}
    keys = {"attention_kernel": key, "dk_dv_kernel": by_keys, "dq_kernel": key}
    assert asked == [(name, torch.float16, key) for name, key in keys.items()]


# ---- what is kept


def test_a_choice_is_made_once(card):
    choose(card)
    card.launched.clear()
    for n in (1000, 513, 1024):
        assert choose(card, n=n) == 32
    for shape in ((1, 16, 1000, 64), (16, 1, 513, 64), (3, 3, 1024, 64)):
        assert choose(card, shape=shape) == 32
    assert choose(card, shape=(5, 5, 5, 64), heads=16, nq=600) == 32
    assert card.launched == []


def test_a_choice_is_found_again_by_a_process_that_has_only_the_file(card):
    choose(card)
    forget()
    card.launched.clear()
    card.costs |= {16: 0.1}  # had it been timed again, this would be chosen
    assert choose(card, n=513) == 32
    assert card.launched == []


CHANGES = {
    "fewer keys": {"n": 512},
    "more keys": {"n": 1025},
    "a larger batch": {"shape": (4, 8, 1000, 64)},
    "fewer heads": {"shape": (2, 4, 1000, 64)},
    "one query": {"shape": (2, 8, 1, 64)},
    "other heads in the grid": {"heads": 2},
    "more queries to each": {"nq": 4000},
    "d": {"d": 128},
    "causal": {"causal": True},
    "precision": {"precision": "tf32"},
    "dtype": {"dtype": torch.bfloat16},
    "kernel": {"kernel": Kernel("dq_kernel")},
    "source": {"kernel": Kernel(source="fedcba9876543210")},
    "device": {},
    "triton": {},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_kind_of_call_is_another_choice(card, cache, monkeypatch, change):
    choose(card)
    forget()
    card.costs = {16: 3.0, 32: 1.0, 64: 0.5}
    if change == "device":
        card.name = "another card"
    elif change == "triton":
        monkeypatch.setattr("triton.__version__", "99.0")
    assert choose(card, **CHANGES[change]) == 64
    assert [choice["config"]["BLOCK_M"] for choice in kept(cache)] == [32, 64]


def test_two_cards_of_one_process_are_apart(card):
    assert choose(card) == 32
    card.name, card.costs = "another card", {16: 0.5, 32: 1.0, 64: 2.0}
    second = tuner.choose(KERNEL, card.candidates, card.launch, like=like(device="cuda:1"), **USUAL)
    assert second["BLOCK_M"] == 16


def test_what_is_kept_can_be_read_by_people(card, cache):
    choose(card)
    (choice,) = kept(cache)
    said = {name: choice[name] for name in choice.keys() - {"triton", "config", "of"}}
    assert said == {
        "kernel": "attention_kernel", "source": "0123456789abcdef", "device": "a card",
        "dtype": "float16", "precision": "ieee", "d": 64, "causal": False, "heads": 16, "nq": 1024,
        "n": 1024, "time_ms": 1.0,
    }  # fmt: skip
    assert choice["config"] == card.candidates[1]
    times = [(tried["config"]["BLOCK_M"], tried["time_ms"]) for tried in choice["of"]]
    assert times == [(16, 3.0), (32, 1.0), (64, 2.0)]


def test_a_choice_that_is_no_candidate_any_more_is_made_again_and_replaced(card, cache):
    choose(card)
    choose(card, d=128)
    forget()
    card.costs = {16: 3.0, 64: 2.0}
    assert choose(card) == 64
    assert [(x["d"], x["config"]["BLOCK_M"]) for x in kept(cache)] == [(128, 32), (64, 64)]


def test_choices_of_an_older_form_go_when_one_is_kept(card, cache):
    choose(card)
    (choice,) = kept(cache)
    older = {name: value for name, value in choice.items() if name not in ("heads", "nq")}
    cache.write_text(json.dumps([older]))
    forget()
    assert choose(card) == 32
    assert kept(cache) == [choice]


@pytest.mark.parametrize("n", [1, 2, 3, 64, 65, 1000, 1 << 20, (1 << 20) + 1])
def test_a_bucket_is_the_power_of_two_above(n):
    assert tuner.bucket(n) in {1 << i for i in range(30)}
    assert n <= tuner.bucket(n) < 2 * n


# ---- the file


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{not json", b"\xff\xfe\x00", b"5", b"null", b'{"kernel": "attention_kernel"}',
        b'[1, null, "x", []]', b'[{"config": 5}]', b"[" * 100_000, b'[{"kernel": "attention_ker',
    ],
    ids=lambda content: repr(content[:20]),
)  # fmt: skip
def test_a_file_that_is_none_of_ours_is_no_error_and_is_replaced(card, cache, content):
    cache.parent.mkdir()
    cache.write_bytes(content)
    assert choose(card) == 32
    forget()
    card.launched.clear()
    assert choose(card) == 32 and card.launched == []
    assert kept(cache)[-1]["config"]["BLOCK_M"] == 32


@pytest.mark.parametrize("config", [None, 5, "32", {}, {"BLOCK_M": 32}, [32]])
def test_a_choice_with_a_strange_configuration_is_made_again(card, cache, config):
    choose(card)
    (choice,) = kept(cache)
    cache.write_text(json.dumps([choice | {"config": config}]))
    forget()
    assert choose(card) == 32
    assert kept(cache) == [choice]


def test_a_folder_that_can_not_be_written_is_no_error(card, cache):
    cache.parent.write_text("a file where the folder should be")
    assert choose(card) == 32
    card.launched.clear()
    assert choose(card) == 32 and card.launched == []  # in this process, it is known


def test_a_disk_that_fills_up_leaves_the_file_as_it_was(card, cache, monkeypatch):
    choose(card)
    before = cache.read_text()

    def fills_up(choices, file, **_):
        file.write('[{"kernel"')
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", fills_up)
    assert choose(card, d=128) == 32
    assert cache.read_text() == before
    assert {path.name for path in cache.parent.iterdir()} == {"tuner.json", "tuner.lock"}


@pytest.mark.skipif(os.name != "posix", reason="no such modes")
@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_the_files_have_the_umasks_mode_so_that_a_shared_folder_is_shared(card, cache, umask):
    before = os.umask(umask)
    try:
        choose(card)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in cache.parent.iterdir()}
    assert modes == dict.fromkeys(("tuner.json", "tuner.lock"), 0o666 & ~umask)


def test_a_user_without_a_home_is_no_error(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LADDER_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert tuner.cache_file().name == "tuner.json"


@pytest.mark.skipif(os.name != "posix", reason="no password database")
def test_an_empty_variable_is_an_unset_one(monkeypatch, tmp_path):
    import pwd

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LADDER_CACHE_DIR")
    unset = tuner.cache_file()
    assert unset == Path.home() / ".cache" / "attention-ladder" / "tuner.json"
    for name in ("HOME", "XDG_CACHE_HOME", "LADDER_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    assert tuner.cache_file() == unset

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)  # of a container's made-up user
    for _ in range(2):
        assert tuner.cache_file().is_absolute()
        monkeypatch.delenv("HOME", raising=False)


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("LADDER_CACHE_DIR", str(tmp_path / "ours"))
    assert tuner.cache_file() == tmp_path / "ours" / "tuner.json"
    monkeypatch.delenv("LADDER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "theirs"))
    assert tuner.cache_file() == tmp_path / "theirs" / "attention-ladder" / "tuner.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert tuner.cache_file() == tmp_path / ".cache" / "attention-ladder" / "tuner.json"


# ---- several processes


def write_many(number, count, start):
    start.wait()
    for i in range(count):
        identity = {"kernel": f"kernel_{number}", "d": i}
        tuner.keep(identity, identity | {"config": {"BLOCK_M": i}})


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no such locks: the last one to write wins")
def test_many_processes_write_at_once_none_is_lost_and_the_file_is_whole(cache):
    writers, count = 4, 25
    context = multiprocessing.get_context("fork")  # they touch no torch, and start at once
    start = context.Event()
    started = [context.Process(target=write_many, args=(i, count, start)) for i in range(writers)]
    for process in started:
        process.start()
    start.set()
    seen = 0
    while any(process.is_alive() for process in started):
        if cache.exists():
            found = kept(cache)  # whole, or json would raise
            assert len(found) >= seen
            seen = len(found)
    for process in started:
        process.join()
        assert process.exitcode == 0
    found = {(choice["kernel"], choice["d"]) for choice in kept(cache)}
    assert found == {(f"kernel_{i}", d) for i in range(writers) for d in range(count)}
    assert len(kept(cache)) == writers * count
    assert {path.name for path in cache.parent.iterdir()} == {"tuner.json", "tuner.lock"}


PROCESS = """
import sys
from fake_card import Card, Kernel, like
from stages.common import tuner

card = Card({16: 3.0, 32: 1.0, 64: 2.0})
card.put_in(setattr)
config = tuner.choose(Kernel(), card.candidates, card.launch, like=like(), precision="ieee",
                         d=64, causal=False, n=1000)
print(config["BLOCK_M"], len(card.launched))
"""


@pytest.mark.slow
def test_another_process_does_not_tune_again(cache):
    paths = [str(HERE), str(HERE.parents[1]), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    said = [
        subprocess.run(
            [sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    assert said == [["32", str(3 * (1 + tuner.ROUNDS))], ["32", "0"]]
