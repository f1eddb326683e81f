// How keys are split over programs: an H200's multiprocessors with and without stage 8's split.

import { kept } from "./address.js";
import { choice, make, slider } from "./dom.js";
import { plan } from "./split_plan.js";

const LIMITS = { b: [1, 1, 64], h: [1, 1, 64], n: [10, 6, 17], decode: [0, 0, 1] }; // N = 2^n
const COLUMNS = 22;

export function mount(element, { splits: rule }) {
  if (!rule) {
    element.append(make("p", { class: "note" }, "This copy of the ladder has no stage 8."));
    return;
  }
  const { state, change } = kept("splits", LIMITS, display);
  const kind = choice("Queries", { 0: "a whole text: N of them", 1: "decoding: one new token" },
    state.decode, (x) => change({ decode: Number(x) }));
  const batch = slider("Batch B", { min: 1, max: 64, value: state.b, input: (x) => change({ b: x }) });
  const heads = slider("Heads", { min: 1, max: 64, value: state.h, input: (x) => change({ h: x }) });
  const keys = slider("Keys N", {
    min: 6, max: 17, value: state.n, say: (x) => (2 ** x).toLocaleString("en"), input: (x) => change({ n: x }),
  });
  const pictures = make("div", { class: "two" });
  const said = make("p", { "aria-live": "polite" });
  element.append(
    make("div", { class: "controls" }, kind.element, batch.element, heads.element, keys.element),
    said, pictures,
    make("p", { class: "small soft" },
      "Stage 8’s rule for head dimensions up to 64 in 16 bits on an H200: a cost model that counts " +
        "waves of programs, the tiles of a part, and the merge. With more programs than " +
        "multiprocessors, the others wait for their turn or share one."),
  );

  function display() {
    const { b, h, decode } = state;
    const n = 2 ** state.n;
    const shape = { batch: b, heads: h, rows: decode ? 1 : n, keys: n };
    const { block_m, programs, tiles, splits } = plan(shape, rule);
    kind.input.value = state.decode;
    for (const [each, x] of [[batch, b], [heads, h], [keys, state.n]]) each.set(x);
    const blocks = decode ? "1 row of queries is one block"
      : `${n} / ${block_m} = ${Math.ceil(n / block_m)} block${n > block_m ? "s" : ""} of ${block_m} rows`;
    const idle = Math.max(0, rule.multiprocessors - programs);
    said.textContent =
      `${blocks}; times ${h} ${h > 1 ? "heads" : "head"} and B = ${b}: ${counted(programs)}. ` +
      (idle ? `Without a split ${idle} of ${rule.multiprocessors} multiprocessors are idle. `
        : "Every multiprocessor has work. ") +
      (splits > 1 ? `Stage 8 splits the ${tiles} tiles of keys into ${splits} parts.`
        : `Stage 8 doesn’t split ${tiles === 1 ? "a single tile" : "the keys"}.`);
    pictures.replaceChildren(
      picture("Without a split", programs, 1, tiles), picture("Stage 8", programs, splits, tiles));
  }

  function picture(title, programs, splits, tiles) {
    const [all, places] = [programs * splits, rule.multiprocessors];
    const size = 20;
    const squares = [...Array(places).keys()].map((i) => make("rect", {
      class: i < all ? "busy" : "idle", width: size - 4, height: size - 4,
      x: (i % COLUMNS) * size, y: Math.floor(i / COLUMNS) * size,
    }));
    const each = Math.ceil(tiles / splits);
    return make("div", {}, make("h3", {}, title),
      make("svg", { viewBox: `-2 -2 ${COLUMNS * size} ${(places / COLUMNS) * size}`, "aria-hidden": "true" }, ...squares),
      make("p", { class: "small" },
        `${counted(all)} of ${each} ${each === 1 ? "tile" : "tiles"} each; ` +
          `${Math.min(all, places)} of ${places} multiprocessors work.`));
  }

  display();
}

function counted(programs) {
  return programs === 1 ? "1 program" : `${programs.toLocaleString("en")} programs`;
}
