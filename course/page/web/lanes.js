// Bars over time, one lane each, as wide as the page.

import { make, show } from "./dom.js";
import { nice } from "./outputs.js";

const [WIDTH, LANE, INSIDE] = [1000, 44, 32]; // the width is stretched

/**
 * lanes: [{name, bars: [{kind, start, end, row}]}]; kind is a class; row 0 is the upper half of the
 * lane and 1 the lower, a whole lane has none. `end` is the last time that fits in; the axis has
 * times multiplied `by` a number, which gives them the `unit`.
 */
export function drawn(lanes, end, [unit, by]) {
  const bars = lanes.flatMap(({ bars }, i) => bars.map(({ kind, start, end: stop, row }) => make("rect", {
    class: kind, x: (WIDTH * start) / end, width: Math.max(1, (WIDTH * (stop - start)) / end),
    y: LANE * i + (LANE - INSIDE) / 2 + (row ?? 0) * (INSIDE / 2), height: row === undefined ? INSIDE : INSIDE / 2,
  })));
  const height = LANE * lanes.length;
  return make("div", { class: "lanes", "aria-hidden": "true", style: `--lane: ${LANE}px` },
    make("div", {}, ...lanes.map(({ name }) => make("div", { class: "name" }, name))),
    make("svg", { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", style: `height: ${height}px` }, ...bars),
    make("div", { class: "soft" }, unit),
    make("div", { class: "ticks soft" }, ...nice(0, by * end, 4).map((x) =>
      make("span", { style: `left: ${(100 * x) / (by * end)}%` }, show(x)))));
}
