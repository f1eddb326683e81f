// A section's state in the address: #SECTION?name=value&..., so that a link shows an example.

/** The values that the address has for a section, a URLSearchParams; null where it has none. */
export function read(section) {
  const [name, ...query] = location.hash.slice(1).split("?");
  return name === section && query.length ? new URLSearchParams(query.join("?")) : null;
}

/**
 * Numbers of a section's state: {name: [usual, least, most]} gives {name: number}.
 *
 * What the address doesn't have, or what is no number from least to most, is as usual.
 */
export function numbers(section, limits) {
  const found = read(section);
  return Object.fromEntries(Object.entries(limits).map(([name, [usual, least, most]]) => {
    const x = found?.get(name) ? Number(found.get(name)) : NaN;
    return [name, x >= least && x <= most ? x : usual];
  }));
}

let waiting;

/** Put a section's state into the address, soon: browsers refuse too many changes in a second. */
export function write(section, values) {
  clearTimeout(waiting);
  const query = new URLSearchParams(values).toString().replaceAll("%2C", ",");
  waiting = setTimeout(() => history.replaceState(null, "", `#${section}?${query}`), 150);
}

/** Call `change` when the reader goes to another address, by a link or back. */
export function follow(change) {
  addEventListener("hashchange", change);
}
