// What Online carries from tile to tile, as formulas with numbers and as bars; and a step in words.

import { make, show } from "./dom.js";

const sum = (x) => x.reduce((a, b) => a + b, 0);

/** Say in a sentence or two what a step did; `now` is undefined before the first. */
export function narration({ mistake, tile, s }, now, count) {
  if (!now) {
    const [keys, tiles] = [[s.length, "key"], [count, "tile"]].map(([x, word]) => `${x} ${word}${x === 1 ? "" : "s"}`);
    return `${keys} in ${tiles}. None is read yet, and l_i and acc are 0.`;
  }
  const last = now.stop - 1;
  const keys = now.start === last ? `key ${last}` : `keys ${now.start} to ${last}`;
  return `Tile ${now.start / tile}, ${keys}. ${explained(now, mistake)}`;
}

function explained({ m_old, m_i, alpha, start, o, past_end, l_i }, mistake) {
  if (Number.isNaN(o)) {
    return `exp(s − m_i) is 0 in float32 for every key, since m_i is ${show(m_i)}. So l_i is 0, and ` +
      "0 / 0 is NaN.";
  }
  if (mistake === "tail" && past_end.length) {
    return `The tile’s places past the last key hold zeros, ${past_end.length} of them. Their score is ` +
      `0, not −∞, so they take ${show((100 * sum(past_end)) / l_i, 1)}% of the weight.`;
  }
  if (start === 0 && mistake !== "zero") {
    return `There is no past yet: alpha = exp(−∞) = 0. The largest score is ${show(m_i)}.`;
  }
  if (m_old === m_i) {
    return `No score is larger than ${show(m_i)}, so alpha = exp(0) = 1: the past keeps its worth.`;
  }
  const rises = `The max rises from ${show(m_old)} to ${show(m_i)}, so alpha = ` +
    `exp(${show(m_old - m_i)}) = ${show(alpha)}`;
  if (mistake === "rescale") {
    return `${rises}. l_i shrinks by it, but acc does not: its old keys weigh too much.`;
  }
  return alpha === 0
    ? `${rises}: the past is worth less than float32 can tell, and is gone.`
    : `${rises}: what l_i and acc hold shrinks to ${show(100 * alpha, 1)}% of what it was.`;
}

/** A number behind an operator. */
const term = (x) => (x < 0 ? `(${show(x)})` : show(x));

/** The panel's content after example.step steps. */
export function carried({ step, mistake }, steps, s) {
  const now = steps[step - 1];
  const before = { m_i: mistake === "zero" ? 0 : -Infinity, l_i: 0, acc: 0 };
  const { m_i, alpha, l_i, acc, o } = now ?? before;
  const rows = {
    m_i: ["the largest score so far", m_i, scores(s, m_i)],
    alpha: ["what the past is worth under the new max", alpha, bar([alpha ?? 0, 0], 1)],
    l_i: ["the sum of p over the keys so far", l_i],
    acc: ["the sum of p times value", acc],
    "acc / l_i": ["the output, if there were no more keys", o],
  };
  const formulas = {};
  if (now) {
    const { m_old, l_old, acc_old, p, past_end } = now;
    const [sum_p, worth] = [sum([...p, ...past_end]), mistake === "rescale" ? 1 : alpha];
    const pv = acc - acc_old * worth;
    const top = Math.max(...now.s, ...(mistake === "tail" && past_end.length ? [0] : []));
    const times = `· ${show(alpha)}`;
    Object.assign(formulas, {
      m_i: [`max(${show(m_old)}, ${show(top)})`],
      alpha: [`exp(${show(m_old)} − ${term(m_i)})`],
      l_i: [`${show(l_old)} ${times} + ${show(sum_p)}`],
      acc: [`${show(acc_old)} `, worth === alpha ? times : make("del", {}, times), ` + ${term(pv)}`],
      "acc / l_i": [`${show(acc)} / ${show(l_i)}`],
    });
    rows.l_i.push(bar([l_old * alpha, sum_p], largest(steps, "l_i")));
    rows.acc.push(bar([acc_old * worth, pv], largest(steps, "acc")));
  }
  return [
    make("h3", {}, "What Online carries from tile to tile"),
    ...Object.entries(rows).map(([name, [words, value, picture = bar([0, 0], 1)]]) =>
      make("div", { class: "carried" },
        make("div", {}, make("code", {}, name), make("span", { class: "explained" }, words)),
        make("output", {}, value === undefined ? "" : show(value)),
        name === "acc / l_i" ? "" : picture,
        make("div", { class: "formula" }, ...(now ? ["= ", ...formulas[name]] : ["\u00a0"])))),
    make("ul", { class: "legend" },
      key("past", "from the past, times alpha"), key("new", "from this tile")),
  ];
}

function largest(steps, name) {
  return Math.max(1e-9, ...steps.map((each) => Math.abs(each[name])).filter(Number.isFinite));
}

/** A bar of what comes from the past and what is new, sizes of a whole. */
function bar([past, added], whole) {
  // a new part of the other sign makes the sum smaller: then only what is left is drawn
  const left = Math.abs(past) - Math.max(0, Math.abs(past) - Math.abs(past + added));
  const parts = { past: left, new: Math.abs(past + added) - left };
  return make("div", { class: "track" }, ...Object.entries(parts).map(([name, size]) => {
    const part = make("i", { class: name });
    part.style.width = `${Math.min((100 * size) / whole, 100) || 0}%`; // NaN is 0
    return part;
  }));
}

/** A mark for each score, and a larger one for the max. */
function scores(s, m_i) {
  const [low, high] = [Math.min(0, ...s), Math.max(0, ...s)];
  const all = [...s.map((x) => [x, "score"]), ...(Number.isFinite(m_i) ? [[m_i, "max"]] : [])];
  return make("div", { class: "track marks" }, ...all.map(([x, name]) => {
    const mark = make("b", { class: name });
    mark.style.left = `${(100 * (x - low)) / (high - low || 1)}%`;
    return mark;
  }));
}

function key(name, words) {
  return make("li", {}, make("span", { class: `swatch ${name}` }), words);
}
