// Two stages' code beside each other. Lines come coloured from course/page/listings.py, which also
// matches them; what is equal between two changes can be unfolded.

import { follow, read, write } from "./address.js";
import { choice, make } from "./dom.js";

const SECTION = "side-by-side";
const START = { left: "4", right: "5", part: "kernel" };
const CONTEXT = 3; // equal lines around each change
const BLANK = 2; // lines between two functions
const FOLDED = 5; // so many or more are folded
const PARTS = { kernel: "kernels (all code where there is none)", whole: "whole files" };

export function mount(element, data) {
  const { stages } = data.listings;
  const names = Object.fromEntries(stages.map(({ number, title }) => [number, `${number} ${title}`]));
  const options = { left: names, right: names, part: PARTS };
  const state = {};
  const load = () => {
    const wanted = read(SECTION);
    for (const [key, known] of Object.entries(options)) {
      const found = [wanted?.get(key), START[key]].find((each) => Object.hasOwn(known, each));
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
    write(SECTION, state, START);
  };
  const redraw = () => {
    ["left", "right", "part"].forEach((key, i) => { picks[i].input.value = state[key]; });
    const both = [state.left, state.right].map((number) => stages.find((each) => each.number === +number));
    const listings = both.map((stage) => stage[state.part]);
    const steps = opcodes(data.listings.opcodes[state.part], state, listings[0].length);
    const changes = steps.filter(([equal]) => !equal);
    const [goes, comes] = [1, 3].map((at) => changes.reduce((sum, step) => sum + step[at + 1] - step[at], 0));
    summary.textContent = changes.length ? `${comes} lines come, ${goes} go.` : "The same lines.";
    ideas.replaceChildren(...both.map((stage) => make("div", {},
      make("b", {}, names[stage.number]), make("div", {}, stage.idea), make("code", {}, stage.place))));
    listing.replaceChildren(...steps.flatMap((step, i) => piece(step, i > 0, i < steps.length - 1, listings, both)));
  };
  element.append(
    make("p", {}, "What goes is marked −, what comes +. The comments say why a line is as it is; those that ",
      "mark exercises are left out, and the blank lines between kernels."),
    make("form", { class: "controls", "aria-label": "Which stages", onsubmit: (e) => e.preventDefault() },
      ...picks.map(({ element: each }) => each), swap),
    summary, ideas, listing,
  );
  redraw();
  follow(SECTION, () => {
    load();
    redraw();
  });
}

/** How the left stage becomes the right one: [equal or not, from, to on the left, from, to on the right]. */
function opcodes(known, { left, right }, length) {
  if (left === right) return [[1, 0, length, 0, length]];
  return known[`${left} ${right}`] ?? known[`${right} ${left}`].map(([equal, i1, i2, j1, j2]) => [equal, j1, j2, i1, i2]);
}

/** The elements of one step; of many equal lines those next to a change `before` or `after` them. */
function piece([equal, i1, i2, j1, j2], before, after, [left, right], [old, fresh]) {
  if (!equal) return [pair(lines("del", left, i1, i2, old), lines("ins", right, j1, j2, fresh), "changed")];
  const part = (from, to) => pair(
    lines("span", left, i1 + from, i1 + to, old, (place) => skipped(right, place - i1 + j1)),
    lines("span", right, j1 + from, j1 + to, fresh, (place) => skipped(left, place - j1 + i1)), "equal");
  const [size, head, tail] = [i2 - i1, before ? CONTEXT : 0, after ? CONTEXT : 0];
  if (size < head + tail + FOLDED || !(before || after)) return [part(0, size)];
  const folded = make("button", { type: "button", class: "fold", onclick: () => folded.replaceWith(part(head, size - tail)) },
    `${size - head - tail} equal lines`);
  return [part(0, head), folded, part(size - tail, size)];
}

const pair = (left, right, kind) => make("div", { class: `pair ${kind}` }, left, right);

/** How many lines of a file are left out before the one at a place; 0 where they are as few as BLANK. */
function skipped(all, place) {
  const [file, number] = all[place];
  const [before, last] = all[place - 1] ?? [];
  return before === file && number - last - 1 > BLANK ? number - last - 1 : 0;
}

/**
 * One column: lines with their numbers, a file's name where the next file begins, and a row where
 * lines are left out. `beside(place)`: how many are left out on the other side of an equal line.
 */
function lines(tag, all, from, to, stage, beside = () => 0) {
  const column = make("pre", {});
  for (let place = from; place < to; place++) {
    const [file, number, html] = all[place];
    const begins = stage.files.length > 1 && file !== all[place - 1]?.[0];
    if (begins) column.append(make("span", { class: "file" }, stage.files[file]));
    const out = skipped(all, place);
    if (out || beside(place)) {
      column.append(make("span", { class: "gap" }, out ? `… ${out} lines left out` : "\u00a0"));
    }
    const line = make(tag, { class: "line", "data-line": html ? number : "" });
    line.innerHTML = html || " "; // made, and escaped, by listings.py
    column.append(line);
  }
  return column;
}
