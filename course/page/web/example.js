// The player's example: its limits, its text in the address, and the examples to begin with.

import { MISTAKES } from "./softmax.js";

export const MOST_KEYS = 24;
export const LARGEST = 1000; // of a score or a value
export const SHARPEST = 8;
const LONG = 60; // letters of a wrong value that are shown

// The running max rises in the first three tiles and not in the fourth. All values are between 0
// and 10, so that an average of them is, too.
export const FIRST = {
  s: [0.5, 1, 2, -0.5, 3, 1, 0, 1.5],
  v: [2, 8, 4, 6, 9, 1, 3, 7],
  tile: 2,
  sharp: 1,
  mistake: "",
  step: 0,
};

// for each mistake an example that shows it, and one without it where it does no harm
export const SHOWN = {
  rescale: { ...FIRST, mistake: "rescale" },
  tail: { ...FIRST, s: [-2, -1, -3, -2.5, -1.5], v: [2, 8, 4, 6, 9], tile: 4, mistake: "tail" },
  zero: { ...FIRST, s: [-110, -120, -115, -108], v: [2, 8, 4, 6], mistake: "zero" },
};

/** The example as values of the address. */
export function toAddress({ s, v, tile, sharp, mistake, step }) {
  return { s: s.join(), v: v.join(), tile, sharp, step, ...(mistake && { break: mistake }) };
}

/**
 * The example that an address asks for, and what is wrong with it: {example, problems}.
 *
 * What can't be read is as in FIRST; `problems` are sentences.
 */
export function fromAddress(values) {
  const problems = [];
  const wrong = (name, got, expected) => {
    const begin = got.length > LONG ? `${got.slice(0, LONG)}…` : got;
    problems.push(`${name}: got ${JSON.stringify(begin)}, expected ${expected}.`);
    return null;
  };
  const number = (name, usual, least, most, whole = true) => {
    const got = values.get(name);
    if (got === null) return usual;
    const x = got.trim() === "" ? NaN : Number(got);
    if (x >= least && x <= most && (!whole || Number.isInteger(x))) return x;
    wrong(name, got, `a ${whole ? "whole " : ""}number from ${least} to ${most}`);
    return usual;
  };
  const list = (name) => {
    const got = values.get(name) ?? FIRST[name].join();
    const x = got.split(",").map((each) => (each.trim() === "" ? NaN : Number(each)));
    if (x.length <= MOST_KEYS && x.every((each) => Math.abs(each) <= LARGEST)) return x;
    return wrong(name, got, `1 to ${MOST_KEYS} numbers from ${-LARGEST} to ${LARGEST}, with commas`);
  };
  let [s, v] = [list("s"), list("v")];
  if (s && v && s.length !== v.length) {
    problems.push(`s and v: got ${s.length} scores and ${v.length} values, expected as many.`);
    s = null;
  }
  if (!s || !v) [s, v] = [FIRST.s, FIRST.v];
  let mistake = values.get("break") ?? "";
  if (mistake && !Object.hasOwn(MISTAKES, mistake)) {
    wrong("break", mistake, `one of ${Object.keys(MISTAKES).join(", ")}`);
    mistake = "";
  }
  const tile = number("tile", Math.min(FIRST.tile, s.length), 1, s.length);
  const sharp = number("sharp", 1, 0, SHARPEST, false);
  const step = number("step", 0, 0, Math.ceil(s.length / tile));
  return { example: { s: [...s], v: [...v], tile, sharp, mistake, step }, problems };
}
