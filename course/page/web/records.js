// The records as objects, and the dialog that shows one of them with its run.

import { make } from "./dom.js";

let loaded;

/** The page's records: {rows, problems, charts, roofs}, each row with its problem, run and stage. */
export function load(data) {
  if (loaded) return loaded;
  const { fields, runs, problems, charts, roofs } = data.records;
  problems.forEach((problem) => Object.assign(problem, { run: runs[problem.run], rows: [] }));
  const rows = data.records.rows.map((values) => {
    const row = Object.fromEntries(fields.map((name, place) => [name, values[place]]));
    row.problem = problems[row.problem];
    row.run = row.problem.run;
    row.who = row.run.stages[row.who];
    row.label = `${row.who.number} ${row.who.title}`;
    row.problem.rows.push(row);
    return row;
  });
  for (const chart of charts) chart.run = runs[chart.run];
  loaded = { rows, problems, runs, charts, roofs };
  return loaded;
}

const WORDS = { ok: "exact by the float64 rule", interpreted: "interpreted: no speed, never compared" };
// what a row has for the page alone, and what the dialog says elsewhere
const NOT_OF_THE_RECORD = new Set([
  "problem", "run", "who", "label", "line", "fair", "time", "rate", "peak", "error", "over", "reason",
]);

let dialog;

/** Show one record: what was measured, where, by which command. */
export function openRecord(row) {
  dialog ??= document.body.appendChild(
    make("dialog", { class: "record", "aria-labelledby": "record-title", onclick: (event) => event.target === dialog && dialog.close() }),
  );
  const { run, problem } = row;
  const close = make("button", { type: "button", onclick: () => dialog.close() }, "Close");
  const heading = make("h3", { id: "record-title" }, row.label);
  dialog.replaceChildren(
    make("div", { class: "head" }, heading, close),
    make("p", { class: "soft" }, problem.title),
    make("p", {}, ...[row.status, WORDS[row.status], WORDS[row.mode], row.reason].filter(Boolean).join("; ")),
    list({
      machine: run.machine + (problem.device === "cpu" ? `, ${run.cores} cores` : ""),
      software: Object.entries(run.software).map((each) => each.join(" ")).join(", "),
      command: make("code", {}, run.command),
      commit: make("code", {}, run.commit ?? "none"),
      date: run.date,
      file: `${run.file}, line ${row.line}`,
      timed: problem.paired ? "in turns with the others of its table" : "in a process of its own",
      "code today": row.who.edited ? "edited since it was measured" : "as measured",
      ...(run.missing ? { run: `${run.missing} planned measurements are not in the file` } : {}),
    }),
    make("h4", {}, "The record"),
    list(Object.fromEntries(
      Object.entries(row)
        .filter(([name, value]) => !NOT_OF_THE_RECORD.has(name) && value !== null)
        .map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)]),
    )),
    make("p", { class: "soft" }, "Numbers have six digits here; the file has all."),
  );
  dialog.showModal();
  dialog.scrollTop = 0;
}

function list(entries) {
  return make("dl", {}, ...Object.entries(entries).map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}
