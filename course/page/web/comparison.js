// The comparison table: one block per problem, sorted within it, since times of two problems have
// nothing to say to each other. Interpreted rows stand below the others and are never ranked.

import { follow, read, write } from "./address.js";
import { choice, make } from "./dom.js";
import { load, openRecord } from "./records.js";

const FILTERS = {
  machine: ["machine", (problem) => problem.run.machine],
  direction: ["direction", (problem) => problem.direction],
  kind: ["dtype", (problem) => problem.kind],
  mask: ["mask", (problem) => problem.mask],
  n: ["N (keys)", (problem) => problem.nk],
  d: ["d", (problem) => problem.d],
  timed: ["timed", (problem) => (problem.paired ? "in turns" : "alone")],
  file: ["file", (problem) => problem.run.file],
};
const DIRECTIONS = { fwd: "forward", bwd: "backward", train: "forward and backward" };
const ALL = ""; // the others begin with "=": keys that are numbers would come before it
const SECTION = "comparison";
// what a reader sees first, if there are more than MUCH problems
const START = { direction: "fwd", kind: "float16", mask: "none", n: "16384" };
const MUCH = 24;
const PAGE = 6; // problems that are shown at a time

const ratio = (text) => (text === undefined ? null : Number.parseFloat(text.replace("~", "")));
// [key, header, value to sort by, whether it ranks by speed]
const COLUMNS = [
  ["stage", "stage or peer", (row) => row.who.number],
  ["time", "time", (row) => row.time_ms, true],
  ["rate", "rate", (row) => row.flops / row.time_ms, true],
  ["before", "over the one before", (row) => ratio(row.over.before), true],
  ["over", "", (row, state) => ratio(row.over[state.rival]), true],
  ["peak", "peak memory", (row) => row.peak_bytes],
  ["error", "max error", (row) => row.err_f64_max],
  ["mode", "ran", (row) => row.mode],
  ["status", "status", (row) => row.status],
];

export function mount(element, data) {
  const { problems, rows } = load(data);
  const state = { filters: {}, sort: "stage", down: false, rival: "3 torch, three GEMMs", shown: PAGE };
  /** Filter by the address, or else by START where there is so much that something must be chosen. */
  const choose = () => {
    const wanted = read(SECTION) ?? new URLSearchParams(problems.length > MUCH ? START : {});
    for (const key of Object.keys(FILTERS)) {
      state.filters[key] = ALL;
      const value = wanted.get(key);
      if (values(key, matching(problems, state.filters)).includes(value)) state.filters[key] = value;
    }
  };
  choose();

  const draw = (changes = {}) => {
    Object.assign(state, { shown: PAGE }, changes);
    drawAll(parts, problems, state, draw);
  };
  const filters = Object.keys(FILTERS).map((key) => {
    const options = { [ALL]: "all" };
    for (const value of values(key, problems)) options[`=${value}`] = DIRECTIONS[value] ?? value;
    const made = choice(FILTERS[key][0], options, state.filters[key] && `=${state.filters[key]}`, (value) => {
      state.filters[key] = value.slice(1);
      draw();
      write(SECTION, Object.fromEntries(Object.entries(state.filters).filter(([, chosen]) => chosen !== ALL)));
    });
    return [key, made];
  });
  const names = [...new Set(rows.flatMap(({ over }) => Object.keys(over)))].filter((name) => name !== "before")
    .sort((a, b) => Number.parseInt(a) - Number.parseInt(b));
  state.rival = names.includes(state.rival) ? state.rival : (names[0] ?? "");
  const over = choice("compare with", Object.fromEntries(names.map((name) => [name, name])), state.rival,
    (rival) => draw({ rival }));
  const reset = make("button", { type: "button", onclick: () => {
    for (const [key, made] of filters) state.filters[key] = made.input.value = ALL;
    draw();
  } }, "Clear filters");

  const parts = {
    filters: new Map(filters),
    count: make("p", { class: "count", role: "status" }),
    head: make("tr"),
    table: make("table", { class: "records" }),
    more: make("button", { type: "button", onclick: () => draw({ shown: state.shown + 3 * PAGE }) }),
  };
  parts.table.append(
    make("caption", { class: "hidden" }, "Records: time, rate, ratios, memory, error of each stage"),
    make("thead", {}, parts.head),
  );
  element.append(
    make("p", {}, "Each block is one problem, measured in one run; a click on a figure opens its record. ",
      "Only right results are compared. ", make("b", {}, "~"), " marks a ratio of times that were not taken in turns; ",
      "brackets hold the quartiles of ratios that were. ", make("b", {}, "†"), ": the code was edited since."),
    make("form", { class: "controls", "aria-label": "Filters of the table", onsubmit: (e) => e.preventDefault() },
      ...filters.map(([, made]) => made.element), names.length ? over.element : "", reset),
    parts.count,
    make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of records" }, parts.table),
    parts.more,
  );
  follow(() => {
    if (!read(SECTION)) return; // the address is about another section now
    choose();
    for (const [key, made] of filters) made.input.value = state.filters[key] && `=${state.filters[key]}`;
    draw();
  });
  draw();
}

/** The problems that pass all filters, but for that of `except`. */
function matching(problems, filters, except) {
  const wanted = Object.entries(filters).filter(([key, value]) => value !== ALL && key !== except);
  return problems.filter((each) => wanted.every(([key, value]) => String(FILTERS[key][1](each)) === value));
}

/** The values of a filter among problems, as texts: numbers by size. */
function values(key, problems) {
  const found = [...new Set(problems.map(FILTERS[key][1]))];
  found.sort((a, b) => (typeof a === "number" ? a - b : 0));
  return found.map(String);
}

function drawAll(parts, problems, state, draw) {
  for (const [key, made] of parts.filters) {
    const left = new Set(values(key, matching(problems, state.filters, key)));
    for (const option of made.input.options) {
      option.disabled = option.value !== ALL && !left.has(option.value.slice(1)) && !option.selected;
    }
  }
  const found = matching(problems, state.filters);
  const rows = found.reduce((sum, problem) => sum + problem.rows.length, 0);
  parts.count.textContent = found.length
    ? `${counted(found.length, "problem")}, ${counted(rows, "record")}`
    : "No record passes all of these filters.";
  parts.head.replaceChildren(...COLUMNS.map((column) => header(column, state, draw)));
  for (const body of [...parts.table.tBodies]) body.remove();
  // those that compare the most stages come first, of these what was timed in turns
  const most = [...found].sort((a, b) => fair(b).length - fair(a).length || b.paired - a.paired);
  parts.table.append(...most.slice(0, state.shown).map((problem) => block(problem, state)));
  const left = found.length - state.shown;
  parts.more.hidden = left <= 0;
  parts.more.textContent = `Show more: ${counted(left, "problem")} left`;
}

const counted = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const fair = (problem) => problem.rows.filter((row) => row.fair);

function header([key, words], state, draw) {
  const sorted = state.sort === key;
  const button = make("button", { type: "button", onclick: () => {
    draw({ sort: key, down: sorted ? !state.down : false });
    document.getElementById(`sort-${key}`).focus(); // the header was made again
  }, id: `sort-${key}` }, key === "over" ? `over ${state.rival}` : words);
  const way = sorted ? (state.down ? "descending" : "ascending") : "none";
  return make("th", { scope: "col", class: key, "aria-sort": way }, button);
}

function block(problem, state) {
  const [, , value, ranks] = COLUMNS.find(([key]) => key === state.sort);
  const order = (a, b) => {
    if (ranks && a.fair !== b.fair) return a.fair ? -1 : 1;
    const [x, y] = [value(a, state), value(b, state)];
    if (x === null || y === null) return (x === null) - (y === null);
    const way = x < y ? -1 : x > y ? 1 : a.who.number - b.who.number;
    return state.down ? -way : way;
  };
  const best = Math.max(...fair(problem).map((row) => row.flops / row.time_ms));
  const apart = (row) => row.mode === "interpreted";
  const timed = problem.rows.filter((row) => !apart(row)).sort(order);
  const interpreted = problem.rows.filter(apart).sort(order);
  const line = (tag, ...words) =>
    make("tr", { class: tag }, make("th", { colspan: COLUMNS.length, scope: "rowgroup" },
      make("div", {}, ...words)));
  const said = `${problem.run.machine}; ${problem.paired ? "in turns" : "one process each"}; ${problem.run.file}`;
  return make("tbody", {},
    line("problem", problem.title, " ", make("span", { class: "soft" }, said)),
    ...timed.map((row) => tableRow(row, best, state)),
    ...(interpreted.length ? [line("apart", "Interpreted, without a GPU: no speed, never compared")] : []),
    ...interpreted.map((row) => tableRow(row, best, state)));
}

function tableRow(row, best, state) {
  // a click on it is one on its row, whose every figure opens the record
  const who = make("button", { type: "button", style: `--colour:${row.who.colour}` },
    make("span", { class: "swatch", "aria-hidden": "true" }), make("b", {}, String(row.who.number)),
    " ", row.who.title);
  if (row.who.edited) who.append(make("abbr", { title: "its code was edited since" }, "†"));
  const bar = row.fair ? `--part:${(100 * row.flops) / row.time_ms / best}%;--colour:${row.who.colour}` : false;
  const cell = (key, ...words) => make("td", { class: key }, ...words);
  return make("tr", { class: row.fair ? "fair" : "unfair", onclick: () => openRecord(row) },
    make("th", { scope: "row", class: "stage" }, who),
    cell("time", row.time),
    make("td", { class: "rate", style: bar }, row.rate),
    cell("before", ...ratioText(row.over.before)),
    cell("over", ...ratioText(row.over[state.rival])),
    cell("peak", row.peak),
    cell("error", row.error),
    cell("mode", row.mode),
    cell(`status ${row.status}`, row.status));
}

/** "12.3x (12.1-12.5)": the quartiles below the ratio. */
function ratioText(text = "-") {
  const [ratioPart, quartiles] = text.split(" (");
  return quartiles ? [ratioPart, make("small", {}, `(${quartiles}`)] : [ratioPart];
}
