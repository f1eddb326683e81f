// A section's state in the address: #SECTION?name=value&..., so that a link shows an example.

/** The values that the address has for a section, a URLSearchParams; null where it has none. */
export function read(section) {
  const [name, ...query] = location.hash.slice(1).split("?");
  return name === section && query.length ? new URLSearchParams(query.join("?")) : null;
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

/**
 * A section's numbers, which the address holds: {state, change(values)}.
 *
 * limits: {name: [usual, least, most]}; what is no number from least to most in the address is as
 * usual. `display()` is called after every change but the first.
 */
export function kept(section, limits, display) {
  const state = {};
  const load = () => {
    const found = read(section);
    for (const [name, [usual, least, most]] of Object.entries(limits)) {
      const x = found?.get(name) ? Number(found.get(name)) : NaN;
      state[name] = x >= least && x <= most ? x : usual;
    }
  };
  const change = (values) => {
    Object.assign(state, values);
    display();
    write(section, state);
  };
  load();
  follow(() => {
    if (!read(section)) return; // the address is about another section now
    load();
    display();
  });
  return { state, change };
}
