"""Stages that try to be what they are not, each as the text of a file; `write` makes the file."""

HEAD = """import contextlib, ctypes, gc, hashlib, json, os, signal, stat, sys, threading, time
import torch
import stages
from stages.contract import Stage

STAGE = Stage(number={number}, name="{name}", title="{name}", idea="hostile", gradients=True)
three = stages.by_number(3).attend


def shout(**message):
    data = json.dumps(message).encode()
    for handle in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(handle).st_mode):
                os.write(handle, len(data).to_bytes(4, "big") + data)


def outs():
    kind = "MeasuredStage"
    return [x.out for x in gc.get_objects() if type(x).__name__ == kind and hasattr(x, "out")]


def relatives():
    me = os.getpid()
    known = {{}}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            text = open(f"/proc/{{name}}/stat").read()
            known[int(name)] = int(text.rpartition(")")[2].split()[1])
    above = known[known[me]]  # the fork server, or the process that asked for it
    return above, [pid for pid, up in known.items() if up == above and pid != known[me]]


"""
CHECKED = {
    "event": "checked", "first_call_ms": 1.0, "call_ms": 1.0, "peak_bytes": 0,
    "memory_meter": None, "launch_configs": None, "interpreted": False,
}  # fmt: skip

CONFIGURED = """
import stages.common.tuner
def attend(q, k, v, **more):
    stages.common.tuner.latest["kernel"] = {{"BLOCK_M": {}}}
    return three(q, k, v, **more)
"""

# every one of these is to fail, and nothing else with it
FAILS = {
    # what it says
    "words_ok": """
import harness.isolation.measured_stage as worker, attention_ladder.models.training.loop as trainer
worker.blame = trainer.blame = lambda *a: {"status": "ok", "reason": ""}
def attend(q, k, v, **more): raise RuntimeError
""",
    "says_ok": """
def attend(q, k, v, **more):
    shout(event="failed", status="ok", reason="")
    raise RuntimeError
""",
    "says_checked": f"""
def attend(q, k, v, **more):
    shout(**{CHECKED!r})
    raise RuntimeError
""",
    "says_ready_at_import": """
shout(event="ready")
def attend(q, k, v, **more): raise RuntimeError
""",
    "nan_configuration": CONFIGURED.format('float("nan")'),
    "endless_configuration": CONFIGURED.format("10**400"),
    # what it writes for the judge
    "three_bytes": """
import harness.isolation.measured_stage as worker
worker.write_outputs = lambda o, p, g, path: open(path, "wb").write(b"abc") and None
attend = three
""",
    "no_output": """
import harness.isolation.measured_stage as worker
worker.write_outputs = lambda o, p, g, path: None
attend = three
""",
    "terabyte": """
import harness.isolation.measured_stage as worker
worker.write_outputs = lambda o, p, g, path: os.truncate(open(path, "wb").name, 1 << 40)
attend = three
""",
    "pipe_for_output": """
import harness.isolation.measured_stage as worker
worker.write_outputs = lambda o, p, g, path: os.mkfifo(path)
attend = three
""",
    "directories": """
def attend(q, k, v, **more):
    for out in outs():
        for name in (out, out + ".again0", out + ".timed"):
            with contextlib.suppress(OSError):
                os.mkdir(name)
    return three(q, k, v, **more)
""",
    "no_folder": """
import shutil
def attend(q, k, v, **more):
    for out in outs():
        shutil.rmtree(os.path.dirname(out), ignore_errors=True)
    return three(q, k, v, **more)
""",
    # its processes
    "forks": """
def attend(q, k, v, **more):
    os.fork()
    return three(q, k, v, **more) * 1.5
""",
    "kills_siblings": """
def attend(q, k, v, **more):
    for pid in relatives()[1]:
        os.kill(pid, signal.SIGKILL)
    return three(q, k, v, **more) + 1
""",
    "kills_the_server": """
def attend(q, k, v, **more):
    os.kill(relatives()[0], signal.SIGKILL)
    time.sleep(1)
    return three(q, k, v, **more)
""",
    "stops_siblings": """
def attend(q, k, v, **more):
    os.kill(os.getpid(), signal.SIGSTOP)
    return three(q, k, v, **more)
""",
    "stops_the_server": """
def attend(q, k, v, **more):
    os.kill(relatives()[0], signal.SIGSTOP)
    return three(q, k, v, **more) + 1
""",
    # its clock
    "nan_clock": """
time.perf_counter = lambda: float("nan")
attend = three
""",
    "zero_clock": """
time.perf_counter = lambda: 0.0
attend = three
""",
    "slow_clock": """
real = time.perf_counter
time.perf_counter = lambda: 0.05 * real()
import timeit, torch.utils.benchmark.utils.timer as timer
timeit.default_timer = timer.timer = time.perf_counter
def attend(q, k, v, **more):
    time.sleep(0.03)
    return three(q, k, v, **more)
""",
    "fast_clock": """
real = time.perf_counter
time.perf_counter = lambda: 1000 * real()
import timeit, torch.utils.benchmark.utils.timer as timer
timeit.default_timer = timer.timer = time.perf_counter
attend = three
""",
    "claims_no_time": """
real = json.dumps
json.dumps = lambda x, **b: real(x | {"time_ms": 1e-9} if "time_ms" in x else x, **b)
attend = torch.nn.functional.scaled_dot_product_attention
""",
    "claims_less_than_no_time": """
real = json.dumps
json.dumps = lambda x, **b: real(x | {"time_ms": -5.0} if "time_ms" in x else x, **b)
attend = three
""",
    "claims_a_late_gpu": """
real = json.dumps
json.dumps = lambda x, **b: real(x | {"late": 7} if "late" in x else x, **b)
attend = three
""",
    "claims_long_calls": """
import harness.measures.timing as timing
real = timing.time_once
timing.time_once = lambda *a: (real(*a)[0], 1e9)
attend = three
""",
    # what it remembers
    "by_one_element": """
answers = {}
def attend(q, k, v, **more):
    key = (q.shape, q.requires_grad, float(v.detach().flatten()[0]))
    if key not in answers:
        answers[key] = three(q, k, v, **more).detach()
    return answers[key] + 0 * q + 0 * k.sum() + 0 * v.sum()
""",
    "by_hash_of_v": """
answers = {}
def attend(q, k, v, **more):
    data = v.detach().contiguous().numpy().tobytes()
    key = (q.shape, hashlib.sha256(data).digest())
    if key not in answers:
        answers[key] = three(q, k, v, **more).detach()
    return answers[key] + 0 * q + 0 * k.sum() + 0 * v.sum()
""",
    # only one call is timed, since it takes long, or its kernels are interpreted
    "by_shape_slowly": """
answers = {}
def attend(q, k, v, **more):
    time.sleep(1.1 if q.shape[2] > 16 else 0)
    if q.shape not in answers:
        answers[q.shape] = three(q, k, v, **more).detach()
    return answers[q.shape] + 0 * q + 0 * k.sum() + 0 * v.sum()
""",
    "by_shape_interpreted": """
answers = {}
def attend(q, k, v, **more):
    if q.shape not in answers:
        answers[q.shape] = stages.by_number(5).attend(q, k, v, **more)
    return answers[q.shape].clone()
""",
    "lazy": """
class Lazy(torch.Tensor):
    def detach(self):
        return three(*self.given)
def attend(q, k, v, **more):
    x = torch.empty_like(q).as_subclass(Lazy)
    x.given = (q, k, v)
    return x
""",
    "quick_in_a_timer": """
def attend(q, k, v, **more):
    frame = sys._getframe()
    while frame:
        if "timeit" in frame.f_code.co_filename or frame.f_code.co_name == "sample":
            return q * 1 + 0 * k.sum() + 0 * v.sum()
        frame = frame.f_back
    return three(q, k, v, **more)
""",
    "computes_later": """
def attend(q, k, v, **more):
    o = torch.empty_like(q)
    def work():
        time.sleep(0.01)
        o.data.copy_(three(q, k, v))
    threading.Thread(target=work).start()
    return o
""",
    "one_buffer": """
buffers = {}
def attend(q, k, v, **more):
    o = buffers.setdefault(q.shape, torch.empty_like(q))
    return o.copy_(three(q, k, v, **more))
""",
    # what it is given
    "contiguous_assumed": """
def attend(q, k, v, **more):
    def dense(x):
        B, H, N, d = x.shape
        return x.as_strided(x.shape, (H * N * d, N * d, d, 1))
    return three(dense(q), dense(k), dense(v), **more)
""",
    "contiguous_demanded": """
def attend(q, k, v, **more):
    B, H, N, d = q.shape
    q.view(B, H, N * d)
    return three(q, k, v, **more)
""",
    # memory and hangs
    "hoards_at_import": """
held = [torch.ones(100 << 20, dtype=torch.uint8) for _ in range(15)]
attend = three
""",
    "hoards_in_a_fork": """
def attend(q, k, v, **more):
    if (pid := os.fork()) == 0:
        held = [b"1" * (100 << 20) for _ in range(15)]
        time.sleep(1)
        os._exit(0)
    os.waitpid(pid, 0)
    return three(q, k, v, **more)
""",
    "hangs_at_import": """
time.sleep(10_000)
attend = three
""",
    "ends_at_import": """
os._exit(0)
attend = three
""",
    # wrong kernels
    "drops_the_tail": """
def attend(q, k, v, **more):
    o = three(q, k, v, **more).clone()
    o[:, :, -1] = 0
    return o
""",
    "relu": """
def attend(q, k, v, **more):
    return torch.softmax((q @ k.mT * q.shape[-1] ** -0.5).relu(), -1) @ v
""",
    "drops_low_scores": """
def attend(q, k, v, **more):
    s = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(s.masked_fill(s < 0.9 * s.amax(-1, keepdim=True), -1e30), -1) @ v
""",
    "a_little_in_l": """
def attend(q, k, v, **more):
    s = q @ k.mT * q.shape[-1] ** -0.5
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return p @ v / (p.sum(-1, keepdim=True) + 1e-5)
""",
    "no_max": """
def attend(q, k, v, **more):
    p = torch.exp(q @ k.mT * q.shape[-1] ** -0.5)
    return p @ v / p.sum(-1, keepdim=True)
""",
}

# those whose answer is right, and whose cell is ok: but what else they do must do no harm
HARMLESS = {
    # figures that the parent computes itself
    "claims_less_than_no_spread": """
real = json.dumps
json.dumps = lambda x, **b: real(x | {"time_iqr_ms": -5.0} if "time_iqr_ms" in x else x, **b)
attend = three
""",
    "claims_no_samples": """
real = json.dumps
json.dumps = lambda x, **b: real(x | {"samples": 0} if "samples" in x else x, **b)
attend = three
""",
    "long_log": """
def attend(q, k, v, **more):
    with contextlib.suppress(OSError):
        os.ftruncate(1, 1 << 40)
    return three(q, k, v, **more)
""",
    "no_log": """
def attend(q, k, v, **more):
    with contextlib.suppress(OSError):
        name = os.readlink("/proc/self/fd/1")
        os.unlink(name)
        os.mkfifo(name)
    return three(q, k, v, **more)
""",
    "floods": """
print("x" * 50_000_000, flush=True)
attend = three
""",
    "leaves_a_stranger": """
def attend(q, k, v, **more):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sh", ["sh", "-c", "while :; do echo stranger; sleep 0.1; done"], {})
        os._exit(0)
    return three(q, k, v, **more)
""",
    "slows_torch": """
slow = torch.softmax
def softmax(*a, **b):
    time.sleep(0.002)
    return slow(*a, **b)
torch.softmax = softmax
attend = three
""",
    "negated_in_name": """
def attend(q, k, v, **more):
    return torch._neg_view(-three(q, k, v, **more))
""",
    "talks": """
print("words of talks", flush=True)
attend = three
""",
    "honest": "attend = three",
}


def write(folder, *names, number=90):
    """--stage options for files of those names, made in `folder`."""
    options = []
    for name in names:
        path = folder / f"{name}.py"
        body = FAILS.get(name) or HARMLESS[name]
        path.write_text(HEAD.format(number=number, name=name) + body)
        options += ["--stage", str(path)]
    return options
