// Which tiles of keys a block of queries visits under a causal mask (FlashAttention-2, section 3.1).

export const [FULL, MASKED, NEVER] = ["full", "masked", "never"];

/** How many keys a row sees, counted from the first. */
export function seenBy(row, nq, nk, causal) {
  return causal ? Math.min(Math.max(row + nk - nq + 1, 0), nk) : nk;
}

/** FULL, MASKED or NEVER for each block and tile, an array (blocks, tiles). */
export function kinds({ nq, nk, causal, block_m, block_n }) {
  const tiles = [...Array(Math.ceil(nk / block_n)).keys()];
  return [...Array(Math.ceil(nq / block_m)).keys()].map((block) => {
    const first = block * block_m; // this row of the block sees the fewest keys
    const last = Math.min(first + block_m, nq) - 1;
    return tiles.map((tile) => {
      const start = tile * block_n;
      if (start + block_n <= seenBy(first, nq, nk, causal)) return FULL;
      return start < seenBy(last, nq, nk, causal) ? MASKED : NEVER;
    });
  });
}
