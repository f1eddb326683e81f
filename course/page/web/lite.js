// Where Lite breaks: its error against the number of keys and against how sharp the scores are.

import { kept } from "./address.js";
import { make, show, slider, terms } from "./dom.js";
import { draw, liteErrors, onlineError } from "./errors.js";
import { plot } from "./plot.js";
import { sharpened, walk } from "./softmax.js";

const [TILE, MOST, ROWS] = [64, 320, 64];
const LIMITS = { n: [65, 1, MOST], sharp: [0, -2, 2, () => true] }; // the sharpness is 10^sharp
const SHARPNESS = Array.from({ length: 41 }, (_, i) => -2 + i / 10);

export function mount(element) {
  const { state, change } = kept("lite", LIMITS, display);
  const drawn = draw(ROWS, MOST);
  const errorsBy = SHARPNESS.map((x) => [x, liteErrors(drawn, 10 ** x, TILE, MOST)]);
  const n = slider("Keys N", { min: 1, max: MOST, value: state.n, input: (x) => change({ n: x }) });
  const sharp = slider("Sharpness: the scores’ standard deviation", {
    min: -2, max: 2, step: 0.1, value: state.sharp, say: (x) => show(10 ** x, 2),
    input: (x) => change({ sharp: x }),
  });
  const by_n = plot({
    title: "Lite’s error against N", x: [1, MOST], ticks: [1, 64, 128, 192, 256, 320],
    drag: (x) => change({ n: Math.round(x) }),
  });
  const by_sharp = plot({
    title: "Lite’s error against sharpness", x: [-2, 2], ticks: [-2, -1, 0, 1, 2],
    say: (x) => String(10 ** x), drag: (x) => change({ sharp: Math.round(10 * x) / 10 }),
  });
  const figures = make("dl", { class: "figures" });
  const said = make("p", { "aria-live": "polite" });
  element.append(
    make("div", { class: "controls" }, n.element, sharp.element), said, figures,
    make("div", { class: "two" }, by_n.element, by_sharp.element),
    make("p", { class: "small soft" },
      `Errors are the root mean square over ${ROWS} query rows, against softmax over all keys in float64. ` +
        "Scores and values are drawn from N(0, 1), and the scores are multiplied by the sharpness. Drag in " +
        "a plot, or use the sliders."),
  );

  function display() {
    n.set(state.n);
    sharp.set(state.sharp);
    const by = 10 ** state.sharp;
    const errors = liteErrors(drawn, by, TILE, MOST);
    by_n.display([...errors].map((y, i) => [i + 1, y]), state.n);
    by_sharp.display(errorsBy.map(([x, all]) => [x, all[state.n - 1]]), state.sharp);
    // the first row's last key, as Online and as Lite weigh it
    const last = walk(sharpened(drawn.scores[0].slice(0, state.n), by), drawn.values[0], TILE).at(-1);
    figures.replaceChildren(...terms({
      "what Lite’s weights sum to, the number of tiles": Math.ceil(state.n / TILE),
      [`Lite’s weight of the last key, number ${state.n}`]: show(last.lite_p.at(-1), 4),
      "its right weight": show(last.p.at(-1) / last.l_i, 4),
      "Lite’s error": show(errors[state.n - 1] < 1e-12 ? 0 : errors[state.n - 1]),
      "Online’s, in float32": show(onlineError(drawn, by, TILE, state.n)),
    }));
    said.textContent = sentence(state.n);
  }

  display();
}

function sentence(n) {
  const tiles = Math.ceil(n / TILE);
  const alone = n - (tiles - 1) * TILE;
  if (tiles === 1) return `One tile holds ${n === 1 ? "the only key" : `all ${n} keys`}: Lite is right.`;
  if (n === TILE + 1) {
    return "2 tiles: the 65th key is alone in the second, so its weight is 1 whatever its score. " +
      "Sharpness changes nothing here; with more keys it does.";
  }
  const keys = alone === 1
    ? "one key, whose weight is 1 whatever its score" : `${alone} keys, whose weights sum to 1`;
  return `${tiles} tiles: the last one has ${keys}.`;
}
