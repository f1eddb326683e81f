"""Each known mistake, made in a solution by one edit, is found, and called by its name."""

import functools
import signal as signals
from dataclasses import replace

import pytest
from test_lab import solution

from course.edits import replace_each
from course.lab import checks, labs
from harness.isolation.roster import describe_files

pytestmark = pytest.mark.slow  # a few processes each

S5 = "s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale"
# mistake: stage, (old, new), the check that shows it, what the diagnosis begins with, and a word
MISTAKES = {
    "local softmax": (5, (
        ("m_new = tl.maximum(m_i, tl.max(s, 1))", "m_new = tl.max(s, 1)"),
        ("acc = acc * alpha[:, None]", "p = p / tl.sum(p, 1)[:, None]"),
        ("    acc = acc / l_i[:, None]\n", ""),
    ), "many keys", "local softmax"),
    "no rescale of acc": (5, (("acc = acc * alpha[:, None]", "acc = acc"),), "many keys",
                          "no rescale: acc"),
    "no rescale of l": (5, (("l_i = l_i * alpha + tl.sum", "l_i = l_i + tl.sum"),), "many keys",
                        "no rescale: l "),
    "no max": (5, (("m_new = tl.maximum(m_i, tl.max(s, 1))", "m_new = m_i * 0"),
                   ("-3.4028234663852886e38", "0.0")), "large scores", "no max"),
    "Python's max": (5, (("tl.maximum(m_i, tl.max(s, 1))", "max(m_i, tl.max(s, 1))"),),
                     "large scores", "mine.py:89: Python's max of two tiles"),
    "no scale": (5, ((S5, S5.replace(" * scale", "")),), "a few keys", "wrong scale"),
    "K not transposed": (5, (("tl.trans(k)", "k"),), "as many keys as columns", "K not transposed"),
    "K not transposed, and other shapes": (5, (("tl.trans(k)", "k"),), "a few keys",
                                           "shapes don't fit"),
    "no axis for the columns": (5, (("acc = acc * alpha[:, None]", "acc = acc * alpha"),),
                                "a few keys", "shapes don't fit: one number per row"),
    "no axis for the columns, in NumPy": ("numpy", (("s - m_new[:, None]", "s - m_new"),),
                                          "a few keys", "shapes don't fit: one number per row"),
    "mask off by one": (6, (("<= rows[:, None] + shift", "< rows[:, None] + shift"),), "causal",
                        "mask off by one: a row misses"),
    "mask too wide": (6, (("<= rows[:, None] + shift", "<= rows[:, None] + shift + 1"),),
                      "causal, fewer queries", "mask off by one: a row sees"),
    "ragged tail unmasked": (5, (('s = tl.where(in_range[None, :], s, float("-inf"))', "s = s"),),
                             "one key in the last tile", "ragged tail unmasked"),
    "stride assumed": (5, (("offs_n[:, None] * stride_kn + offs_d[None, :] * stride_kd",
                            "offs_n[:, None] * stride_kn + offs_d[None, :]"),),
                       "batch, heads and strides", "stride assumed: of q or k"),
    "d not a power of two": (5, (("1 << (d - 1).bit_length()", "1 << (d.bit_length() - 1)"),),
                             "d is no power of two", "d not a power of two"),
    "d as it comes": (5, (("max(16, 1 << (d - 1).bit_length())", "d"),), "d is no power of two",
                      "d not a power of two"),
    "output dtype": (5, (("dtype=q.dtype, dev", "dtype=torch.float32, dev"),), "float16",
                     "output dtype"),
    "no output": (3, (("    return o if blind", "    o = o if blind"),), "a few keys",
                  "no output: attend must"),
    "input written to": (3, (("    s = (q * scale)", "    q *= scale\n    s = q"),), "a few keys",
                         "input written to"),
    "gradient ignoring dO": (0, (("backward(roots, dO.flatten().tolist())",
                                  "backward(roots, [1.0] * len(roots))"),), "gradients",
                             "gradient ignoring dO"),
    "no delta": (7, (("tl.sum(o * do, 1), mask", "tl.sum(o * do, 1) * 0, mask"),), "gradients",
                 "delta is missing"),
    "overflow in Python": (1, (("m_i = max(s)", "m_i = 0.0"),), "scores of 1000", "no max"),
    "scale twice, in Python": (1, (("* scale for k_row", "* scale * scale for k_row"),),
                               "a few keys", "wrong scale"),
    "no rescale, in NumPy": ("numpy", (("acc = acc * alpha[:, None]", "acc = acc"),), "many keys",
                             "no rescale: acc"),
    "lengths ignored": (3, (("hidden | (offs_n >= seqlens_k[:, None, None, None])", "hidden"),),
                        "lengths and grouped heads", "the lengths seqlens_k are ignored"),
    "parts unweighted": (8, (("w_s = tl.exp2((m_s - m_safe) * qk_scale)", "w_s = l_s * 0 + 1"),),
                         "many parts", "merge without weights"),
    "merged acc not rescaled": (8, (("acc = acc * alpha + tl.sum(w_s", "acc = acc + tl.sum(w_s"),),
                                "more parts than are merged at once", "no rescale: acc"),
    "rescaled after adding": (5, (
        ("        acc = acc * alpha[:, None]\n", ""),
        ("acc += tl.dot(", "acc = alpha[:, None] * tl.dot("),
        ("input_precision=PRECISION)  # (BLOCK_M, BLOCK_D)", "acc=acc, input_precision=PRECISION)"),
    ), "many keys", "rescaled too late"),
    "acc set": (5, (("acc += tl.dot(", "acc = tl.dot("),), "many keys", "acc is set"),
    "l set": (5, (("l_i = l_i * alpha + tl.sum", "l_i = tl.sum"),), "many keys", "l is set"),
    "old max kept": (5, (("        m_i = m_new\n", ""),), "many keys", "m_i keeps"),
    "no max in p": (5, (("p = tl.exp(s - m_new[:, None])", "p = tl.exp(s)"),), "many keys",
                    "no max: p is exp(s)"),
    "p divided too early, in NumPy": ("numpy", (("l_i = l_i * alpha + p.sum(1)",
                                                 "p /= p.sum(1)[:, None]; l_i = l_i * alpha + 1"),),
                                      "many keys", "local softmax: p is divided"),
    "alpha exchanged": (5, (("tl.exp(m_i - m_new)", "tl.exp(m_new - m_i)"),), "a few keys",
                        "no known mistake gives just this; first tile that differs: keys 0 to 63"),
    "no tile visited": (5, (("range(0, Nk, BLOCK_N)", "range(0, Nk // BLOCK_N)"),), "a few keys",
                        "no number of the output is finite"),
    "one key too many": (5, (("s = tl.where(in_range[", "s = tl.where((start_n + offs_n <= Nk)["),),
                         "one key in the last tile", "mask off by one: a key past the last"),
    "one key too few": (5, (("< Nk  #", "< Nk - 1  #"),), "a few keys",
                        "mask off by one: the last key is left out"),
    "softmax over the queries": (3, (("torch.softmax(s, dim=-1)", "torch.softmax(s, dim=-2)"),),
                                 "a few keys", "softmax over the queries"),
    "mask inverted": (3, (("hidden | (offs_n > offs_m", "hidden | (offs_n <= offs_m"),), "causal",
                      "the mask is inverted"),
    "scaled by the keys": ("numpy", (("q.shape[-1] ** -0.5", "k.shape[-2] ** -0.5"),),
                           "many keys", "wrong scale: scaled by Nk"),
    "float32 rounded": (5, (("p.to(v.dtype), v", "p.to(tl.float16), v.to(tl.float16)"),),
                        "a few keys", "precision lowered"),
    "p not converted": (5, (("p.to(v.dtype), v", "p, v"),), "float16", "factors of two dtypes"),
    "torch in a kernel": (5, (("p = tl.exp(", "p = torch.exp("),), "a few keys",
                          "torch in a kernel"),
    "@ in a kernel": (5, ((S5, "s = q @ tl.trans(k) * scale"),), "a few keys", "tiles have no @"),
    "tl.max of two tiles": (5, (("tl.maximum(m_i, tl", "tl.max(m_i, tl"),), "a few keys",
                            "tl.max and tl.sum take one tile"),
    "Python's max, in NumPy": ("numpy", (("np.maximum(m_i", "max(m_i"),), "a few keys",
                               "Python's max compares whole arrays"),
    "derivatives exchanged": (0, (("(other.data, self.data))", "(self.data, other.data))"),),
                              "gradients", "a product's derivatives are exchanged"),
    "derivatives of a sum": (0, (("(other.data, self.data))", "(1.0, 1.0))"),), "gradients",
                             "a product's derivatives are 1"),
    "derivative of a constant": (0, (("(self,), (other,))", "(self,), (self.data,))"),),
                                 "gradients", "the derivative of a product with a number"),
    "gradient set": (0, (("parent.grad += ", "parent.grad = "),), "gradients",
                     "a parent's gradient is set"),
    "no outer gradient": (0, (("+= local_grad * node.grad", "+= local_grad"),), "gradients",
                          "node.grad is left out"),
    "no local gradient": (0, (("+= local_grad * node.grad", "+= node.grad"),), "gradients",
                          "local_grad is left out"),
    "an error on the way back": (0, (("+= local_grad * node.grad", "+= local_grads * node.grad"),),
                                 "gradients", "a name is used that nothing was assigned to"),
    "delta twice": (7, (("ds = p * (dp - delta[:, None])", "ds = p * (dp - 2 * delta[:, None])"),),
                    "gradients", "delta is subtracted twice"),
    "delta added": (7, (("ds = p * (dp - delta[:, None])", "ds = p * (dp + delta[:, None])"),),
                    "gradients", "delta is added"),
    "P by exp": (7, (("p = tl.exp2(s * qk_scale - lse[None, :])",
                      "p = tl.exp(s * qk_scale - lse[None, :])"),), "gradients",
                 "P is made by exp, but"),
    "P without lse": (7, (("tl.exp2(s * qk_scale - lse[None, :])", "tl.exp2(s * qk_scale)"),),
                      "gradients", "P is made without lse"),
    "P not scaled": (7, (("tl.exp2(s * qk_scale - lse[None, :])", "tl.exp2(s - lse[None, :])"),),
                     "gradients", "P is made of scores that are not scaled"),
    "merged l not rescaled": (8, (("l_i = l_i * alpha + tl.sum(w_s", "l_i = l_i + tl.sum(w_s"),),
                              "more parts than are merged at once", "no rescale: l "),
    "mask without the shift": (6, (("<= rows[:, None] + shift", "<= rows[:, None]"),),
                               "causal, fewer queries", "causal mask without Nk - Nq"),
    "full without the shift": (6, (("tl.maximum(start_m + shift + 1", "tl.maximum(start_m + 1"),),
                               "causal, more queries", "full without Nk - Nq"),
    "end without the shift": (6, (("start_m + BLOCK_M, Nq) + shift", "start_m + BLOCK_M, Nq)"),),
                              "causal, fewer queries", "end without Nk - Nq"),
    "end one too few": (6, (("BLOCK_M, Nq) + shift, 0", "BLOCK_M, Nq) + shift - 1, 0"),),
                        "causal, fewer queries", "end is one too few"),
    "full of the last row": (6, (("(start_m + shift + 1, 0", "(start_m + shift + BLOCK_M, 0"),),
                             "causal", "full is what the block's last row sees"),
    "no tile seen whole": (6, (("full // BLOCK_N * BLOCK_N", "0"),), "tiles that need no mask",
                           "every tile is masked"),
    "memory": (1, (("m_i = max(s)", "m_i = max(s); held = [b'1' * (1 << 27) for _ in range(40)]"),),
               "a few keys", "it takes more memory"),
    "no such attribute": (5, (("p = tl.exp(", "p = tl.expo("),), "a few keys", "there is no such"),
    "past the end": (1, (("m_i = max(s)", "m_i = s[99]"),), "a few keys", "an index is past"),
}  # fmt: skip


@functools.cache
def described(stage):
    """What a solution says of itself."""
    number, numpy = (5, True) if stage == "numpy" else (stage, False)
    [info] = describe_files([labs.source(number, numpy)])
    return info


def judged(stage, edits, name, folder, info=None):
    """What comes of a solution with `edits`, in the check `name` alone, with its fewest calls.

    `info`: what it says of itself, where the edits change that.
    """
    number, asked, info = prepared(stage, edits, name, folder, info)
    return checks.judged(info, number, [asked], folder, lambda mark: None)


def prepared(stage, edits, name, folder, info=None, seed=1):
    """The stage's number, the check `name` from a seed, and a solution with `edits`."""
    if stage in range(4, 9):
        pytest.importorskip("triton", reason="no wheel of triton")
    path = write(stage, edits, folder)
    number = 5 if stage == "numpy" else stage
    [asked] = [each for each in checks.checks(number, seed) if each.name == name]
    asked = replace(asked, calls=(asked.calls[0], asked.calls[0]))
    return number, asked, info or replace(described(stage), path=path)


def write(stage, edits, folder):
    """The file of a solution with `edits`."""
    name, shipped = solution(stage)
    text = replace_each(shipped, edits, name)
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_called_by_its_name(name, tmp_path):
    stage, edits, shows, begins = MISTAKES[name]
    found = judged(stage, edits, shows, tmp_path)
    assert found.verdict in ("failed", "crashed", "out-of-memory"), found
    assert found.diagnosis.startswith(begins), (found.diagnosis, found.case)


@pytest.mark.parametrize("name", MISTAKES)
def test_the_check_of_a_mistake_fails_it_whatever_the_seed(name, tmp_path):
    stage, edits, shows, _ = MISTAKES[name]
    for seed in (2, 3):
        number, asked, info = prepared(stage, edits, shows, tmp_path, seed=seed)
        rules = checks.rules(number, stage == "numpy")
        mark = checks.one(info, asked, rules, checks.calls.USUAL)
        assert not mark.passed, seed


def test_the_first_tile_that_differs_is_named(tmp_path):
    found = judged(*MISTAKES["no rescale of l"][:3], tmp_path)
    assert any("first tile that differs: keys 64 to 127, after which l_i" in x for x in found.case)
    edit = ("dk = tl.dot(ds.to(q.dtype), q, dk,", "dk = tl.dot(ds.to(q.dtype), q, dk * 0,")
    found = judged(7, (edit,), "gradients under a mask", tmp_path)
    assert any(x.startswith("wrong: dk; right: o, dq, dv. Look at the ds") for x in found.case)
    assert "first tile that differs: rows 32 to 63, after which dk" in found.diagnosis
    edit = ("l_i = l_i * alpha + tl.sum(p, 1)", "l_i = l_i * alpha + tl.sum(p, 1) * (1 + start_n)")
    found = judged(6, (edit,), "many keys", tmp_path)
    says = "no known mistake gives just this; first tile that differs: keys 64 to 127, after which"
    assert found.diagnosis.startswith(f"{says} l_i")
    assert " is wrong in rows 0-4 (all 5) and columns 0-15 (all 16)" in found.case[1]


def test_the_first_tile_that_differs_is_named_where_all_scores_are_low(tmp_path):
    edit = ("tl.maximum(m_i, tl.max(s, 1))", "tl.max(s, 1)")
    found = judged(5, (edit,), "large scores", tmp_path)
    assert "first tile that differs: keys 64 to 127, after which m_i of row" in found.diagnosis
    assert "is m_new the larger of m_i and the tile's max" in found.diagnosis


@pytest.mark.parametrize(
    ("edit", "look"),
    [
        (("tl.exp(m_i - m_new)", "tl.exp(m_new - m_i)"), "alpha must be exp(m_i - m_new)"),
        (("tl.sum(p, 1)", "tl.sum(p, 1) * 2"), "m_i is right, so look at p"),
        (
            ("tl.sum(p, 1)", "tl.sum(p, 1) * (1 if start_n < 64 else float('inf'))"),
            "m_i is right, so look at p",
        ),
        (("acc = acc * alpha[:, None]", "acc = acc / alpha[:, None]"), "l_i is right, so look at"),
        ((S5, f"{S5} * 1.5"), "look at s, its scale and its mask"),
    ],
)
def test_of_the_first_tile_the_first_wrong_state_says_where_to_look(edit, look, tmp_path):
    found = judged(5, (edit,), "many keys", tmp_path)
    assert look in " ".join((*found.case, found.diagnosis)), found


def test_clearing_columns_past_d_masks_no_score(tmp_path):
    product = "        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)"
    cleared = "        k = tl.where(in_d, k, 0.0)\n        v = tl.where(in_d, v, 0.0)\n"
    found = judged(6, ((product, cleared + product),), "tiles that need no mask", tmp_path)
    assert found.verdict == "passed", found


def test_an_error_that_is_its_own_cause_ends_at_once(tmp_path):
    ring = "exec('try: 1 / 0\\nexcept Exception as error: raise error from error')"
    edit = ("p = [math.exp(", f"{ring}; p = [math.exp(")
    found = judged(1, (edit,), "a few keys", tmp_path)
    assert found.verdict == "crashed"
    assert "division by zero" in " ".join((found.diagnosis, *found.case)), found


@pytest.mark.parametrize("signal", ["SIGABRT", "SIGSEGV"])
def test_a_process_that_memory_ends_is_asked_for_its_masks(signal, tmp_path):
    edit = ("p = [math.exp(", f"__import__('signal').raise_signal({int(getattr(signals, signal))})")
    edit = (edit[0], f"{edit[1]}; {edit[0]}")
    found = judged(1, (edit,), "a few keys", tmp_path)
    assert found.verdict == "crashed" and "without its mask" in found.diagnosis, found


def test_the_line_of_an_error_in_a_backward_pass_is_shown(tmp_path):
    found = judged(7, (("ds = p * dp_less_delta", "ds = p * dp"),), "gradients", tmp_path)
    assert found.verdict == "crashed"
    assert "`ds = p * dp`: " in found.case[0], found.case


def test_of_a_warning_the_words_are_shown_and_not_its_folder(tmp_path):
    edit = ("np.exp(m_i - m_new)", "np.exp(m_new - m_i)")
    found = judged("numpy", (edit,), "a few keys", tmp_path)
    warned = [x for x in found.case if "Warning" in x]
    assert warned and all(x.startswith("it printed: mine.py:") for x in warned)
    assert not any("alpha = np.exp" in x for x in found.case)


def test_the_line_that_failed_is_shown_and_its_own_words_explain_nothing(tmp_path):
    [*_, name, _] = MISTAKES["no axis for the columns"]
    edit = ("acc = acc * alpha[:, None]", "acc = acc * alpha + 0 * len('matmul')  # a note")
    found = judged(5, (edit,), name, tmp_path)
    text = (tmp_path / "mine.py").read_text(encoding="utf-8").splitlines()
    line = next(at for at, x in enumerate(text, start=1) if "'matmul'" in x)
    assert found.case[0].startswith(f"mine.py:{line}: `acc = acc * alpha + 0 * len('matmul')`: ")
    assert found.diagnosis.startswith("shapes don't fit: one number per row")


def test_numbers_of_no_known_mistake_get_no_name(tmp_path):
    edit = ("p = [math.exp(x - m_i) for x in s]", "p = [math.exp(x - m_i) + 0.01 for x in s]")
    found = judged(1, (edit,), "a few keys", tmp_path)
    assert (found.verdict, found.marks[0].status) == ("failed", "wrong")
    assert found.diagnosis.startswith("no known mistake") and "the softmax" in found.diagnosis


def test_what_a_file_prints_is_shown_with_its_first_failure(tmp_path):
    edits = ("m_i = max(s)", "m_i = max(s); print(len(s), 'scores')"), ("/ l_i for", "for")
    found = judged(1, edits, "a few keys", tmp_path)
    assert found.diagnosis.startswith("not divided by l")
    assert "it printed: 5 scores" in found.case


def test_a_lab_is_refused_where_it_can_not_run_and_not_where_the_file_says_so(tmp_path):
    asked = list(checks.checks(1, 1))[:1]
    away = {"cpu": "needs triton, which is not installed", "cuda": None}
    with pytest.raises(checks.Unchecked, match="not installed"):
        checks.judged(
            replace(described(1), unavailable=away), 1, asked, tmp_path, lambda mark: None
        )
    for less in ('devices=("cuda",)', 'needs=("flash-attn-4",)'):
        edits = (('devices=("cpu",)', less),)
        [info] = describe_files([write(1, edits, tmp_path)])
        found = judged(1, edits, "a few keys", tmp_path, info)
        assert (found.verdict, found.marks[0].status) == ("failed", "skipped")
        assert "declares less" in found.diagnosis
