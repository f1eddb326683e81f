// The arithmetic of the player: one query row with scores s and one value v per key.
//
// It is attention with d = 1, q = [sharpness], k = the scores and scale = 1. A wider v is this once
// per column, as all columns share s. Online and Lite round each result to float32, as stages 5 and
// 4 do; `exact` is in float64. Sums run from the first key to the last, so a last bit may differ
// from NumPy's. tests/course/test_page_arithmetic.py compares every number with `ladder trace`.

const f = Math.fround;
const exp = (x) => f(Math.exp(x));
const sum = (x) => x.reduce((total, each) => f(total + each), 0);
const dot = (x, y) => sum(x.map((each, i) => f(each * y[i])));

// what the lab's diagnoses say of each mistake (course/lab/mistakes.py)
export const MISTAKES = {
  rescale: "no rescale: acc is not rescaled: multiply it by alpha before adding a tile",
  tail: "ragged tail unmasked: keys past the last weigh something; their score must be -inf, not 0",
  zero:
    "no max: exp of a score past 88 overflows float32, and below -104 it is 0; subtract the row's max first",
};

/** The scores times the sharpness, in float32. */
export function sharpened(s, by) {
  return s.map((each) => f(f(each) * f(by)));
}

/**
 * Go through the keys, `tile` of them at a time; returns the state after each tile.
 *
 * s, v: arrays of float32, one number per key. mistake: a key of MISTAKES, made by Online alone.
 * A step has the names of course/tracing/trace.py, and m_old, l_old, acc_old; kept: what each key
 * so far weighs in acc; lite_kept: in Lite's sum; past_end: the p of places past the last key.
 */
export function walk(s, v, tile, mistake) {
  let [m_i, l_i, acc, lite, lite_weight] = [mistake === "zero" ? 0 : -Infinity, 0, 0, 0, 0];
  let [kept, lite_kept] = [[], []];
  const steps = [];
  for (let start = 0; start < s.length; start += tile) {
    const stop = Math.min(start + tile, s.length);
    const [s_tile, v_tile] = [s.slice(start, stop), v.slice(start, stop)];
    // a whole tile is loaded: past the last key, k and v are zeros, and the mask makes s -inf
    const beyond = Array(start + tile - stop).fill(mistake === "tail" ? 0 : -Infinity);
    const [m_old, l_old, acc_old] = [m_i, l_i, acc];
    m_i = Math.max(m_old, ...s_tile, ...beyond);
    const alpha = exp(f(m_old - m_i));
    const p = s_tile.map((each) => exp(f(each - m_i)));
    const past_end = beyond.map((each) => exp(f(each - m_i)));
    l_i = f(f(l_old * alpha) + sum([...p, ...past_end]));
    const worth = mistake === "rescale" ? 1 : alpha;
    acc = f(f(acc_old * worth) + dot(p, v_tile));
    kept = [...kept.map((each) => f(each * worth)), ...p];

    const top = Math.max(...s_tile);
    const alone = s_tile.map((each) => exp(f(each - top)));
    const total = sum(alone);
    const lite_p = alone.map((each) => f(each / total));
    lite = f(lite + dot(lite_p, v_tile));
    lite_weight = f(lite_weight + sum(lite_p));
    lite_kept = [...lite_kept, ...lite_p];

    steps.push({
      start, stop, s: s_tile, m_old, m_i, alpha, p, past_end, l_old, l_i, acc_old, acc,
      o: f(acc / l_i), kept, lite_p, lite, lite_weight, lite_kept,
    });
  }
  return steps;
}

/** Softmax over all the keys at once, in float64: {weights, o}. */
export function exact(s, v) {
  const top = Math.max(...s);
  const p = s.map((each) => Math.exp(each - top));
  const total = p.reduce((a, b) => a + b);
  const weights = p.map((each) => each / total);
  return { weights, o: weights.reduce((o, weight, i) => o + weight * v[i], 0) };
}
