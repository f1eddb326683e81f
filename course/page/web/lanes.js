// Bars over time, one lane for each that works, drawn for a page of any width.

import { make, scrolling } from "./dom.js";

const [WIDTH, LANE, LEFT, RIGHT] = [1000, 44, 110, 20];

/**
 * A picture in a box that scrolls where it is wider than the page.
 *
 * lanes: [{name, bars: [{kind, start, end, row}]}]; kind is a class; row 0 is the upper half of the
 * lane and 1 the lower, whole lanes have none. ticks: [[time, text]]; `end` is the latest time.
 */
export function drawn(title, lanes, end, ticks) {
  const across = (x) => LEFT + ((WIDTH - LEFT - RIGHT) * x) / end;
  const bottom = LANE * lanes.length;
  const inside = LANE - 12;
  const bars = lanes.flatMap(({ bars }, i) => bars.map(({ kind, start, end: stop, row }) => make("rect", {
    class: kind, x: across(start), width: Math.max(1, across(stop) - across(start)),
    y: LANE * i + 4 + (row ?? 0) * (inside / 2), height: row === undefined ? inside : inside / 2,
  })));
  return scrolling(title,
    make("svg", { class: "timeline", viewBox: `0 0 ${WIDTH} ${bottom + 26}`, "aria-hidden": "true" },
      ...lanes.map(({ name }, i) => make("text", { x: 0, y: LANE * i + 24 }, name)), ...bars,
      ...ticks.map(([x, words]) => make("text",
        { class: "soft", x: across(x), y: bottom + 18, "text-anchor": "middle" }, words))));
}
