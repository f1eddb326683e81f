// A float32 as three bfloat16, and products of the pieces (stages/common/products.py).
//
// There all is times 2^16 first, so that small numbers keep their last bits; here nothing is, and
// numbers are kept between `SMALLEST` and `LARGEST`, where it makes no difference.

export const [SMALLEST, LARGEST] = [1e-20, 1e20];
export const PIECES = ["high", "middle", "low"];

const bits = new DataView(new ArrayBuffer(4));

/** Float32 x rounded to bfloat16's 8 bits, halves away from 0, as `round_to_bfloat16` does. */
export function round(x) {
  bits.setFloat32(0, x);
  bits.setUint32(0, ((bits.getUint32(0) + 0x8000) & 0xffff0000) >>> 0);
  return bits.getFloat32(0);
}

/** [high, middle, low], three bfloat16 whose sum is float32 x. */
export function split(x) {
  const high = round(x);
  const middle = round(x - high);
  return [high, middle, x - high - middle];
}

/** The 32 bits of float32 x as text: sign, exponent, fraction. */
export function written(x) {
  bits.setFloat32(0, x);
  return bits.getUint32(0).toString(2).padStart(32, "0");
}

// [piece of a, piece of b], the largest first: the first 1, 3, 6 or 9 are what is kept
export const ORDER = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [2, 0], [1, 2], [2, 1], [2, 2]];

/** The relative error of a b by the first `count` products of the pieces, added in float64. */
export function error(a, b, count) {
  const [of_a, of_b] = [split(a), split(b)];
  const products = ORDER.slice(0, count).map(([i, j]) => of_a[i] * of_b[j]);
  // a b has 48 bits: float64 holds it, and so the sums, exactly enough for the last one to be 0
  return Math.abs(products.reduce((total, each) => total + each, 0) - a * b) / Math.abs(a * b);
}
