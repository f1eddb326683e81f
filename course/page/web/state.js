// What Online carries from tile to tile, as formulas with numbers and as bars; and a step in words.

import { make, show } from "./dom.js";

/** Say in a sentence or two what a step did; `now` is undefined before the first. */
export function narration({ mistake, tile, s }, now, count) {
  if (!now) return `${s.length} keys in ${count} ${count === 1 ? "tile" : "tiles"}. Nothing is read yet: there is no max, and l_i and acc are 0.`;
  const last = now.stop - 1;
  const where = now.start === last ? `key ${last}` : `keys ${now.start} to ${last}`;
  return `Tile ${now.start / tile}, ${where}. ${worth(now, mistake)}`;
}

function worth({ m_old, m_i, alpha, start, o, past_end, l_i }, mistake) {
  if (Number.isNaN(o)) return `exp(s − m_i) is 0 in float32 for every key, since m_i is ${show(m_i)}. So l_i is 0, and 0 / 0 is NaN.`;
  if (mistake === "tail" && past_end.length) {
    return `The ${past_end.length} places past the last key hold zeros. Their score is 0, not −∞, so they take ${show((100 * past_end.reduce((a, b) => a + b)) / l_i, 1)}% of the weight.`;
  }
  if (start === 0 && mistake !== "zero") return `There is no past yet: alpha = exp(−∞) = 0. The largest score is ${show(m_i)}.`;
  if (m_old === m_i) return `No score is larger than ${show(m_i)}, so the max stays and alpha = exp(0) = 1: the past keeps its worth.`;
  const rises = `The max rises from ${show(m_old)} to ${show(m_i)}, so alpha = exp(${show(m_old - m_i)}) = ${show(alpha)}`;
  if (mistake === "rescale") return `${rises}. l_i shrinks by it, but acc does not: its old keys weigh too much.`;
  if (alpha === 0) return `${rises}: the past is worth less than float32 can tell, and is forgotten.`;
  return `${rises}: what l_i and acc hold shrinks to ${show(100 * alpha, 1)}% of what it was.`;
}

/** The panel's content after example.step steps. */
export function carried({ step, mistake }, steps, s) {
  const now = steps[step - 1];
  const title = make("h3", {}, "What Online carries from tile to tile");
  const start = mistake === "zero" ? 0 : -Infinity;
  const { m_old, m_i, alpha, l_old, l_i, acc_old, acc, o } = now ?? { m_i: start, l_i: 0, acc: 0 };
  const sum = now && [...now.p, ...now.past_end].reduce((a, b) => a + b);
  const top = now && Math.max(...now.s, ...(mistake === "tail" && now.past_end.length ? [0] : []));
  const pv = now && acc - acc_old * (mistake === "rescale" ? 1 : alpha);
  const times = mistake === "rescale" ? make("del", {}, `· ${show(alpha)}`) : `· ${show(alpha)}`;
  const past = now && acc - pv;
  const largest = (pick) => Math.max(1e-9, ...steps.map((each) => Math.abs(pick(each))).filter(Number.isFinite));
  const of = (x, total) => (100 * x) / total;
  const most_acc = largest((each) => each.acc);
  return [
    title,
    row("m_i", "the largest score so far", m_i,
      now ? [`max(${show(m_old)}, ${show(top)})`] : [],
      mark(s, m_i)),
    row("alpha", "what the past is worth under the new max", alpha,
      now ? [`exp(${show(m_old)} − ${show(m_i)})`] : [],
      bar([of(alpha ?? 0, 1), "past"])),
    row("l_i", "the sum of the weights so far", l_i,
      now ? [`${show(l_old)} · ${show(alpha)} + ${show(sum)}`] : [],
      bar([of((l_old ?? 0) * (alpha ?? 0), largest((each) => each.l_i)), "past"],
        [of(sum ?? 0, largest((each) => each.l_i)), "new"])),
    row("acc", "the weighted sum of the values", acc,
      now ? [`${show(acc_old)} `, times, ` + ${show(pv)}`] : [],
      bar([of(Math.abs(past ?? 0), most_acc), "past"],
        [of(Math.max(0, Math.abs(acc) - Math.abs(past ?? 0)), most_acc), "new"])),
    row("acc / l_i", "the output, if there were no more keys", o,
      now ? [`${show(acc)} / ${show(l_i)}`] : []),
    make("ul", { class: "legend" }, key("past", "from the past, times alpha"), key("new", "from this tile")),
  ];
}

function row(name, explained, value, formula, picture) {
  const said = value === undefined ? "" : show(value);
  return make("div", { class: "carried" },
    make("div", {}, make("code", {}, name), make("span", { class: "explained" }, explained)),
    make("output", {}, said),
    ...(picture ? [picture] : []),
    make("div", { class: "formula" }, ...(formula.length ? ["= ", ...formula] : ["\u00a0"])));
}

/** A bar of parts, each [percent, class]. */
function bar(...parts) {
  return make("div", { class: "track" }, ...parts.map(([percent, name]) => {
    const part = make("i", { class: name });
    part.style.width = `${Number.isFinite(percent) ? Math.min(percent, 100) : 0}%`;
    return part;
  }));
}

/** The max among the scores: a mark for each score, a larger one for the max. */
function mark(s, m_i) {
  const [low, high] = [Math.min(0, ...s), Math.max(0, ...s)];
  const at = (x) => `${(100 * (x - low)) / (high - low || 1)}%`;
  const marks = [...s.map((x) => [x, "score"]), ...(Number.isFinite(m_i) ? [[m_i, "max"]] : [])];
  return make("div", { class: "track marks" }, ...marks.map(([x, name]) => {
    const one = make("b", { class: name });
    one.style.left = at(x);
    return one;
  }));
}

function key(name, words) {
  return make("li", {}, make("span", { class: `swatch ${name}` }), words);
}
