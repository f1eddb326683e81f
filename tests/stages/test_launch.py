"""The launch path tells apart what Triton tells apart, and keeps nothing that it must not keep."""

import _thread
import contextlib
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from stages.common import launch as path
from stages.common import machine
from stages.common.launch import Launch, Launches, fast_launch, kind_of_tensors
from stages.common.machine import has_module

needs_triton = pytest.mark.skipif(
    not has_module("triton"), reason="no wheel of triton for this machine"
)

# numbers at the borders of what Triton specializes on
NUMBERS = (
    0, 1, 2, 16, 17, 32, -1, -16, True, False, 0.0, 0.5, 1.0, 16.0,
    2**31 - 1, 2**31, 2**32 + 16, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63,
)  # fmt: skip
CONSTANTS = (0, 1, True, False, 1.0, 16, None, "tf32", "ieee")


def kernel_with_two_numbers(x_ptr, y_ptr, n, free, CONSTANT):
    """Only its signature counts."""


def tensors():
    """None, and tensors of several dtypes, at addresses of several alignments."""
    memory = torch.zeros(64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    return (None, *(
        memory[start + offset : start + offset + 16].view(dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for offset in (0, 4, 8, 16)
    ))  # fmt: skip


def descriptors():
    """As stage 9 makes them: of other dtypes, blocks and layouts."""
    from stages.s09_gluon_hopper import launch

    make = launch.descriptor.__wrapped__
    other = make(1024, torch.float16, (1, 2, 300, 64), (38400, 19200, 64, 1), 64, 64)
    other.layout = launch.gl.NVMMASharedLayout(64, 16, rank=4)
    shape, strides = (1, 2, 300, 64), (38400, 19200, 64, 1)
    return (
        launch.described_as(other, torch.float16),
        *(
            make(address, dtype, shape, strides, rows, BLOCK_D)
            for address in (1024, 2048)
            for dtype in (torch.float16, torch.bfloat16)
            for rows, BLOCK_D in ((64, 64), (128, 64), (64, 128))
        ),
        *(
            launch.float32_descriptor.__wrapped__(1024, shape, block)
            for shape, block in (
                ((1, 2, 2, 128), (1, 1, 2, 64)), ((1, 2, 2, 128), (1, 1, 2, 128)),
                ((64, 256), (16, 256)),
            )
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def binder():
    """The compiler's own key of a launch, as Triton makes it at each call."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import jit

    kernel = jit.JITFunction(kernel_with_two_numbers, do_not_specialize=["free"])
    for param in kernel.params[-1:]:
        param.__dict__["is_constexpr"] = True
    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0
    )
    driver = triton.runtime.driver
    before = driver._active if hasattr(driver, "_active") else None
    driver.set_active(device)
    bind = kernel.create_binder()[-1]

    def key(tensors, numbers, constant, **options):
        _, specialization, options = bind(*tensors, *numbers, constant, **options)
        return jit.compute_cache_key({}, specialization, options)

    yield kernel, key
    if before is not None:
        driver.set_active(before)


def calls():
    """Launches that differ in one argument from the first, or from one another."""
    aligned = tensors()[1]
    usual = {"tensors": (aligned, None), "numbers": (48, 5), "CONSTANT": 3, "num_warps": 4}
    yield usual
    for x in (*tensors(), *descriptors()):
        yield usual | {"tensors": (x, None)}
        yield usual | {"tensors": (aligned, x)}
    for n in NUMBERS:
        yield usual | {"numbers": (n, 5)}
        yield usual | {"numbers": (48, n)}
    for constant in CONSTANTS:
        yield usual | {"CONSTANT": constant}
    yield usual | {"num_warps": 8}
    yield usual | {"num_stages": 3}
    yield usual | {"num_stages": 4}
    yield usual | {"maxnreg": 4}


@needs_triton
def test_what_triton_tells_apart_is_told_apart(binder, monkeypatch):
    kernel, key = binder
    known = Launches(kernel, 2, 2)

    def both(call):
        options = {name: x for name, x in call.items() if name not in ("tensors", "numbers")}
        ours = known.kind((4,), call["numbers"], options), kind_of_tensors(call["tensors"])[0]
        constant = options.pop("CONSTANT")
        return ours, key(call["tensors"], call["numbers"], constant, **options)

    told = [both(call) for call in calls()]
    for (ours, theirs), (ours_again, theirs_again) in itertools.combinations(told, 2):
        assert ours != ours_again or theirs == theirs_again
    # but not where only an address, or a number that is not specialized on, is another
    assert len({ours for ours, _ in told}) < len(told) - 10


class Kernel:
    """Notes how it is called, itself and what it "compiles"."""

    arg_names = ("x_ptr", "y_ptr", "n", "free", "A", "B")

    def __init__(self):
        self.calls, self.pre_run_hooks = [], []
        self.params = [SimpleNamespace(do_not_specialize=name == "free") for name in self.arg_names]

    def __getitem__(self, grid):
        def call(*args, **options):
            self.calls.append(("found", grid, args, options))
            return Compiled(self)

        return call


class CudaLauncher:
    """What Triton 3.6 launches with, of which `launch` is in C."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = "cooperative", "pdl"

    def __init__(self, calls):
        self.calls = calls

    def launch(self, *args):
        self.calls.append(("kept", args[:3], args[13:], args[3:13]))


class Compiled:
    function, packed_metadata = "function", "metadata"
    src = SimpleNamespace(signature={"x_ptr": "*fp16", "n": "i32", "A": "constexpr"})
    metadata = None

    def __init__(self, kernel):
        self.kernel, self.run = kernel, CudaLauncher(kernel.calls)

    def __getitem__(self, grid):
        return lambda *args: self.kernel.calls.append(("by triton", grid, args))


@pytest.fixture
def kernel(monkeypatch):
    """A kernel, and `here`, the current GPU and its stream."""
    here = SimpleNamespace(device=0, stream=7)
    active = SimpleNamespace(
        get_current_device=lambda: here.device,
        get_current_stream=lambda device: (device, here.stream),
    )
    chains = {name: SimpleNamespace(calls=[]) for name in ("launch_enter_hook", "launch_exit_hook")}
    triton = SimpleNamespace(
        __version__="3.6.0",
        JITFunction=Kernel,
        compiler=SimpleNamespace(CompiledKernel=Compiled),
        knobs=SimpleNamespace(runtime=SimpleNamespace(**chains)),
        runtime=SimpleNamespace(driver=SimpleNamespace(active=active)),
    )
    monkeypatch.setattr(path, "triton", triton)
    monkeypatch.setattr(path, "launches", {})
    made = Kernel()
    made.here = here
    return made


X = tensors()[1]


@pytest.fixture
def launch(kernel):
    """The same launch of the kernel, again and again."""
    made = Launch(kernel, (3,), A=1, B=2)
    return lambda: made((X, X), (48, 5))


def kinds(kernel):
    return [call[0] for call in kernel.calls]


def test_a_kernel_is_looked_for_at_the_first_call_only(kernel):
    for free in (5, 6, 1):
        fast_launch(kernel, (3, 2), (X, None), (48, free), A=True, B="b", num_warps=8)
    options = {"A": True, "B": "b", "num_warps": 8}
    how = (0, 7), "function", "cooperative", "pdl", None, None, "metadata", None, None, None
    assert kernel.calls == [
        ("found", (3, 2), (X, None, 48, 5), options),
        ("kept", (3, 2, 1), (X.data_ptr(), None, 48, 6, True, "b"), how),
        ("kept", (3, 2, 1), (X.data_ptr(), None, 48, 1, True, "b"), how),
    ]


def test_another_gpu_has_a_kernel_of_its_own(kernel, launch):
    for kernel.here.device in (0, 1, 0, 1):
        launch()
    assert kinds(kernel) == ["found", "found", "kept", "kept"]
    assert [call[3][0] for call in kernel.calls[2:]] == [(0, 7), (1, 7)]


def test_hooks_see_each_launch(kernel, launch):
    """Triton calls them, with the arguments, where it looks for the kernel."""
    for kernel.pre_run_hooks in ([], [print], []):
        launch()
    assert kinds(kernel) == ["found", "found", "kept"]


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("how", ["in the chain", "in its place"])
def test_a_profiler_sees_each_launch(kernel, launch, which, how):
    hooks, none = path.triton.knobs.runtime, getattr(path.triton.knobs.runtime, which)
    for hook in (none, None, none):
        setattr(hooks, which, hook)
        launch()
    assert kinds(kernel) == ["found", "kept", "kept"]
    setattr(hooks, which, SimpleNamespace(calls=[print]) if how == "in the chain" else print)
    launch()
    assert kernel.calls[3] == ("by triton", (3, 1, 1), (X.data_ptr(), X.data_ptr(), 48, 5, 1, 2))


@pytest.mark.parametrize(
    ("what", "value"),
    [("__version__", "3.8.0"), ("global_scratch_size", 128), ("profile_scratch_size", 128)],
)
def test_another_version_or_a_kernel_that_needs_memory_is_left_to_triton(
    kernel, launch, monkeypatch, what, value
):
    monkeypatch.setattr(path.triton if what == "__version__" else CudaLauncher, what, value)
    for kernel.here.stream in (7, 8):
        launch()
    assert kinds(kernel) == ["found", "by triton"]


class Utils:
    """The driver's part in C: what it gives tells what it was asked for."""

    def __init__(self):
        self.asked = []

    def fill_tma_descriptor(self, *args):
        self.asked.append(args)
        return f"encoded {args}"

    fill_tma_descriptor_tiled = fill_tma_descriptor  # its name from 3.7 on


class Found(SimpleNamespace):
    """A compiled kernel, whose grid Triton's own way notes in `by_triton`."""

    def __getitem__(self, grid):
        return lambda *args: self.by_triton.append((grid, args))


@pytest.fixture
def with_descriptors(monkeypatch):
    """A compiled kernel of two tensors, descriptors and numbers; `got` is what comes to its C."""
    import triton
    from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc

    here = SimpleNamespace(
        utils=Utils(), get_current_device=lambda: 0, get_current_stream=lambda device: (device, 7)
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", here, raising=False)
    signature = {"x": "*fp16", "one": "tensordesc<fp16[1]>", "n": "i32", "two": "tensordesc<fp16>"}
    block = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [1], "fp4_padded": False}
    blocks = [block, block | {"swizzle": 2}]
    got, run = [], object.__new__(CudaLauncher)
    vars(run).update(
        num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=True,
        arg_annotations="annotations", kernel_signature="signature",
        launch=wrap_handle_tensordesc(lambda *args: got.append(args), signature, blocks),
    )  # fmt: skip
    return Found(
        run=run, function="function", packed_metadata="metadata", got=got, here=here, by_triton=[],
        src=SimpleNamespace(signature=signature), metadata=SimpleNamespace(tensordesc_meta=blocks),
    )  # fmt: skip


@needs_triton
def test_the_launcher_in_c_is_called_as_triton_calls_it(with_descriptors):
    """But each descriptor is encoded once."""
    start = path.starter(with_descriptors, (3, 2, 1))
    one, two = descriptors()[1:3]
    arguments = [1024, one, 48, two]
    how = "function", "metadata", None, None, None
    with_descriptors.run(3, 2, 1, (0, 7), *how, *arguments)
    for _ in range(2):
        launch, rest = start([*arguments])
    launch((0, 7), *rest)  # the call that it returns is the same one
    got = with_descriptors.got
    in_one = isinstance(got[0][-1], (list, tuple))  # all arguments, from 3.7 on
    want, *ours = ([*args[:-1], *args[-1]] if in_one else [*args] for args in got)
    assert ours == [want] * 3
    assert len(with_descriptors.here.utils.asked) == 4  # by Triton, and once by us
    assert not with_descriptors.by_triton


def other_closure(found):
    launch = found.run.launch
    found.run.launch = lambda *args: launch(*args)


def without(*names):
    """Take an attribute away, the last of `names`, of what the others lead to."""

    def change(found):
        *owners, last = names
        for name in owners:
            found = getattr(found, name)
        vars(found).pop(last)

    return change


@needs_triton
@pytest.mark.parametrize("change", [
    other_closure,
    lambda found: setattr(found.run, "launch", print),  # in C, with no closure
    without("run", "launch"), without("run", "launch_pdl"), without("run", "profile_scratch_size"),
    without("packed_metadata"), without("src", "signature"), without("metadata", "tensordesc_meta"),
    lambda found: found.metadata.tensordesc_meta.pop(),
    lambda found: setattr(found.metadata, "tensordesc_meta", None),
    lambda found: setattr(found, "run", SimpleNamespace(**vars(found.run))),  # another maker's
])  # fmt: skip
def test_where_triton_s_insides_are_others_triton_starts_kernels_itself(change, with_descriptors):
    change(with_descriptors)
    start = path.starter(with_descriptors, (3, 2, 1))
    arguments = [1024, *descriptors()[1:2], 48, *descriptors()[2:3]]
    assert start([*arguments]) is None
    assert with_descriptors.by_triton == [((3, 2, 1), tuple(arguments))]
    assert not with_descriptors.got


@needs_triton
def test_where_triton_encodes_descriptors_elsewhere_it_starts_kernels_itself(
    with_descriptors, monkeypatch
):
    from triton.backends.nvidia import driver

    monkeypatch.delattr(driver, "make_tensordesc_arg")
    assert path.starter(with_descriptors, (3, 2, 1))([1, 2, 3, 4]) is None
    assert with_descriptors.by_triton == [((3, 2, 1), (1, 2, 3, 4))]


def test_it_is_the_stream_that_is_current_at_the_launch(kernel, launch):
    for kernel.here.stream in (7, 7, 8):
        launch()
    assert [call[3][0] for call in kernel.calls[1:]] == [(0, 7), (0, 8)]


def test_what_is_no_compiled_kernel_is_not_kept(kernel, monkeypatch):
    """The interpreter gives None, and Triton's asynchronous mode something to wait for."""
    monkeypatch.setattr(path.triton.compiler, "CompiledKernel", int)
    for _ in range(2):
        fast_launch(kernel, (3,), (X, X), (48, 5), A=1, B=2)
    monkeypatch.setattr(path.triton, "JITFunction", int)
    monkeypatch.setattr(path.triton, "runtime", None)  # there is no driver
    for _ in range(2):
        fast_launch(kernel, (4,), (X, X), (48, 5), A=1, B=2)
    assert kinds(kernel) == ["found"] * 4


def test_only_so_many_launches_are_kept(kernel, monkeypatch):
    monkeypatch.setattr(path, "MOST_KEPT", 3)
    for n in (1, 2, 3, 3, 4, 4, 1):
        fast_launch(kernel, (3,), (X, X), (n, 5), A=1, B=2)
    assert kinds(kernel) == ["found", "found", "found", "kept", "found", "kept", "found"]


def steps_of(launches):
    return [(launch, (X, None), (48, 5)) for launch in launches]


@pytest.fixture
def two(kernel, monkeypatch):
    """Two launches of one kernel, of other grids, both found."""
    monkeypatch.setattr(path, "kept", {})
    launches = [Launch(kernel, (n,), A=1, B=2) for n in (3, 4)]
    path.launch_and_keep("found by Triton", steps_of(launches))
    assert kinds(kernel) == ["found"] * 2
    assert not path.launch_again("found by Triton")
    kernel.calls.clear()
    return launches


class User:
    """Does `two` again and again; the driver may refuse a CUDA graph of them."""

    refused, tries = False, 0

    def __init__(self, kernel, launches):
        self.calls, self.steps, self.graphs = kernel.calls, steps_of(launches), []
        self.here = kernel.here

    def again(self, key="key"):
        if not path.launch_again(key):
            path.launch_and_keep(key, self.steps)
            self.calls.clear()

    def graph_of(self, launches, stream):
        assert stream == (0, self.here.stream)
        self.tries += 1
        if self.refused:
            return None
        self.graphs.append(launches)
        return SimpleNamespace(launch=self.launch)

    def launch(self, stream):
        self.calls.append(("graph", stream))
        return not self.refused

    def done(self):
        done = [call[0] for call in self.calls]
        self.calls.clear()
        return done


@pytest.fixture
def user(kernel, two, monkeypatch):
    made = User(kernel, two)
    monkeypatch.setattr(path, "graph_of", made.graph_of)
    return made


def test_launches_are_done_again_as_they_were_but_on_the_current_stream(kernel, two, user):
    path.launch_and_keep("key", steps_of(two))
    assert not path.launch_again("another")
    kernel.here.stream = 8
    assert path.launch_again("key")
    before, after = kernel.calls[:2], kernel.calls[2:]
    assert [call[:3] for call in after] == [call[:3] for call in before]
    assert [call[3] for call in before] == [((0, 7), *how[1:]) for *_, how in after]
    assert [call[3][0] for call in after] == [(0, 8)] * 2


def test_launches_are_done_again_on_the_gpu_that_they_are_of(kernel, two):
    kernel.here.device = 1
    for _ in range(2):
        path.launch_and_keep("key", steps_of(two))
    kernel.calls.clear()
    assert path.launch_again("key")
    assert [call[3][0] for call in kernel.calls] == [(1, 7)] * 2


@pytest.mark.parametrize("hooked", ["kernel", "launch_enter_hook", "launch_exit_hook"])
def test_what_hooks_are_to_see_is_not_done_again(kernel, two, user, hooked):
    path.launch_and_keep("key", steps_of(two))
    hooks = path.triton.knobs.runtime
    hooks = kernel.pre_run_hooks if hooked == "kernel" else getattr(hooks, hooked).calls
    for times in (1, path.GRAPH_FROM + 1):  # with a graph, too
        hooks.append(print)
        assert not path.launch_again("key")
        hooks.clear()
        assert all(path.launch_again("key") for _ in range(times))
    assert user.done()[-1] == "graph"
    if hooked == "kernel":
        kernel.pre_run_hooks = [print]
        assert not path.launch_again("key")


def test_nothing_is_kept_without_a_key_or_of_what_triton_launched(kernel, two):
    path.launch_and_keep(None, steps_of(two))
    assert not path.launch_again(None)
    path.launch_and_keep("key", steps_of([two[0], Launch(kernel, (5,), A=1, B=2)]))
    assert kinds(kernel) == ["kept", "kept", "kept", "found"]
    assert not path.launch_again("key")


def test_what_is_done_often_becomes_one_graph(user):
    for _ in range(1 + path.GRAPH_FROM + 2):
        user.again()
    assert user.done() == ["kept"] * 2 * path.GRAPH_FROM + ["graph"] * 2
    [launches] = user.graphs
    launches(77)
    assert [(call[0], 77 in call[3]) for call in user.calls] == [("kept", True)] * 2
    user.calls.clear()
    user.again("another")
    user.again("another")
    assert user.done() == ["kept"] * 2


def test_beside_other_threads_there_is_no_graph(user):
    """What they wait for, such as all that the device does, no capture allows."""
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        for _ in range(1 + path.GRAPH_FROM + 2):
            user.again()
    finally:
        end.set()
        other.join()
    assert user.done() == ["kept"] * 2 * (path.GRAPH_FROM + 2)


def test_a_thread_that_python_did_not_start_is_no_other(user):
    """As the one that autograd runs a backward pass in, which main waits for."""
    done = _thread.allocate_lock()
    for _ in range(1 + path.GRAPH_FROM + 2):
        done.acquire()
        _thread.start_new_thread(
            lambda: (threading.current_thread(), user.again(), done.release()), ()
        )
        with done:
            pass
    assert user.done()[-2:] == ["graph"] * 2


def test_where_no_graph_can_be_made_it_is_tried_again_ever_more_rarely(user):
    user.refused = True
    for _ in range(1 + 8 * path.GRAPH_FROM):
        user.again()
    assert set(user.done()) == {"kept"} and user.tries == 4
    user.refused = False
    for _ in range(8 * path.GRAPH_FROM + 1):
        user.again()
    assert user.done()[-1] == "graph" and user.tries == 5


def test_what_a_graph_can_not_be_launched_for_is_done_by_itself(user):
    for _ in range(1 + path.GRAPH_FROM):
        user.again()
    user.done()
    user.refused = True
    user.again()
    assert user.done() == ["graph", "kept", "kept"]


def test_only_so_much_is_kept_and_as_many_graphs(two, user, monkeypatch):
    monkeypatch.setattr(path, "MOST_KEPT", 3)
    for key in range(5):
        path.launch_and_keep(key, steps_of(two))
    assert [path.launch_again(key) for key in range(5)] == [False] * 3 + [True] * 2
    monkeypatch.setattr(path, "MOST_GRAPHS", 1)
    for key in (3, 4):
        for _ in range(path.GRAPH_FROM + 2):
            user.again(key)
    assert user.done()[-2:] == ["kept"] * 2 and len(user.graphs) == 1


def test_whether_a_graph_is_captured_is_asked_of_the_tensor_s_own_gpu(monkeypatch):
    """Another GPU's stream may capture one at the same time."""
    here = [0]

    @contextlib.contextmanager
    def device_of(x):
        here.append(x.get_device())
        yield
        here.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: here[-1])
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: here[-1] == 1)
    for index in (0, 1):
        x = SimpleNamespace(is_cuda=True, get_device=lambda index=index: index)
        assert machine.capturing(x) == (index == 1) and here == [0]
    assert not machine.capturing(torch.ones(1))
