// Which tiles a causal mask skips: queries downwards, keys to the right.

import { kept } from "./address.js";
import { make, slider } from "./dom.js";
import { FULL, MASKED, NEVER, kinds, seenBy } from "./tiles.js";

const LIMITS = { nq: [64, 1, 128], nk: [64, 1, 128], m: [16, 1, 64], n: [8, 1, 64] };
const NAMES = {
  nq: "Queries Nq", nk: "Keys Nk", m: "BLOCK_M: queries of a program", n: "BLOCK_N: keys of a tile",
};
const WORDS = {
  [FULL]: "visited without a mask: every query sees every key",
  [MASKED]: "visited with a mask: some pairs are hidden",
  [NEVER]: "never loaded: no query sees a key",
};
const SIZE = 520;

export function mount(element) {
  const { state, change } = kept("masks", LIMITS, display);
  const sliders = Object.entries(NAMES).map(([name, label]) => [name, slider(label, {
    min: LIMITS[name][1], max: LIMITS[name][2], value: state[name],
    input: (x) => change({ [name]: x }),
  })]);
  const picture = make("div", { class: "tiles" });
  const said = make("p", { "aria-live": "polite" });
  const legend = make("ul", { class: "legend" }, ...Object.entries(WORDS).map(([kind, words]) =>
    make("li", {}, make("span", { class: `swatch ${kind}` }), words)));
  element.append(make("div", { class: "two" },
    make("div", {}, ...sliders.map(([, each]) => each.element), said),
    make("div", {}, picture, legend)));

  function display() {
    for (const [name, each] of sliders) each.set(state[name]);
    const { nq, nk, m, n } = state;
    const found = kinds({ nq, nk, causal: true, block_m: m, block_n: n });
    const count = (kind) => found.flat().filter((each) => each === kind).length;
    const all = found.flat().length;
    const blind = Math.max(0, nq - nk);
    said.textContent =
      `${count(NEVER)} of ${all} tiles are skipped (${Math.round((100 * count(NEVER)) / all)}%), ` +
      `${count(MASKED)} ${count(MASKED) === 1 ? "needs" : "need"} the mask, ` +
      `${count(FULL)} ${count(FULL) === 1 ? "doesn’t" : "don’t"}. Query 0 sees ${keys(seenBy(0, nq, nk, true))}, the last one ${keys(seenBy(nq - 1, nq, nk, true))}.` +
      (blind ? ` The first ${blind} see none, and their output is 0.` : "");
    picture.replaceChildren(drawn(found, state));
  }

  display();
}

const keys = (count) => (count === 1 ? "1 key" : `${count} keys`);

/** The filling of a tile with a mask, distinct also in grey. */
function hatch() {
  return make("pattern",
    { id: "hatch", width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    make("rect", { class: "stripe", width: 3.5, height: 8 }));
}

function drawn(found, { nq, nk, m, n }) {
  const unit = SIZE / Math.max(nq, nk);
  const tiles = found.flatMap((row, block) => row.map((kind, tile) => {
    const [x, y] = [tile * n, block * m];
    const [width, height] = [Math.min(n, nk - x), Math.min(m, nq - y)];
    return make("rect", { class: kind, x: x * unit, y: y * unit, width: width * unit, height: height * unit });
  }));
  // the border between what is seen and what is hidden, row by row
  const border = [...Array(nq).keys()].map((row) => {
    const x = seenBy(row, nq, nk, true) * unit;
    return `${x},${row * unit} ${x},${(row + 1) * unit}`;
  });
  return make("svg", { viewBox: `-2 -22 ${SIZE + 4} ${nq * unit + 26}`, "aria-hidden": "true" },
    make("text", { class: "soft", x: 0, y: -8 }, "keys →   queries ↓"),
    hatch(), ...tiles, make("polyline", { class: "border", points: border.join(" ") }));
}
