// Two stages' code beside each other. Lines come coloured from course/page/listings.py, which also
// matches them; what is equal between two changes can be unfolded.

import { follow, read, write } from "./address.js";
import { choice, make } from "./dom.js";

const SECTION = "side-by-side";
const START = { left: "4", right: "5", part: "kernel" };
const CONTEXT = 3; // equal lines around each change
const FOLDED = 5; // so many or more are folded
const PARTS = { kernel: "kernels (all code where there is none)", whole: "whole files" };

export function mount(element, data) {
  const { stages, same } = data.listings;
  const names = Object.fromEntries(stages.map(({ number, title }) => [number, `${number} ${title}`]));
  const options = { left: names, right: names, part: PARTS };
  const state = {};
  const load = () => {
    const wanted = read(SECTION);
    for (const [key, known] of Object.entries(options)) {
      const found = [wanted?.get(key), START[key]].find((each) => each in known);
      state[key] = found ?? Object.keys(known)[0];
    }
  };
  load();
  const picks = ["left", "right", "part"].map((key) =>
    choice(key === "part" ? "show" : key, options[key], state[key], (value) => change({ [key]: value })));
  const swap = make("button", { type: "button", onclick: () => change({ left: state.right, right: state.left }) }, "Swap");
  const summary = make("p", { class: "count", role: "status" });
  const ideas = make("div", { class: "pair ideas" });
  const listing = make("div", { class: "listing", tabindex: 0, role: "region", "aria-label": "Two stages' code" });

  const change = (changes) => {
    Object.assign(state, changes);
    redraw();
    write(SECTION, state);
  };
  const redraw = () => {
    ["left", "right", "part"].forEach((key, i) => { picks[i].input.value = state[key]; });
    const both = [state.left, state.right].map((number) => stages.find((each) => each.number === +number));
    const [left, right] = both.map((stage) => stage[state.part]);
    const blocks = shared(same[state.part], state, left.length);
    const gaps = between(blocks, left.length, right.length);
    const [goes, comes] = [0, 1].map((side) => gaps.reduce((sum, gap) => sum + gap[side][1] - gap[side][0], 0));
    summary.textContent = gaps.length ? `${comes} lines come, ${goes} go.` : "The same lines.";
    ideas.replaceChildren(...both.map((stage) => make("div", {},
      make("b", {}, names[stage.number]), make("div", {}, stage.idea), make("code", {}, stage.place))));
    listing.replaceChildren(...pieces(blocks, gaps, left, right, both));
  };
  element.append(
    make("p", {}, "What goes is marked −, what comes +. The comments say why a line is as it is."),
    make("form", { class: "controls", "aria-label": "Which stages", onsubmit: (e) => e.preventDefault() },
      ...picks.map(({ element: each }) => each), swap),
    summary, ideas, listing,
  );
  redraw();
  follow(() => {
    if (!read(SECTION)) return; // the address is about another section now
    load();
    redraw();
  });
}

/** The blocks of equal lines of two stages: [place left, place right, length]. */
function shared(same, state, length) {
  const [a, b] = [+state.left, +state.right];
  if (a === b) return [[0, 0, length]];
  return a < b ? same[`${a} ${b}`] : same[`${b} ${a}`].map(([i, j, size]) => [j, i, size]);
}

/** What lies between the blocks: [[from, to] left, [from, to] right]. */
function between(blocks, left, right) {
  const gaps = [];
  let [i, j] = [0, 0];
  for (const [a, b, size] of [...blocks, [left, right, 0]]) {
    if (a > i || b > j) gaps.push([[i, a], [j, b]]);
    [i, j] = [a + size, b + size];
  }
  return gaps;
}

function pieces(blocks, gaps, left, right, stages) {
  const found = [
    ...gaps.map(([old, fresh]) => ({ at: old[0] + fresh[0], element: () => [pair(
      lines("del", left, ...old, stages[0]), lines("ins", right, ...fresh, stages[1]), "changed")] })),
    ...blocks.map(([i, j, size]) => ({ at: i + j, element: () => equal(i, j, size) })),
  ];
  const equal = (i, j, size) => {
    const both = (from, to) => pair(lines("span", left, i + from, i + to, stages[0]),
      lines("span", right, j + from, j + to, stages[1]), "equal");
    const head = i + j ? CONTEXT : 0;
    const tail = i + size < left.length || j + size < right.length ? CONTEXT : 0;
    if (!gaps.length || size < head + tail + FOLDED) return [both(0, size)];
    const folded = make("button", { type: "button", class: "fold", onclick: () => folded.replaceWith(both(head, size - tail)) },
      `${size - head - tail} equal lines`);
    return [head ? both(0, head) : "", folded, tail ? both(size - tail, size) : ""];
  };
  return found.sort((a, b) => a.at - b.at).flatMap(({ element }) => element());
}

const pair = (left, right, kind) => make("div", { class: `pair ${kind}` }, left, right);

/** One column: lines with their numbers, and a file's name where the next file begins. */
function lines(tag, all, from, to, stage) {
  const column = make("pre", {});
  for (let place = from; place < to; place++) {
    const [file, number, html] = all[place];
    const begins = stage.files.length > 1 && file !== all[place - 1]?.[0];
    if (begins) column.append(make("span", { class: "file" }, stage.files[file]));
    const line = make(tag, { class: "line", "data-line": html ? number : "" });
    line.innerHTML = html || " "; // made, and escaped, by listings.py
    column.append(line);
  }
  return column;
}
