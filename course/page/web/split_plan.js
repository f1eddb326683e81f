// Stage 8's choice of the number of parts (stages/s08_triton_split_kv/__init__.py: `plan`).

/** The number of parts that the cost model finds the cheapest; see `choose_splits` there. */
export function chooseSplits(programs, tiles, places, { alone, wave, merge, part }) {
  let [best, least] = [1, Infinity];
  const most = Math.min(tiles, Math.ceil((4 * places) / programs));
  for (let splits = 1; splits <= Math.max(most, 1); splits++) {
    const waves = Math.ceil((programs * splits) / places);
    const each = Math.ceil(tiles / splits) * Math.max((programs * splits) / places, alone * waves);
    const cost = each + wave * waves + (splits > 1 ? merge + part * splits : 0);
    if (cost < least) [best, least] = [splits, cost];
  }
  return best;
}

/**
 * The programs without a split, their tiles of keys, and the number of parts.
 *
 * rows: of queries of one key head; rule: ladder_data.py's, for one head dimension and dtype.
 */
export function plan({ batch, heads, rows, keys }, rule) {
  const sizes = Object.keys(rule.tiles).map(Number).sort((a, b) => a - b);
  const block_m = sizes.find((m) => m >= rows) ?? Math.min(rule.most_rows, sizes.at(-1));
  const programs = batch * heads * Math.ceil(rows / block_m);
  const tiles = Math.max(1, Math.ceil(keys / rule.tiles[block_m]));
  const computed = rows > rule.largest_tile;
  const places = (computed ? 2 : 1) * rule.multiprocessors;
  const costs = computed ? { ...rule.costs, ...rule.computed } : rule.costs;
  return { block_m, programs, tiles, splits: chooseSplits(programs, tiles, places, costs) };
}
