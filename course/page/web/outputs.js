// The three outputs beside each other: on a line, and as numbers.

import { make, show } from "./dom.js";

const [WIDTH, LEFT, RIGHT, LANE, TOP] = [460, 78, 46, 34, 28];
const CAPTION = 340; // the width of the words above the band, and a little more

/** The outputs after example.step steps; truth: as `exact` returns it, of the keys so far. */
export function outputs({ step, v, mistake, s }, steps, truth) {
  const now = steps[step - 1];
  const kept = now && [...now.kept].reduce((a, b) => a + b) / now.l_i;
  const lanes = [
    { name: "Exact", stage: 3, x: truth?.o, weight: now && 1 },
    { name: mistake ? "Online, broken" : "Online", short: "Online", stage: 5, x: now?.o, weight: kept },
    { name: "Lite", stage: 4, x: now?.lite, weight: now?.lite_weight },
  ];
  const all = [0, ...v, ...steps.flatMap((each) => [each.o, each.lite])].filter(Number.isFinite);
  const so_far = now ? `over the first ${now.stop} of ${s.length} keys` : "before the first tile";
  const rows = lanes.map(({ name, x, weight }) => make("tr", {},
    make("th", { scope: "row" }, name),
    ...[x, weight, x - truth?.o].map((y, i) => make("td", { class: "number" },
      !now || (i === 2 && name === "Exact") ? "–" : i === 1 ? show(y) : show(y, 4)))));
  return [
    make("h3", {}, `The output ${so_far}`),
    make("div", { class: "outputs" },
      picture(lanes, Math.min(...all), Math.max(...all), v),
      make("table", {},
        make("thead", {}, make("tr", {}, make("td"),
          ...["output", "weights sum to", "error"].map((x) => make("th", { scope: "col" }, x)))),
        make("tbody", {}, ...rows))),
  ];
}

function picture(lanes, low, high, v) {
  const at = (x) => LEFT + ((WIDTH - LEFT - RIGHT) * (x - low)) / (high - low || 1);
  const [first, last] = [at(Math.min(...v)), at(Math.max(...v))];
  const bottom = TOP + LANE * lanes.length;
  const ticks = nice(low, high, Math.max(-low, high) < 1000 ? 6 : 3);
  const late = first > WIDTH - CAPTION;
  return make("svg", { viewBox: `0 0 ${WIDTH} ${bottom + 26}`, "aria-hidden": "true" },
    make("rect", { class: "band", x: first, y: TOP, width: Math.max(last - first, 2), height: bottom - TOP }),
    make("text", { class: "soft", x: late ? WIDTH : first, y: TOP - 10, "text-anchor": late ? "end" : "start" },
      "every average of these values lies in here"),
    ...ticks.flatMap((x) => [
      make("line", { class: "grid", x1: at(x), x2: at(x), y1: TOP, y2: bottom }),
      make("text", { class: "soft", x: at(x), y: bottom + 18, "text-anchor": "middle" }, show(x)),
    ]),
    ...lanes.flatMap(({ name, short, stage, x }, i) => {
      const y = TOP + LANE * (i + 0.5);
      const label = make("text", { x: 0, y: y + 4 }, short ?? name);
      const line = make("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y });
      if (x === undefined) return [label, line];
      if (!Number.isFinite(x)) return [label, line, make("text", { x: LEFT + 8, y: y + 4 }, show(x))];
      const colour = `fill: var(--stage-${stage})`;
      const left = at(x) > (LEFT + WIDTH - RIGHT) / 2; // there is no room for a long number at the right
      const value = make("text", {
        class: "value", x: at(x) + (left ? -13 : 13), y: y + 5, "text-anchor": left ? "end" : "start",
      }, show(x, 2));
      return [label, line, marker(stage, at(x), y, colour), value];
    }));
}

// the same shapes as in docs' figures: a circle for stage 3, a square for 4, a triangle for 5
function marker(stage, x, y, style) {
  if (stage === 3) return make("circle", { cx: x, cy: y, r: 8, style });
  if (stage === 4) return make("rect", { x: x - 7, y: y - 7, width: 14, height: 14, style });
  return make("polygon", { points: `${x},${y - 9} ${x + 9},${y + 7} ${x - 9},${y + 7}`, style });
}

/** Round numbers from low to high, about `count` of them. */
export function nice(low, high, count = 6) {
  const raw = (high - low) / count || 1;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((x) => x * unit).find((x) => x >= raw);
  const found = [];
  for (let x = Math.ceil(low / step); x * step <= high; x++) found.push(x * step);
  return found;
}
