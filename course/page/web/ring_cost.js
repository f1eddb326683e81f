// What each rank of stage 10 does when, in a forward pass: harness/problems/ring_cost.py, where the
// formulas are, with every rank in place of the slowest. Seconds and bytes.

/** How many pairs of a query and a key each rank computes at each hop, of one head: (ranks, hops). */
export function pairs({ keys, world, causal, zigzag }) {
  const n = keys / world;
  return [...Array(world).keys()].map((rank) => [...Array(world).keys()].map((hop) => {
    if (!causal) return n * n;
    if (hop === 0) return (n * (n + 1)) / 2; // its own keys
    if (zigzag) return (n * n) / 2;
    return hop <= rank ? n * n : 0; // keys of an earlier part, or of a later one
  }));
}

/** Q and KV: the bytes of a rank's q, and of its k and v. */
function partBytes({ keys, world, b, h, hk, d, size }) {
  const row = (b * d * size * keys) / world;
  return [h * row, 2 * hk * row];
}

/**
 * For each rank what it does, [{what, start, end}], what: "compute", "merge" or "send".
 *
 * After each exchange all ranks meet (stages/s10_ring/copies.py): a hop lasts as long as for the
 * slowest of them.
 */
export function schedule(problem, { rate, link, latency, hbm, launch }) {
  const { world, b, h, d, size, overlap } = problem;
  const [q, kv] = partBytes(problem);
  const each = (4 * b * h * d) / rate;
  const between = world > 2 ? (q / size) * 4 : q; // bytes of o; merged more than once in float32
  const merge = (2 * between + q) / hbm + launch;
  const ranks = pairs(problem).map((seen) => ({ seen, spans: [] }));
  let now = 0;
  for (let hop = 0; hop < world; hop++) {
    const arrived = hop < world - 1 ? now + latency + kv / link : now; // nothing is sent at the last
    const start = overlap ? now : arrived;
    let end = arrived;
    for (const { seen, spans } of ranks) {
      if (arrived > now) spans.push({ what: "send", start: now, end: arrived });
      if (!seen[hop]) continue; // no query sees a key
      const computed = start + each * seen[hop] + launch;
      spans.push({ what: "compute", start, end: computed });
      const merged = hop ? computed + merge : computed;
      if (hop) spans.push({ what: "merge", start: computed, end: merged });
      end = Math.max(end, merged);
    }
    now = end;
  }
  return ranks.map(({ spans }) => spans);
}

/** When the last rank has ended. */
export function seconds(ranks) {
  return Math.max(...ranks.flat().map(({ end }) => end));
}

/** How long one GPU with the whole sequence takes. */
export function alone(problem, { rate, launch }) {
  const { keys, b, h, d, causal } = problem;
  const seen = causal ? (keys * (keys + 1)) / 2 : keys * keys;
  return (4 * b * h * d * seen) / rate + launch;
}

/** How long a rank does one of the kinds in all. */
export function total(spans, ...kinds) {
  return spans.filter(({ what }) => kinds.includes(what)).reduce((sum, { start, end }) => sum + end - start, 0);
}
