// The player's table: a column for each key, its tile above it, and how much it weighs.

import { make, scrolling, show } from "./dom.js";
import { LARGEST } from "./example.js";

const ROWS = {
  p: { stage: 5, title: "p in acc", explained: "exp(s − m_i), under the max so far" },
  exact: { stage: 3, title: "Exact weight", explained: "softmax over the keys so far" },
  online: { stage: 5, title: "Online’s weight", explained: "p / l_i" },
  lite: { stage: 4, title: "Lite’s weight", explained: "softmax over its tile alone" },
};

export class Keys {
  /**
   * `edit(name, index, value)` is called with "s" or "v" and a number that the reader gave;
   * `refuse(words)` where it was none.
   */
  constructor(edit, refuse) {
    Object.assign(this, { edit, refuse });
    this.table = make("table", { class: "keys" });
    this.box = scrolling("The keys, tile by tile", this.table);
    this.note = make("p", { class: "small", role: "status" });
    this.element = make("div", {}, this.box, this.note);
  }

  /** Make the columns for an example with the sharpened scores s; keeps what is there if it fits. */
  build({ s: scores, v, tile, sharp, mistake }, s) {
    const places = Math.ceil(s.length / tile) * tile; // with those past the last key
    const shape = [s.length, tile].join();
    if (shape !== this.shape) {
      this.shape = shape;
      this.fill(s.length, tile, places);
    }
    const shown = [...s, ...Array(places - s.length).fill(mistake === "tail" ? 0 : -Infinity)];
    const finite = [0, ...shown.filter(Number.isFinite)];
    this.low = Math.min(...finite);
    this.high = Math.max(...finite, this.low + 1e-6);
    this.cells.bars.forEach(({ bar, number }, i) => {
      const from = this.height(0);
      bar.style.display = Number.isFinite(shown[i]) ? "" : "none";
      bar.style.bottom = `${Math.min(from, this.height(shown[i]))}%`;
      bar.style.height = `${Math.abs(this.height(shown[i]) - from)}%`;
      number.textContent = sharp === 1 && i < s.length ? "" : show(shown[i], 2);
    });
    for (const [name, values] of [["s", scores], ["v", v]]) {
      this.cells[name].forEach((input, i) => {
        if (document.activeElement !== input || Number(input.value) !== values[i]) {
          input.value = values[i];
          input.removeAttribute("aria-invalid");
        }
      });
    }
  }

  height(score) {
    return (100 * (score - this.low)) / (this.high - this.low);
  }

  fill(n, tile, places) {
    const indices = [...Array(places).keys()];
    const starts = indices.filter((i) => i % tile === 0);
    this.cells = { columns: indices.map(() => []), s: [], v: [], bars: [], lines: [] };
    for (const name in ROWS) this.cells[name] = [];
    const row = (header, cell) => {
      const cells = indices.map((i) => {
        const one = cell(i);
        if (i % tile === 0) one.classList.add("begins");
        if (i >= n) one.classList.add("beyond");
        this.cells.columns[i].push(one);
        return one;
      });
      return make("tr", {}, header, ...cells);
    };
    const header = (title, explained, stage) => make("th", { scope: "row" },
      ...(stage === undefined ? [] : [swatch(stage)]), title,
      make("span", { class: "explained" }, explained));
    const tiles = starts.map((start) => make("th",
      { scope: "colgroup", colspan: Math.min(tile, places - start), class: "begins" },
      `tile ${start / tile}`));
    const input = (name, words) => (i) => i < n
      ? make("td", {}, this.input(name, i, `${words} of key ${i}`)) : make("td");
    this.table.replaceChildren(
      make("thead", {},
        make("tr", {}, make("td"), ...tiles),
        row(make("th", { scope: "row" }, "key"), (i) =>
          make("th", { scope: "col" }, i < n ? i : make("span", { class: "explained" }, "no key")))),
      make("tbody", {},
        row(header("Score s", "dashed: m_i, the largest so far"), (i) => this.score(i)),
        row(header("", "type another"), input("s", "score")),
        row(header("Value v", "what is averaged"), input("v", "value")),
        ...Object.entries(ROWS).map(([name, { title, explained, stage }]) =>
          row(header(title, explained, stage), () => this.weight(name, stage)))),
    );
  }

  score(i) {
    const bar = make("i");
    const line = make("b");
    const number = make("span", { class: "explained" });
    this.cells.bars[i] = { bar, number };
    this.cells.lines[i] = line;
    return make("td", { class: "score" }, make("div", { class: "bar high" }, bar, line), number);
  }

  input(name, i, label) {
    const input = make("input", {
      type: "number", step: "any", min: -LARGEST, max: LARGEST, "aria-label": label,
      oninput: () => {
        const fits = input.value !== "" && input.checkValidity();
        if (fits) input.removeAttribute("aria-invalid");
        else input.setAttribute("aria-invalid", "true"); // "-" on the way to "-2" is, too
        this.note.textContent = fits ? ""
          : `The ${label} must be a number from −${LARGEST} to ${LARGEST}. The page still shows ${this.given}.`;
        if (!fits) return;
        this.given = input.value;
        this.edit(name, i, Number(input.value));
      },
      onfocus: () => { this.given = input.value; },
      onblur: () => {
        if (!input.hasAttribute("aria-invalid")) return;
        input.removeAttribute("aria-invalid");
        this.note.textContent = "";
        this.refuse(`The ${label} must be a number from −${LARGEST} to ${LARGEST}. It stays ${this.given}.`);
        input.value = this.given;
      },
    });
    this.cells[name].push(input);
    return input;
  }

  weight(name, stage) {
    const bar = make("i");
    bar.style.background = `var(--stage-${stage})`;
    const number = make("span", { class: "number" });
    this.cells[name].push({ bar, number });
    return make("td", {}, make("div", { class: "bar" }, bar), number);
  }

  /** Bring a tile's first cell into the box, which is wider than a phone. */
  scrollTo(cell) {
    const [box, header] = [this.box, this.table.querySelector("th[scope=row]").offsetWidth];
    const [left, right] = [cell.offsetLeft - header, cell.offsetLeft + 2 * cell.offsetWidth];
    if (left < box.scrollLeft || right > box.scrollLeft + box.clientWidth) box.scrollLeft = left;
  }

  /** Show the weights after a step, or none before the first; truth: as `exact` returns it. */
  display(now, truth) {
    const of = now && {
      p: [...now.kept, ...now.past_end],
      exact: truth.weights,
      online: [...now.kept, ...now.past_end].map((p) => p / now.l_i),
      lite: now.lite_kept,
    };
    for (const name in ROWS) {
      this.cells[name].forEach(({ bar, number }, i) => {
        const x = of?.[name][i];
        const known = x !== undefined;
        bar.style.height = `${known && x > 0 ? Math.min(100 * x, 100) : 0}%`;
        bar.classList.toggle("over", x > 1.0001); // no weight is larger than 1
        number.textContent = !known ? "" : x > 0 && x < 0.005 ? "≈ 0" : show(x, 2);
      });
    }
    if (now) this.scrollTo(this.cells.columns[now.start][0]);
    const begin = now?.start ?? 0;
    const end = now ? begin + now.p.length + now.past_end.length : 0;
    this.cells.columns.forEach((column, i) => {
      column.forEach((cell) => cell.classList.toggle("now", i >= begin && i < end));
      const line = this.cells.lines[i];
      line.style.display = i < end ? "" : "none";
      if (now) line.style.bottom = `${this.height(now.m_i)}%`;
    });
  }
}

function swatch(stage) {
  const square = make("span", { class: "swatch" });
  square.style.background = `var(--stage-${stage})`;
  return square;
}
