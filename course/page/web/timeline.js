// A tile's timeline on a Hopper GPU: softmax and products in turn, or at the same time.

import { make } from "./dom.js";
import { drawn as picture } from "./lanes.js";

const END = 14000; // cycles, of both pictures
const TITLES = {
  91: "In turn: a tile’s scores start when the tile before is done",
  9: "Stage 9: the next tile’s scores start first",
};
const KINDS = { products: "multiplies", softmax: "exponentiates" };

export function mount(element, { timeline }) {
  if (!timeline) {
    element.append(make("p", { class: "note" }, "There is no record of a timeline here."));
    return;
  }
  element.append(
    make("ul", { class: "legend" },
      make("li", {}, make("span", { class: "swatch multiplies" }), "products, on the matrix unit"),
      make("li", {}, make("span", { class: "swatch exponentiates" }), "softmax, on the other units")),
    ...timeline.records.map(drawn),
    make("p", { class: "small soft" }, `Measured on one ${timeline.device}: cycles of ` +
      "a multiprocessor, medians over many tiles; bfloat16, no mask, d = 64, N = 16384. Between the " +
      "bars lie the correction of acc, the conversion of P, and the marks’ own time."),
    make("p", { class: "small" }, gain(timeline.records)));
}

/** Why a tile gains less than its products do. */
function gain(records) {
  const [turns, ahead] = [91, 9].map((stage) => records.find((each) => each.stage === stage));
  if (!turns || !ahead) return "";
  const less = (old, fresh) => `${Math.round(100 * (1 - fresh / old))}%`;
  const [before, after] = [turns.cycles.products, ahead.cycles.products];
  return `Products take ${less(before, after)} less time, a tile only ` +
    `${less(turns.tile_cycles, ahead.tile_cycles)}: of a tile’s ${grouped(turns.tile_cycles)} cycles, products ` +
    `are only ${grouped(before)}. The rest, most of it softmax, takes ` +
    `${grouped(turns.tile_cycles - before)} cycles in turn, and ${grouped(ahead.tile_cycles - after)} in stage 9.`;
}

function drawn({ stage, tile_cycles, spans, cycles }) {
  const title = TITLES[stage] ?? `Stage ${stage}`;
  const consumers = [...new Set(spans.map((each) => each.consumer))];
  const lanes = consumers.map((consumer) => ({
    name: `consumer ${consumer}`,
    bars: spans.filter((each) => each.consumer === consumer)
      .map(({ part, start, end }) => ({ kind: KINDS[part], start, end })),
  }));
  return make("div", {}, make("h3", {}, title), picture(lanes, END, ["cycles", 1]),
    make("p", { class: "small" }, `A tile takes ${grouped(tile_cycles)} cycles: ` +
      `products ${grouped(cycles.products)}, softmax ${grouped(cycles.softmax)}.`));
}

const grouped = (x) => x.toLocaleString("en");
