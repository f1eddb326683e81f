// Time, rate, memory and error against N: one family of problems at a time.

import { follow, read, write } from "./address.js";
import { choice, make } from "./dom.js";
import { addLabels, asTable, d3, draw, GRID, interact, legend, marksOf, onWidth, Plot, seriesOf, ticksOf } from "./plotting.js";
import { load } from "./records.js";

const SHOWS = { time: "time", rate: "rate", memory: "peak memory", error: "error" };
const AXES = {
  time: "time of a call", rate: "achieved", memory: "peak memory above the inputs",
  error: "largest error against float64",
};
const TEXTS = { time: "time", rate: "rate", memory: "peak", error: "error" }; // of a row
const SECTION = "charts";
const WIDE = 640;
const APART = 44; // pixels between two ticks of N

/** A tick of the axis with its unit: values are in ms, MB, the unit of rates, or plain. */
function tick(what, value) {
  const steps = {
    time: [[1e3, "s"], [1, "ms"], [1e-3, "us"]],
    memory: [[1024, "GB"], [1, "MB"], [1 / 1024, "KB"]],
  }[what];
  if (!steps) return what === "error" && value < 1e-2 ? value.toExponential(0) : `${+value.toPrecision(6)}`;
  const [scale, unit] = steps.find(([size]) => value >= size * 0.999) ?? steps.at(-1);
  return `${+(value / scale).toPrecision(3)} ${unit}`;
}

export function mount(element, data) {
  const { charts, rows } = load(data);
  const ours = new Set(data.stages.filter(({ number }) => number < 100).map(({ name }) => name));
  const shows = Object.entries(SHOWS).filter(([what]) => charts.some(({ points }) => points[what]));
  if (!shows.length) {
    element.append(make("p", { class: "note" }, "No problem here has points of two stages at two N."));
    return;
  }
  const first = richest(charts, rows, ours);
  const state = { hidden: new Set() };
  const usual = { show: shows[0][0], problem: first.title, file: first.run.file };
  const choose = () => {
    const [show, title, file] = Object.keys(usual).map((key) => read(SECTION)?.get(key) ?? usual[key]);
    state.what = shows.some(([each]) => each === show) ? show : usual.show;
    state.chart = charts.find((each) => each.title === title && each.run.file === file) ?? first;
  };
  choose();
  const problem = make("select", { id: "chart-problem", onchange: () => change({ chart: charts[problem.value] }) });
  const what = choice("show", Object.fromEntries(shows), state.what, (value) => change({ what: value }));
  const figure = make("figure", { class: "chart" });

  const change = (changes) => {
    Object.assign(state, changes);
    redraw();
    const { title, run } = state.chart;
    write(SECTION, { show: state.what, problem: title, file: run.file }, usual);
  };
  const redraw = () => {
    if (!state.chart.points[state.what]) state.chart = charts.find(({ points }) => points[state.what]);
    fill(problem, charts, state);
    drawChart(figure, rows, state, redraw);
  };
  element.append(
    make("p", {}, "Hover over a point for its value, or focus the chart and use the arrow keys; Enter opens the record. ",
      "A hollow point is wrong by design."),
    make("form", { class: "controls", "aria-label": "What the chart shows", onsubmit: (e) => e.preventDefault() },
      what.element, make("div", { class: "choice wide" }, make("label", { for: problem.id }, "problems"), problem)),
    figure,
    ...data.libraries.map(({ title, version, licence, terms }) => make("details", { class: "small" },
      make("summary", {}, `Drawn with ${title} ${version}, ${licence} licence`), make("p", {}, terms))),
  );
  redraw();
  onWidth(figure, redraw);
  follow(SECTION, () => {
    choose();
    what.input.value = state.what;
    redraw();
  });
}

/** The family that tells most: timed in turns, then of many stages of ours and a wide range of N. */
function richest(charts, rows, ours) {
  const weight = ({ points }) => {
    const own = (points.time ?? []).map(([place]) => rows[place]).filter(({ who }) => ours.has(who.name));
    const [low, high] = d3.extent(own, ({ problem }) => problem.nk);
    if (!own.length) return [0, 0];
    const stages = new Set(own.map(({ label }) => label)).size;
    return [Number(own[0].problem.paired), stages * Math.log2(high / low)];
  };
  return d3.greatest(charts, (a, b) => d3.ascending(...[a, b].map((each) => weight(each)[0]))
    || d3.ascending(...[a, b].map((each) => weight(each)[1])));
}

function fill(select, charts, state) {
  const shown = charts.filter(({ points }) => points[state.what]);
  const groups = d3.group(shown, ({ run }) => `${run.machine}: ${run.file}`);
  const times = d3.rollup(shown, (same) => same.length, ({ title }) => title);
  const words = ({ run, title }) => times.get(title) === 1 ? title
    : `${title}; ${run.date.slice(0, 10)}, ${run.file.split("/").at(-1)}`;
  select.replaceChildren(...[...groups].map(([label, own]) => make("optgroup", { label },
    ...own.map((chart) => make("option", { value: charts.indexOf(chart) }, words(chart))))));
  select.value = charts.indexOf(state.chart);
}

function drawChart(figure, rows, { what, chart, hidden }, redraw) {
  const points = chart.points[what].map(([place, y]) => ({ x: rows[place].problem.nk, y, row: rows[place] }));
  const all = seriesOf(points);
  const series = all.filter(({ key }) => !hidden.has(key));
  const width = Math.max(280, figure.clientWidth);
  const wide = width > WIDE;
  const height = wide ? 440 : 380;
  const margin = { marginLeft: 62, marginRight: wide ? 200 : 62, marginTop: 34, marginBottom: 48 };
  const [first, last] = d3.extent(points, ({ x }) => x);
  const across = (n) => ((width - margin.marginLeft - margin.marginRight) * Math.log(n / first)) / Math.log(last / first);
  const ticks = d3.sort(new Set(points.map(({ x }) => x))).reduce(
    (kept, n) => (kept.length && across(n) < APART + across(kept.at(-1)) ? kept : [...kept, n]), []);
  const [low, high] = d3.extent(points, ({ y }) => y);
  // rates are compared by their lengths, from 0; the others span decades
  const scale = what === "rate" ? { type: "linear", domain: [0, high * 1.08] }
    : { type: "log", domain: [low / 1.5, high * 1.5] };
  const levels = what === "rate" ? d3.ticks(0, high, 6) : ticksOf(scale.domain, what !== "memory" ? 10 : high / low > 1e4 ? 16 : 4);
  const label = what === "rate" ? `${AXES.rate} ${chart.unit}` : AXES[what];
  const name = `${label} against N, ${chart.title}`;
  const svg = draw(name, {
    width, height, ...margin,
    x: { type: "log", base: 2, label: null, domain: first < last ? [first, last] : [first / 2, 2 * last] },
    y: { ...scale, label: null },
    marks: [
      Plot.gridY(levels, GRID),
      Plot.axisX(ticks, { tickFormat: String, label: "N (keys)", labelAnchor: "center", labelArrow: "none", tickSize: 4 }),
      Plot.axisY(levels, { text: (y) => tick(what, y), label, labelArrow: "up", tickSize: 0 }),
      ...marksOf(series),
    ],
  });
  const [x, y] = [svg.scale("x"), svg.scale("y")];
  // a variant's long label would leave the picture: its title is enough here
  const named = ({ row, label: said }) => (row.who.of === null ? said : row.who.title);
  addLabels(svg, series.map(({ row, points: own, ...each }) => ({
    x: x.apply(own.at(-1).x), y: y.apply(own.at(-1).y),
    words: wide && own.at(-1).x === last ? named({ row, ...each }) : row.who.short, // a name would cover lines
  })), height - margin.marginBottom);
  const value = ({ row }) => row[TEXTS[what]];
  const ns = d3.sort(new Set(points.map((point) => point.x)));
  const table = all.map(({ key, points: own }) => [key, ...ns.map((n) => {
    const point = own.find((each) => each.x === n);
    return point ? value(point) : "";
  })]);
  const notes = chart.notes[what].filter((note) => !note.startsWith("hollow"));
  if (series.some(({ row }) => row.who.edited)) notes.push("†: the code was edited since");
  const said = `${chart.run.machine}, ${chart.run.date.slice(0, 10)}, ${chart.run.file}`;
  const host = make("div", { class: "drawing" }, svg);
  figure.replaceChildren(
    host, legend(figure, all, hidden, redraw),
    make("figcaption", {}, [chart.title, said, ...notes].join(". "), "."),
    asTable(name, ["stage", ...ns.map((n) => `N = ${n}`)], table),
  );
  interact(host, svg, series, (point) => [`N = ${point.x}: ${value(point)}`,
    point.row.mode + (point.row.status === "ok" ? "" : `, ${point.row.status}`)]);
}
