// The three bfloat16 of a float32, which of the nine products of two are kept, and the error.

import { kept } from "./address.js";
import { LARGEST, ORDER, PIECES, SMALLEST, error, split, written } from "./bfloat16.js";
import { make, scrolling, show } from "./dom.js";

const NAMES = ["a", "b"];
const COUNTS = [1, 3, 6, 9];
const PAIRS = 1000;
const fits = (x) => Math.abs(Math.fround(x)) >= SMALLEST && Math.abs(x) <= LARGEST;
const LIMITS = {
  a: [3.14159265, -LARGEST, LARGEST, fits],
  b: [1.7320508, -LARGEST, LARGEST, fits],
  kept: [6, 1, 9, (x) => COUNTS.includes(x)],
};

export function mount(element) {
  const { state, change } = kept("pieces", LIMITS, display);
  const bits = make("div");
  const grid = make("table", { class: "products" });
  const number = (name) => {
    const input = make("input", {
      type: "text", inputmode: "decimal", size: 14, id: `pieces-${name}`,
      "aria-describedby": "pieces-note",
      oninput: () => {
        const x = input.value.trim() === "" ? NaN : Number(input.value);
        note.textContent = fits(x) ? ""
          : `Got “${input.value}” for number ${name}, expected a number of a size from 10⁻²⁰ to 10²⁰. ` +
            `The page still shows ${state[name]}.`;
        input.setAttribute("aria-invalid", !fits(x));
        if (fits(x)) change({ [name]: x });
      },
    });
    return input;
  };
  const inputs = NAMES.map(number);
  const note = make("p", { id: "pieces-note", role: "status", class: "small" });
  const counts = make("div", { class: "buttons", role: "group", "aria-label": "How many products are kept" },
    ...COUNTS.map((count) => make("button", {
      type: "button", "data-count": count,
      onclick: () => change({ kept: count }),
    }, `${count} product${count > 1 ? "s" : ""}`, make("span", { class: "explained" }))));
  element.append(
    make("div", { class: "controls" }, ...inputs.map((input, i) =>
      make("div", { class: "choice" }, make("label", { for: input.id }, `Number ${NAMES[i]}`), input))), note,
    make("div", { class: "two" },
      make("div", {}, make("h3", {}, "a and its pieces, in bits"),
        scrolling("The bits of a", bits)),
      make("div", {}, make("h3", {}, "Products that are kept"), counts,
        scrolling("The nine products", grid),
        make("p", { class: "small soft" },
          "Errors are relative to the product a b. Float32 itself rounds it by up to 2⁻²⁴ ≈ 6 · 10⁻⁸."),
        make("p", { class: "small" }, ...whySix()))),
  );

  function display() {
    const [a, b] = [Math.fround(state.a), Math.fround(state.b)];
    inputs.forEach((input, i) => {
      if (document.activeElement !== input) input.value = state[NAMES[i]];
    });
    const [of_a, of_b] = [split(a), split(b)];
    bits.replaceChildren(...[["float32", a], ...PIECES.map((name, i) => [name, of_a[i]])].map(line));
    const shown = new Set(ORDER.slice(0, state.kept).map(String));
    grid.replaceChildren(
      make("thead", {}, make("tr", {}, make("td"),
        ...PIECES.map((name) => make("th", { scope: "col" }, `b ${name}`)))),
      make("tbody", {}, ...PIECES.map((name, i) => make("tr", {},
        make("th", { scope: "row" }, `a ${name}`),
        ...PIECES.map((_, j) => make("td", { class: shown.has(`${i},${j}`) ? "kept" : "left" },
          make("span", { class: "number" }, show(of_a[i] * of_b[j], 5)),
          make("span", { class: "explained" }, shown.has(`${i},${j}`) ? "kept" : "left out")))))));
    for (const each of counts.children) {
      const count = Number(each.dataset.count);
      each.setAttribute("aria-pressed", count === state.kept);
      each.lastChild.textContent = `error ${show(error(a, b, count))}`;
    }
  }

  display();
}

/** Say what three products lack, over many pairs of numbers: one pair may be lucky. */
function whySix() {
  const spread = (i, step) => Math.fround(1 + ((i * step) % 1)); // from 1 to 2, evenly, in no order
  const pairs = [...Array(PAIRS).keys()].map((i) => [spread(i, Math.SQRT2), spread(i, Math.sqrt(3))]);
  const [three, six] = [3, 6].map((count) => Math.max(...pairs.map(([a, b]) => error(a, b, count))));
  return [
    make("b", {}, "Why six, where three seem to do? "),
    `A pair may be lucky: 3.14159265 · 2.71828183 with three products errs by ${show(error(
      Math.fround(3.14159265), Math.fround(2.71828183), 3))}. But what three leave out is about 2⁻¹⁶ of the ` +
      `product, where float32 has 24 bits: over ${PAIRS} other pairs they err by up to ${show(three)}, and six by up to ${show(six)}. ` +
      "A score sums many products, and where they cancel, this error is large beside what is left.",
  ];
}

/** A number's sign, exponent and fraction, with the bits that a bfloat16 has in colour. */
function line([name, x], row) {
  const text = written(x);
  const part = (from, to, kind) => make("span", { class: kind }, text.slice(from, to));
  return make("div", { class: "bits" },
    make("span", { class: "name" }, name), part(0, 1, "sign"), part(1, 9, "exponent"),
    part(9, 16, "fraction"), part(16, 32, row ? "empty" : "fraction"),
    make("span", { class: "explained" }, `${show(x, 7)}`));
}
