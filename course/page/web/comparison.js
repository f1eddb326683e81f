// The comparison table: one block per problem, sorted within it, since times of two problems have
// nothing to say to each other. Interpreted rows stand below the others and are never ranked.

import { follow, read, write } from "./address.js";
import { choice, make, scrolling } from "./dom.js";
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
const SORT = "stage"; // the column to sort by at first
const ALL = ""; // the others begin with "=": keys that are numbers would come before it
const SECTION = "comparison";
// what a reader sees first, if there are more than MUCH problems
const START = { direction: "fwd", kind: "float16", mask: "none", n: "16384" };
const MUCH = 24;
const [PAGE, MORE] = [6, 60]; // problems that are shown, and how many a press of the button adds

const [YARDSTICK, PEERS_FROM] = [3, 100];
const ratio = (text) => (text === undefined ? null : Number.parseFloat(text.replace("~", "")));
/** How many times as fast a row is as stage 3; a variant, as its stage. */
const overBase = ({ over, who }) =>
  over[Object.keys(over).find((name) => Number.parseInt(name) === (who.of ?? YARDSTICK))];
// [key, header, value to sort by, whether it ranks by speed]
const COLUMNS = [
  ["stage", "stage or peer", (row) => row.who.rank],
  ["time", "time", (row) => row.time_ms, true],
  ["rate", "rate", (row) => row.flops / row.time_ms, true],
  ["base", "over stage 3", (row) => ratio(overBase(row)), true],
  ["over", "", (row, state) => ratio(row.over[state.rival]), true],
  ["peak", "peak memory", (row) => row.peak_bytes],
  ["error", "max error", (row) => row.err_f64_max],
  ["mode", "ran", (row) => row.mode],
  ["status", "status", (row) => row.status],
];

export function mount(element, data) {
  const { problems, rows } = load(data);
  const state = { filters: {}, shown: PAGE };
  const names = [...new Set(rows.flatMap(({ over }) => Object.keys(over)))].filter((name) => Number.parseInt(name) >= PEERS_FROM)
    .sort((a, b) => Number.parseInt(a) - Number.parseInt(b));
  /** Filter by the address, or else by START where there is so much that something must be chosen. */
  const choose = () => {
    const wanted = read(SECTION) ?? new URLSearchParams(problems.length > MUCH ? START : {});
    for (const key of Object.keys(FILTERS)) {
      state.filters[key] = ALL;
      const value = wanted.get(key);
      if (values(key, matching(problems, state.filters)).includes(value)) state.filters[key] = value;
    }
    const listed = (key, known, usual) => (known.includes(wanted.get(key)) ? wanted.get(key) : usual);
    state.sort = listed("sort", COLUMNS.map(([key]) => key), SORT);
    state.down = wanted.has("down");
    state.rival = listed("over", names, names[0] ?? "");
  };
  choose();

  const draw = () => drawAll(parts, problems, state, change);
  const change = (changes) => {
    Object.assign(state, { shown: PAGE }, changes);
    draw();
    const { filters, sort, down, rival } = state;
    write(SECTION, {
      ...Object.fromEntries(Object.entries(filters).filter(([, chosen]) => chosen !== ALL)),
      ...(sort !== SORT && { sort }), ...(down && { down: 1 }), ...(rival !== (names[0] ?? "") && { over: rival }),
    });
  };
  const filters = Object.keys(FILTERS).map((key) => {
    const options = { [ALL]: "all" };
    for (const value of values(key, problems)) options[`=${value}`] = DIRECTIONS[value] ?? value;
    const made = choice(FILTERS[key][0], options, state.filters[key] && `=${state.filters[key]}`, (value) => {
      state.filters[key] = value.slice(1);
      change();
    });
    return [key, made];
  });
  const over = choice("compare with", Object.fromEntries(names.map((name) => [name, name])), state.rival,
    (rival) => change({ rival }));
  const reset = make("button", { type: "button", onclick: () => {
    for (const [key, made] of filters) state.filters[key] = made.input.value = ALL;
    change();
  } }, "Clear filters");

  const parts = {
    filters: new Map(filters),
    count: make("p", { class: "count", role: "status" }),
    head: make("tr"),
    table: make("table", { class: "records" }),
    more: make("button", { type: "button", onclick: () => {
      state.shown += MORE;
      draw();
    } }),
  };
  parts.table.append(
    make("caption", { class: "hidden" }, "Records: time, rate, ratios, memory, error of each stage"),
    make("thead", {}, parts.head),
  );
  element.append(
    make("p", {}, "Each block is one problem, measured in one run; a click on a figure opens its record. ",
      "Only right results are compared. ", make("b", {}, "~"), " marks a ratio of times that were not taken in turns; ",
      "brackets hold the quartiles of ratios that were: half of the rounds lie between them. ", make("b", {}, "†"),
      ": the code was edited since. A variant, one thing of a stage changed, is compared with its stage. ",
      "Where a problem was measured several times, that which deserves most belief comes first: not edited ",
      "since, in turns, the newest."),
    make("form", { class: "controls", "aria-label": "Filters of the table", onsubmit: (e) => e.preventDefault() },
      ...filters.map(([, made]) => made.element), names.length ? over.element : "", reset),
    parts.count,
    scrolling("Table of records", parts.table),
    parts.more,
  );
  follow(SECTION, () => {
    choose();
    for (const [key, made] of filters) made.input.value = state.filters[key] && `=${state.filters[key]}`;
    over.input.value = state.rival;
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

function drawAll(parts, problems, state, change) {
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
  parts.head.replaceChildren(...COLUMNS.map((column) => header(column, state, change)));
  for (const body of [...parts.table.tBodies]) body.remove();
  // those that compare the most stages come first; what is of one problem stays together
  const most = (problem) => Math.max(...problem.others.map((each) => fair(each).length));
  const firsts = [...new Set(found.map(({ others }) => others))].sort(([a], [b]) => most(b) - most(a));
  const ordered = firsts.flatMap((others) => others.filter((each) => found.includes(each)));
  parts.table.append(...ordered.slice(0, state.shown).map((problem) => block(problem, state)));
  const left = found.length - state.shown;
  parts.more.hidden = left <= 0;
  parts.more.textContent = `Show more: ${counted(left, "problem")} left`;
}

const counted = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const fair = (problem) => problem.rows.filter((row) => row.fair);

function header([key, words], state, change) {
  const sorted = state.sort === key;
  const button = make("button", { type: "button", onclick: () => {
    change({ sort: key, down: sorted ? !state.down : false });
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
  const { run, paired } = problem;
  const said = [run.date.slice(0, 10), run.machine, paired ? "in turns" : "each alone", run.file,
    standing(problem)].filter(Boolean).join("; ");
  return make("tbody", {},
    line("problem", problem.title, " ", make("span", { class: "soft" }, said)),
    ...timed.map((row) => tableRow(row, best, state)),
    ...(interpreted.length ? [line("apart", "Interpreted, without a GPU: no speed, never compared")] : []),
    ...interpreted.map((row) => tableRow(row, best, state)));
}

/** What to believe of a problem that was measured several times. */
function standing(problem) {
  const { others } = problem;
  const [first] = others;
  if (others.length < 2) return "";
  if (first === problem) return `measured ${others.length} times: believe this first`;
  if (problem.edited && !first.edited) return "edited since, another measurement is not";
  if (!problem.paired && first.paired) return "another measurement was in turns";
  return "there is a newer measurement";
}

function tableRow(row, best, state) {
  // a click on it is one on its row, whose every figure opens the record
  const who = make("button", { type: "button", style: `--colour:${row.who.colour}` },
    make("span", { class: "swatch", "aria-hidden": "true" }),
    ...(row.who.of === null ? [make("b", {}, row.who.short), ` ${row.who.title}`] : [row.label]));
  if (row.who.edited) who.append(make("abbr", { title: "its code was edited since" }, "†"));
  const bar = row.fair ? `--part:${(100 * row.flops) / row.time_ms / best}%;--colour:${row.who.colour}` : false;
  const cell = (key, ...words) => make("td", { class: key }, ...words);
  return make("tr", { class: `${row.fair ? "fair" : "unfair"}${row.who.of === null ? "" : " variant"}`, onclick: () => openRecord(row) },
    make("th", { scope: "row", class: "stage" }, who),
    cell("time", row.time),
    make("td", { class: "rate", style: bar }, row.rate),
    cell("base", ...ratioText(overBase(row), row.who.of !== null && `over stage ${row.who.of}`)),
    cell("over", ...ratioText(row.over[state.rival])),
    cell("peak", row.peak),
    cell("error", row.error),
    cell("mode", row.mode),
    cell(`status ${row.status}`, row.status));
}

/** "12.3x (12.1-12.5)": the quartiles below the ratio; and over whom, where it isn't the header's. */
function ratioText(text = "-", over = false) {
  const [ratioPart, quartiles] = text.split(" (");
  const below = [quartiles && `(${quartiles}`, over && text !== "-" && over].filter(Boolean);
  return [ratioPart, ...below.map((words) => make("small", {}, words))];
}
