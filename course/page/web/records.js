// The records as objects, and the dialog that shows one of them with its run.

import { make } from "./dom.js";

let loaded;

/** The page's records: {rows, problems, charts, roofs}, each row with its problem, run and stage. */
export function load(data) {
  if (loaded) return loaded;
  const { fields, runs, problems, charts, roofs } = data.records;
  problems.forEach((problem) => Object.assign(problem, { run: runs[problem.run], rows: [] }));
  for (const who of runs.flatMap(({ stages }) => stages)) {
    // numbers of variants differ from run to run, so that they say nothing
    const varies = who.of !== null;
    who.short = varies ? `${who.of} var.` : String(who.number);
    who.label = `${varies ? `${who.of} variant:` : who.number} ${who.title}`;
    who.rank = varies ? who.of + 0.5 : who.number; // a variant stands below its stage
  }
  const rows = data.records.rows.map((values) => {
    const row = Object.fromEntries(fields.map((name, place) => [name, values[place]]));
    row.problem = problems[row.problem];
    row.run = row.problem.run;
    row.who = row.run.stages[row.who];
    row.label = row.who.label;
    row.problem.rows.push(row);
    return row;
  });
  for (const chart of charts) chart.run = runs[chart.run];
  repeats(problems);
  loaded = { rows, problems, runs, charts, roofs };
  return loaded;
}

/**
 * Note on each problem its `others`: what was measured of it again on that machine, itself
 * included, what to believe first at the front. That is what was not edited since; then what was
 * timed in turns; then the newest.
 */
function repeats(problems) {
  const same = Map.groupBy(problems, ({ title, seqlens_k, seed, run }) =>
    JSON.stringify([title, seqlens_k, seed, run.machine]));
  for (const problem of problems) problem.edited = problem.rows.some((row) => row.fair && row.who.edited);
  for (const others of same.values()) {
    others.sort((a, b) => a.edited - b.edited || b.paired - a.paired || b.run.date.localeCompare(a.run.date));
    for (const problem of others) problem.others = others;
  }
}

const WORDS = { ok: "exact by the float64 rule", interpreted: "interpreted: no speed, never compared" };
// what the fields of a record are called (harness/records/schema.py)
const NAMES = {
  mode: "ran", launch_configs: "launched with", time_ms: "time, ms",
  time_iqr_ms: "quartile to quartile of the times, ms", samples: "calls or rounds timed",
  sm_clock_mhz: "clock while it ran, MHz", launch_ms: "time of a launch, ms", flops: "FLOPs, counted",
  first_call_ms: "first call, with compiling, ms", peak_bytes: "peak memory above the inputs, bytes",
  memory_meter: "memory measured by", err_f64_max: "largest error against float64",
  err_f64_rel: "relative error against float64", err_stage3_max: "largest difference from stage 3",
  err_stage3_rel: "relative difference from stage 3", hbm_bytes: "bytes of memory moved, counted",
  products: "how products are made", skip_ratio: "share of tiles skipped",
  x_one_gpu: "times as fast as one GPU", link_gb_s: "link between GPUs, GB/s", link_us: "link’s latency, us",
};
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
      "command of the whole run": make("code", {}, run.command),
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
        .map(([name, value]) => [NAMES[name] ?? name, typeof value === "object" ? JSON.stringify(value) : String(value)]),
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
