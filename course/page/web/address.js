// The state of each section that was changed, in the address, so that a link shows an example:
// #SECTION?name=value&...;SECTION?..., first the section that the reader changed or went to last.

const held = new Map(); // section -> its values, as in the address
const followers = new Map(); // section -> what to call when a link changes it
let current; // the section that comes first
let waiting;

/** Take what the address has; return the sections with values. The others stay as they are. */
function take() {
  const parts = location.hash.slice(1).split(";").map((part) => part.split("?"));
  const found = parts.filter(([, ...query]) => query.length);
  for (const [section, ...query] of found) held.set(section, query.join("?"));
  current = parts[0][0];
  return found.map(([section]) => section);
}

/** Put all values into the address, soon: browsers refuse too many changes in a second. */
function put() {
  clearTimeout(waiting);
  const parts = [...held].filter(([section]) => followers.has(section) && section !== current)
    .map((part) => part.join("?"));
  const first = held.has(current) ? `${current}?${held.get(current)}` : current;
  const whole = `#${[first, ...parts].filter(Boolean).join(";")}`;
  waiting = setTimeout(() => history.replaceState(null, "", whole), 150);
}

/** The section that the address names first. */
export function place() {
  return current;
}

/** The values that the address has for a section, a URLSearchParams; null where it has none. */
export function read(section) {
  return held.has(section) ? new URLSearchParams(held.get(section)) : null;
}

/** Keep a section's values in the address, but for those that are as `usual`. */
export function write(section, values, usual = {}) {
  const changed = Object.entries(values).filter(([name, value]) => value !== usual[name]);
  if (changed.length || !Object.keys(usual).length) {
    held.set(section, new URLSearchParams(changed).toString().replaceAll("%2C", ","));
  } else held.delete(section);
  current = section;
  put();
}

/** Call `change` when the reader follows a link that has values for the section, or goes back. */
export function follow(section, change) {
  followers.set(section, change);
}

/**
 * A section's numbers, which the address holds: {state, change(values)}.
 *
 * limits: {name: [usual, least, most, fits]}; what is no number from least to most in the address,
 * or doesn't fit, is as usual; whole numbers do, unless `fits` is given. `display()` is called
 * after every change but the first.
 */
export function kept(section, limits, display) {
  const usual = Object.fromEntries(Object.entries(limits).map(([name, [x]]) => [name, x]));
  const state = {};
  const load = () => {
    const found = read(section);
    for (const [name, [, least, most, fits = Number.isInteger]] of Object.entries(limits)) {
      const x = found?.get(name)?.trim() ? Number(found.get(name)) : NaN;
      state[name] = x >= least && x <= most && fits(x) ? x : usual[name];
    }
  };
  const change = (values) => {
    Object.assign(state, values);
    display();
    write(section, state, usual);
  };
  load();
  follow(section, () => {
    load();
    display();
  });
  return { state, change };
}

take();
addEventListener("hashchange", () => {
  for (const section of take()) followers.get(section)?.();
  put(); // a link to a place in the page takes no values away
});
