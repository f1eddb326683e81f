// Lite's and Online's error on drawn problems: scores N(0, sharpness^2), values N(0, 1).

import { exact, sharpened, walk } from "./softmax.js";

/** Rows of draws: {scores: (rows, keys), values: (rows, keys)}, N(0, 1), the same for each seed. */
export function draw(rows, keys, seed = 1) {
  const next = normal(seed);
  const table = () => Array.from({ length: rows }, () => Array.from({ length: keys }, next));
  return { scores: table(), values: table() };
}

/** Numbers N(0, 1) by Box and Muller, from the generator mulberry32. */
function normal(seed) {
  const uniform = () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
  return () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
}

/** The root mean square of what has that sum of squares. */
const root = (sum, rows) => Math.sqrt(sum / rows);

/**
 * Lite's error for each number of keys 1 to `most`, root mean square over the rows; in float64.
 *
 * One walk gives all of them: a tile that isn't full yet counts as it is.
 */
export function liteErrors({ scores, values }, sharpness, tile, most) {
  const squares = new Float64Array(most);
  scores.forEach((row, r) => {
    const [all, part] = [new Sums(), new Sums()];
    let before = 0; // what the full tiles gave
    for (let i = 0; i < most; i++) {
      if (i && i % tile === 0) {
        before += part.o;
        part.clear();
      }
      all.add(sharpness * row[i], values[r][i]);
      part.add(sharpness * row[i], values[r][i]);
      squares[i] += (before + part.o - all.o) ** 2;
    }
  });
  return squares.map((sum) => root(sum, scores.length));
}

/** The online softmax with tiles of one key. */
class Sums {
  constructor() {
    this.clear();
  }

  clear() {
    [this.m, this.l, this.acc] = [-Infinity, 0, 0];
  }

  add(s, v) {
    const m = Math.max(this.m, s);
    const [alpha, p] = [Math.exp(this.m - m), Math.exp(s - m)];
    [this.m, this.l, this.acc] = [m, this.l * alpha + p, this.acc * alpha + p * v];
  }

  get o() {
    return this.acc / this.l;
  }
}

/** Online's error with n keys, in float32 against float64, root mean square over the rows. */
export function onlineError({ scores, values }, sharpness, tile, n) {
  const squares = scores.map((row, r) => {
    const s = sharpened(row.slice(0, n), sharpness);
    const v = values[r].slice(0, n).map(Math.fround);
    return (walk(s, v, tile).at(-1).o - exact(s, v).o) ** 2;
  });
  return root(squares.reduce((a, b) => a + b), scores.length);
}
