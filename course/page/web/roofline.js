// Rooflines: what a stage reaches, under what memory (the slope) and matrix products (the levels)
// allow. One problem at a time; 16 bits and float32 beside each other.

import { follow, read, write } from "./address.js";
import { choice, make } from "./dom.js";
import { asTable, d3, draw, GRID, interact, legend, marksOf, onWidth, Plot, seriesOf, ticksOf } from "./plotting.js";
import { load } from "./records.js";

const WIDTHS = { "16 bits": (roof) => roof.dtype.endsWith("16"), float32: (roof) => roof.dtype === "float32" };
const SECTION = "roofline";
const NARROW = 440; // pixels

export function mount(element, data) {
  const { roofs, rows } = load(data);
  const figures = Object.entries(WIDTHS).map(([name, belongs]) => [name, roofs.filter(belongs)])
    .filter(([, own]) => own.length);
  if (!figures.length) {
    element.append(make("p", {}, "No file of ceilings of a machine that the records are from: `ladder ceilings` measures them."));
    return;
  }
  const grid = make("div", { class: "roofs" });
  element.append(
    make("p", {}, "A point is one stage on one problem: how many FLOPs it does per byte, counted, and per second, measured. ",
      "The roofs meet at the ridge: left of it memory is the bound, right of it the matrix units. Fused stages ",
      "have the same number of FLOPs per byte; so that they can be told apart, they stand side by side, around their true place."),
    grid,
  );
  const usual = Object.fromEntries(figures.map(([name, own]) => [name, own[0].title]));
  const shown = {};
  const reloads = [];
  for (const [name, own] of figures) {
    const figure = make("figure", { class: "chart" });
    const hidden = new Set();
    const choose = () => {
      const wanted = read(SECTION)?.get(name);
      shown[name] = own.some(({ title }) => title === wanted) ? wanted : usual[name];
    };
    choose();
    const show = () => drawRoof(figure, rows, own.find(({ title }) => title === shown[name]), hidden, show);
    const titles = Object.fromEntries(own.map(({ title }) => [title, title]));
    const pick = choice(`${name}: problem`, titles, shown[name], (title) => {
      shown[name] = title;
      show();
      write(SECTION, shown, usual);
    });
    reloads.push(() => {
      choose();
      pick.input.value = shown[name];
      show();
    });
    grid.append(make("div", {}, make("form", { class: "controls", onsubmit: (e) => e.preventDefault() }, pick.element), figure));
    show();
    onWidth(figure, show);
  }
  follow(SECTION, () => reloads.forEach((reload) => reload()));
}

function drawRoof(figure, rows, roof, hidden, redraw) {
  const points = roof.points.map(([place, x, y, kind, share]) => ({ x, y, kind, share, row: rows[place] }));
  const all = seriesOf(points);
  const series = all.filter(({ key }) => !hidden.has(key));
  const width = Math.max(280, figure.clientWidth);
  const step = 21; // between stages side by side
  const shifts = new Map();
  for (const beside of d3.group(series, ({ points: [{ x }] }) => x.toPrecision(3)).values()) {
    beside.forEach(({ points: own }, i) => own.forEach((point) =>
      shifts.set(point, step * (i - (beside.length - 1) / 2))));
  }
  const shift = (point) => shifts.get(point);
  const slope = roof.slope?.[0];
  const top = d3.max(roof.levels, ([level]) => level);
  const ridge = slope && top ? top / slope : undefined;
  const domain = [d3.min([...points.map(({ x }) => x), ridge].filter(Boolean)) / 3,
    d3.max([...points.map(({ x }) => x), ridge ?? 0]) * 8];
  const range = [d3.min(points, ({ y }) => y) / 2, d3.max([...points.map(({ y }) => y), top ?? 0]) * 2];
  const roofs = roof.levels.map(([level], i) =>
    Plot.line([[slope ? Math.max(domain[0], level / slope) : domain[0], level], [domain[1], level]],
      { stroke: "currentColor", strokeWidth: 2, strokeDasharray: i && "7 4" }));
  if (slope) {
    const end = ridge ?? domain[1];
    const start = Math.max(domain[0], range[0] / slope);
    roofs.push(Plot.line([[start, slope * start], [end, slope * end]], { stroke: "currentColor", strokeWidth: 2 }));
  }
  const svg = draw(`Roofline, ${roof.title}`, {
    width, height: 400, marginLeft: 50, marginRight: 12, marginTop: 34, marginBottom: 48,
    x: { type: "log", domain, label: null },
    y: { type: "log", domain: range, label: null },
    marks: [
      Plot.gridY(ticksOf(range), GRID), Plot.gridX(ticksOf(domain), GRID),
      Plot.axisX(ticksOf(domain), { text: String, label: "FLOP per byte of memory, counted", labelAnchor: "center", labelArrow: "none", tickSize: 4 }),
      Plot.axisY(ticksOf(range), { text: String, label: `achieved ${roof.unit}`, labelArrow: "up", tickSize: 0 }),
      ...roofs, ...marksOf(series, shift),
    ],
  });
  label(svg, roof, series, { slope, top, shift, domain, range });
  const joined = all.find(({ points: own }) => own.length > 1)?.points;
  const kinds = joined && d3.sort(joined, ({ y }) => y).map(({ kind }) => kind);
  const lines = kinds ? "A vertical line joins two measurements of one stage, by the kind of its products: " +
    `${kinds[0]} below, ${kinds.at(-1)} above. ` : "";
  const host = make("div", { class: "drawing" }, svg);
  const said = (point) => [`${point.kind} products: ${+point.y.toPrecision(3)} ${roof.unit}`,
    `${point.share} of its roof at ${+point.x.toPrecision(4)} FLOP/byte`, point.row.status === "ok" ? point.row.mode : point.row.status];
  figure.replaceChildren(host, legend(figure, all, hidden, redraw),
    make("figcaption", {}, `${lines}${roof.title}. ${roof.machine}.${points.some(({ row }) => row.status !== "ok") ? " Hollow: wrong by design." : ""}${
      points.some(({ row }) => row.who.edited) ? " †: the code was edited since." : ""}`),
    asTable(`roofline, ${roof.title}`, ["stage", "products", "FLOP/byte", roof.unit, "of its roof"], points.map((point) =>
      [point.row.label, point.kind, `${+point.x.toPrecision(4)}`, `${+point.y.toPrecision(3)}`, point.share])));
  interact(host, svg, series, said);
}

/** Write the roofs' values along them, and each stage's number above its highest mark. */
function label(svg, roof, series, { slope, top, shift, domain, range }) {
  const [x, y] = ["x", "y"].map((name) => svg.scale(name).apply);
  const write = (words, attributes) => svg.append(make("text", { class: "name", "text-anchor": "start", ...attributes }, words));
  for (const [level, words] of roof.levels) {
    const low = level < top && slope;
    const place = low ? { x: x(level / slope) + 30 } : { x: x(domain[1]), "text-anchor": "end" };
    // where there is little room the lines of stages would cross a unit
    write(low && x(domain[1]) < NARROW ? words.replace(` ${roof.unit}`, "") : words, { ...place, y: y(level) - 7 });
  }
  if (slope) {
    const start = 1.25 * Math.max(domain[0], range[0] / slope);
    const [left, up] = [x(start), y(slope * start)];
    const slant = (Math.atan2(y(slope * 10 * start) - up, x(10 * start) - left) * 180) / Math.PI;
    write(roof.slope[1], { transform: `translate(${left - 3},${up - 6}) rotate(${slant})` });
  }
  // stages that stand side by side have one intensity: say which, below them
  for (const beside of d3.group(series.flatMap(({ points }) => points), (point) => point.x.toPrecision(3)).values()) {
    if (new Set(beside.map(({ row }) => row.label)).size < 2) continue;
    const lowest = Math.max(...beside.map((point) => y(point.y)));
    const words = `all at ${+beside[0].x.toPrecision(4)} FLOP/byte`;
    write(words, { x: Math.min(x(beside[0].x), x(domain[1]) - 72), y: lowest + 24, "text-anchor": "middle" });
  }
  for (const { row, points } of series) {
    const highest = d3.greatest(points, (point) => point.y);
    write(String(row.who.number), {
      x: x(highest.x) + shift(highest), y: y(highest.y) - 11, "text-anchor": "middle", class: "name number",
    });
  }
}
