// Small helpers to make elements and to write numbers.

const SVG = new Set(["svg", "g", "rect", "line", "path", "circle", "text", "polyline", "polygon", "pattern"]);

/** Make an element with attributes and children; on... attributes are listeners. */
export function make(tag, attributes = {}, ...children) {
  const element = SVG.has(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** The rows of a dl: {words: what they say or how much it is}. */
export function terms(rows) {
  return Object.entries(rows).map(([words, x]) => make("div", {}, make("dt", {}, words), make("dd", {}, x)));
}

/** Write a number for people: three decimals, or an exponent where those don't suffice. */
export function show(x, decimals = 3) {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (x === 0) return "0";
  const small = Math.abs(x) < 10 ** -decimals || Math.abs(x) >= 1e5;
  return (small ? power(x) : String(+x.toFixed(decimals))).replace("-", "−");
}

function power(x) {
  const [digits, exponent] = x.toExponential(1).split("e");
  const raised = [...String(+exponent)].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("");
  return `${+digits === 1 ? "" : `${+digits} · `}10${raised}`;
}

/** A box in which what is wider than the page scrolls, by keyboard too; it fades where more lies. */
export function scrolling(label, ...children) {
  const box = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, ...children);
  const mark = () =>
    box.classList.toggle("right", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  box.addEventListener("scroll", mark, { passive: true });
  const sizes = new ResizeObserver(mark);
  for (const each of [box, ...box.children]) sizes.observe(each);
  return box;
}

let count = 0;

/** A labelled slider with its value beside it: {element, input, set(value)}. `say` writes a value. */
export function slider(label, { min, max, step = 1, value, say = String, input }) {
  const id = `slider-${count++}`;
  const output = make("output", { for: id });
  const range = make("input", { id, type: "range", min, max, step });
  const display = (x) => {
    output.textContent = say(x);
    range.setAttribute("aria-valuetext", output.textContent);
  };
  const set = (next) => {
    range.value = next; // the nearest step: an address may hold a value between two
    display(next);
  };
  range.addEventListener("input", () => {
    display(+range.value);
    input(+range.value);
  });
  set(value);
  const element = make("div", { class: "slider" }, make("label", { for: id }, label), range, output);
  return { element, input: range, set };
}

/** A labelled choice: {element, input}. `options` maps a value to its words. */
export function choice(label, options, value, change) {
  const id = `choice-${count++}`;
  const items = Object.entries(options).map(([key, words]) => make("option", { value: key }, words));
  const select = make("select", { id, onchange: () => change(select.value) }, ...items);
  select.value = value;
  const element = make("div", { class: "choice" }, make("label", { for: id }, label), select);
  return { element, input: select };
}
