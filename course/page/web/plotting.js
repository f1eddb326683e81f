// What the charts of records share: how a stage is drawn, and points that can be hovered, focused
// and opened. Observable Plot (vendor/, with d3) draws axes, lines and marks.
//
// Of the small libraries it is the one that draws SVG: each point is an element that takes the
// focus and has a name for screen readers, colours follow the theme, and a projector or a printer
// gets sharp lines. uPlot draws on a canvas, which has no elements; Vega-Lite is larger and compiles
// its charts by Function, which the page's policy forbids.

import { make, scrolling } from "./dom.js";
import { openRecord } from "./records.js";
import "./vendor/d3.min.js";
import "./vendor/plot.umd.min.js";

export const { d3, Plot } = globalThis;
export const GRID = { stroke: "var(--line)", strokeOpacity: 1 };

/** A polygon for d3, its corners at these distances in turn; the first one is turned by `angle`. */
function polygon(corners, radii, angle = 0) {
  const draw = (context, size) => {
    for (let i = 0; i < corners; i++) {
      const [turn, radius] = [angle + (2 * Math.PI * i) / corners, Math.sqrt(size / 2) * radii[i % radii.length]];
      context[i ? "lineTo" : "moveTo"](radius * Math.sin(turn), -radius * Math.cos(turn));
    }
    context.closePath();
  };
  return { draw };
}

// of stages 0 to 9, as in docs' figures; peers take them again, in other colours
const SYMBOLS = [
  polygon(6, [0.9]), polygon(5, [1]), polygon(10, [1.15, 0.5]), d3.symbolCircle, polygon(4, [1.05], Math.PI / 4),
  polygon(3, [1.1]), polygon(4, [1.05]), polygon(3, [1.1], Math.PI), d3.symbolCross,
  polygon(8, [1.25, 0.5], Math.PI / 4),
];
// a line's dash says how a stage ran: modes are apart in the legend, too
const DASHES = { compiled: "", native: "6 4", interpreted: "1 4" };
const MODES = {
  compiled: "Compiled: Triton and Gluon", native: "Native: torch, C++, Python, other kernels",
  interpreted: "Interpreted, no speed",
};

/**
 * Group points {x, y, row} by stage and mode, in order: [{key, label, row, points, twin}].
 *
 * A `twin` has the colour of another stage before it: its line is a double one.
 */
export function seriesOf(points) {
  const found = d3.group(points, ({ row }) => `${row.label}, ${row.mode}`);
  const first = new Map(); // colour -> the stage that had it first
  return [...found].map(([key, own]) => {
    const { row } = own[0];
    if (!first.has(row.who.colour)) first.set(row.who.colour, row.label);
    const twin = first.get(row.who.colour) !== row.label;
    return { key, label: row.label + (row.who.edited ? "†" : ""), row, points: own, twin };
  });
}

const symbolOf = ({ number }) => SYMBOLS[number % SYMBOLS.length];

/** The marks of series: their lines, then one mark for each point; those that are wrong, hollow. */
export function marksOf(series, shift = () => 0) {
  const lines = series.flatMap(({ row, points, twin }) => {
    const line = (options) => Plot.line(points, {
      x: "x", y: "y", stroke: row.who.colour, strokeWidth: 2, strokeDasharray: DASHES[row.mode],
      dx: shift(points[0]), ...options,
    });
    if (!twin) return [line()];
    return [line({ strokeWidth: 5 }), line({ strokeWidth: 2, stroke: "var(--ground)", strokeDasharray: "" })];
  });
  const dots = series.flatMap(({ points }) => points).map((point) => Plot.dot([point], {
    x: "x", y: "y", r: 5, symbol: symbolOf(point.row.who), stroke: point.row.who.colour, strokeWidth: 2,
    fill: point.row.status === "ok" ? point.row.who.colour : "var(--ground)", dx: shift(point),
  }));
  return [...lines, ...dots];
}

/** Draw with Plot, in the page's type. The chart's name is for screen readers. */
export function draw(name, options) {
  const svg = Plot.plot({ style: { background: "none", fontFamily: "inherit", fontSize: "13px" }, ...options });
  svg.setAttribute("role", "group"); // role img would hide the points
  svg.setAttribute("aria-label", name);
  for (const group of svg.querySelectorAll("g[aria-label]:not([aria-label=dot])")) {
    group.setAttribute("aria-hidden", "true"); // the points, and the table, say the same
  }
  return svg;
}

/** Round numbers for the ticks of a logarithmic axis: powers of `base`; if those are few, more. */
export function ticksOf([low, high], base = 10) {
  const powers = d3.range(Math.floor(Math.log(low) / Math.log(base)), Math.log(high) / Math.log(base) + 1, 1);
  const inside = (steps) => powers.flatMap((power) => steps.map((step) => step * base ** power))
    .filter((tick) => tick >= low && tick <= high);
  const few = inside([1]);
  return few.length > 2 ? few : inside(base === 10 ? [1, 2, 5] : [1, base / 2]);
}

/** Texts beside lines' ends; those too close are moved apart. `texts`: [{x, y, words, colour}]. */
export function addLabels(svg, texts, bottom, gap = 16) {
  for (const own of d3.group(texts, ({ x }) => Math.round(x)).values()) {
    own.sort((a, b) => a.y - b.y);
    own.forEach((text, i) => { text.at = Math.max(text.y, i ? own[i - 1].at + gap : 8); });
    for (let i = own.length - 1, below = bottom; i >= 0; i--, below -= gap) {
      own[i].at = below = Math.min(own[i].at, below);
    }
  }
  for (const { x, y, at, words } of texts) {
    const line = `M${x + 8},${y}L${x + 18},${at}`;
    svg.append(make("path", { d: line, class: "leader" }),
      make("text", { x: x + 21, y: at, dy: "0.35em", class: "name", "text-anchor": "start" }, words));
  }
}

/** Let the points of a chart be hovered, focused with the arrow keys, and opened. */
export function interact(host, svg, series, describe) {
  const points = series.flatMap(({ points: own }) => own);
  const marks = [...svg.querySelectorAll("g[aria-label=dot]")];
  const tip = make("div", { class: "tip", hidden: "" });
  const show = (index) => {
    marks.forEach((mark, i) => mark.classList.toggle("lit", i === index));
    tip.hidden = index === undefined;
    if (tip.hidden) return;
    const { row } = points[index];
    tip.replaceChildren(make("b", {}, row.label), ...describe(points[index]).map((words) => make("div", {}, words)));
    const [box, mark] = [host.getBoundingClientRect(), marks[index].getBoundingClientRect()];
    const left = mark.left - box.left + mark.width / 2 - tip.offsetWidth / 2;
    tip.style.left = `${Math.max(0, Math.min(left, box.width - tip.offsetWidth))}px`;
    const top = mark.top - box.top - tip.offsetHeight - 8;
    tip.style.top = `${top < 0 ? mark.bottom - box.top + 8 : top}px`;
  };
  const focus = (index) => {
    marks.forEach((mark, i) => mark.setAttribute("tabindex", i === index ? 0 : -1));
    marks[index].focus();
  };
  marks.forEach((mark, index) => {
    mark.classList.add("point");
    mark.setAttribute("role", "button");
    mark.setAttribute("tabindex", index ? -1 : 0);
    mark.setAttribute("aria-label", [points[index].row.label, ...describe(points[index])].join(", "));
    mark.addEventListener("focus", () => show(index));
    mark.addEventListener("blur", () => show());
  });
  svg.addEventListener("keydown", (event) => {
    const index = marks.indexOf(document.activeElement);
    const next = move(series, points, index, event.key);
    if (next !== undefined) focus(next);
    else if (event.key === "Enter" || event.key === " ") openRecord(points[index].row);
    else if (event.key === "Escape") show();
    else return;
    event.preventDefault();
  });
  svg.addEventListener("pointermove", (event) => show(nearest(marks, event)));
  svg.addEventListener("pointerleave", () => show());
  svg.addEventListener("click", (event) => {
    const index = nearest(marks, event);
    if (index !== undefined) openRecord(points[index].row);
  });
  host.append(tip);
}

/** Where an arrow key leads: along a line, or to the next higher or lower point of that x. */
function move(series, points, index, key) {
  const point = points[index];
  const own = series.find((each) => each.points.includes(point))?.points;
  if (!own) return undefined;
  const place = own.indexOf(point);
  const column = d3.sort(points.filter(({ x }) => x === point.x), ({ y }) => y);
  const level = column.indexOf(point);
  const target = {
    ArrowLeft: own[place - 1], ArrowRight: own[place + 1], Home: own[0], End: own.at(-1),
    ArrowUp: column[level + 1], ArrowDown: column[level - 1],
  };
  if (!(key in target)) return undefined;
  return points.indexOf(target[key] ?? point);
}

const REACH = 28; // pixels around a point

function nearest(marks, { clientX, clientY }) {
  const far = marks.map((mark) => {
    const box = mark.getBoundingClientRect();
    return Math.hypot(box.left + box.width / 2 - clientX, box.top + box.height / 2 - clientY);
  });
  const index = d3.minIndex(far);
  return far[index] < REACH ? index : undefined;
}

/** A legend by mode; each entry shows or hides its line. `hidden`: the keys of hidden series. */
export function legend(figure, series, hidden, redraw) {
  const entry = ({ key, label, row, twin }) => {
    const { colour } = row.who;
    const line = (stroke, width, dash) => make("path",
      { d: "M-18,0H18", stroke, "stroke-width": width, "stroke-dasharray": dash });
    const glyph = make("svg", { width: 36, height: 14, viewBox: "-18 -7 36 14", "aria-hidden": "true" },
      line(colour, twin ? 5 : 2, DASHES[row.mode]), ...(twin ? [line("var(--ground)", 2, "")] : []),
      make("path", { d: d3.symbol(symbolOf(row.who), 60)(), fill: colour }));
    const toggle = () => {
      if (!hidden.delete(key)) hidden.add(key);
      redraw();
      figure.querySelector(`[data-key="${CSS.escape(key)}"]`).focus(); // the legend was made again
    };
    return make("li", {}, make("button", {
      type: "button", "aria-pressed": String(!hidden.has(key)), "data-key": key, onclick: toggle,
    }, glyph, label));
  };
  const lists = Object.entries(MODES).map(([mode, words]) => {
    const own = series.filter(({ row }) => row.mode === mode);
    return own.length ? make("div", {}, make("h3", {}, words), make("ul", {}, ...own.map(entry))) : "";
  });
  return make("div", { class: "legend" }, ...lists);
}

/** A table of a chart's values, folded: `rows` of texts below a `header`. */
export function asTable(name, header, rows) {
  const line = (tag, texts) => make("tr", {}, ...texts.map((text, i) =>
    make(i ? tag : "th", { scope: i ? (tag === "th" ? "col" : false) : tag === "th" ? "col" : "row" }, text)));
  const table = make("table", { class: "plain" }, make("thead", {}, line("th", header)),
    make("tbody", {}, ...rows.map((texts) => line("td", texts))));
  return make("details", {}, make("summary", {}, "The same as a table"), scrolling(`Values: ${name}`, table));
}

/** Call `redraw` when the width of an element changes. */
export function onWidth(element, redraw) {
  let width = element.clientWidth;
  new ResizeObserver(() => {
    if (element.clientWidth !== width) requestAnimationFrame(redraw);
    width = element.clientWidth;
  }).observe(element);
}
