// The online softmax as a player: an example that the reader edits, and the state tile by tile.

import { follow, read, write } from "./address.js";
import { choice, make, show, slider } from "./dom.js";
import { FIRST, LARGEST, MOST_KEYS, SHARPEST, SHOWN, fromAddress, toAddress } from "./example.js";
import { Keys } from "./keys.js";
import { outputs } from "./outputs.js";
import { MISTAKES, exact, sharpened, walk } from "./softmax.js";
import { carried, narration } from "./state.js";

const PAUSE = 1400; // milliseconds between the steps of playing
const BREAKS = {
  "": "nothing: it is right",
  rescale: "forget to rescale acc",
  tail: "forget the tail's mask",
  zero: "start m_i at 0",
};
/** Why a mistake does no harm to an example whose last step is `last`. */
const HARMLESS = {
  rescale: () => "the max does not rise after the first tile, or what it would shrink weighs next to nothing",
  tail: ({ past_end }) => past_end.length
    ? "a score of 0 past the last key weighs next to nothing beside these"
    : "the last tile is full, so that no place lies past the last key",
  zero: () => "the output is the same whatever is subtracted from all scores, unless exp overflows or " +
    "becomes 0, and these scores are not far enough from 0 for that",
};

export function mount(element) {
  let example = structuredClone(FIRST);
  let steps, right, s, timer;

  const buttons = {
    first: button("Start", () => go(0)),
    back: button("Back", () => go(example.step - 1)),
    play: button("Play", () => (timer ? stop() : play())),
    next: button("Step", () => go(example.step + 1)),
    last: button("End", () => go(steps.length)),
  };
  buttons.play.className = "main";
  const place = slider("Step", {
    min: 0, max: 1, value: 0, input: go,
    say: (x) => (x ? `tile ${x - 1}, ${x} of ${steps.length}` : "before the first tile"),
  });
  const said = make("p", { class: "said", "aria-live": "polite" });
  const problems = make("div", { role: "status" });
  const diagnosis = make("div", { "aria-live": "polite" });
  const keys = new Keys(edit, complain);
  const state = make("div", { class: "panel" });
  const result = make("div");

  const tile = slider("Keys per tile", {
    min: 1, max: 1, value: 1, input: (x) => change({ tile: x }),
  });
  const sharp = slider("Sharpness: scores times", {
    min: 0, max: SHARPEST, step: 0.25, value: 1, input: (x) => change({ sharp: x }),
  });
  const broken = choice("Break Online", BREAKS, "", (x) => change({ mistake: x }));
  const add = button("Add a key", () => {
    const { s, v } = example;
    change({ s: [...s, 2], v: [...v, 5] });
  });
  const remove = button("Remove the last key", () => {
    const { s, v, tile } = example;
    change({ s: s.slice(0, -1), v: v.slice(0, -1), tile: Math.min(tile, s.length - 1) });
  });
  const reset = button("Back to the first example", () => change(structuredClone(FIRST)));

  element.append(
    problems,
    make("div", { class: "transport" },
      make("div", { class: "buttons", role: "group", "aria-label": "Player" },
        ...Object.values(buttons)), place.element),
    said,
    make("div", { class: "player" }, make("div", {}, keys.element, result), state),
    make("h3", {}, "Change the example"),
    make("p", { class: "small soft" },
      "Any score and any value above can be edited. The address in your browser always holds the " +
        "example that you see, and what you changed elsewhere on the page: copy it to link to it."),
    make("div", { class: "controls" }, tile.element, sharp.element, broken.element, add, remove, reset),
    diagnosis,
  );

  function edit(name, index, value) {
    const changed = [...example[name]];
    changed[index] = value;
    change({ [name]: changed });
  }

  function complain(...words) {
    problems.replaceChildren(...words.map((each) => make("p", { class: "note" }, each)));
  }

  /** Change the example; what was read of it is read again, or all if nothing was. */
  function change(changes) {
    stop();
    complain();
    const read = steps[example.step - 1]?.stop ?? example.s.length;
    const all = read === example.s.length;
    example = { ...example, ...changes };
    if (!("step" in changes)) example.step = all ? Infinity : Math.ceil(read / example.tile);
    compute();
    save();
  }

  function compute() {
    s = sharpened(example.s, example.sharp);
    const v = example.v.map(Math.fround);
    steps = walk(s, v, example.tile, example.mistake);
    right = example.mistake ? walk(s, v, example.tile) : steps;
    example.step = Math.min(example.step, steps.length);
    keys.build(example, s);
    tile.input.max = example.s.length;
    place.input.max = steps.length;
    tile.set(example.tile);
    sharp.set(example.sharp);
    broken.input.value = example.mistake;
    disable(example.s.length >= MOST_KEYS, add);
    disable(example.s.length <= 1, remove);
    diagnosis.replaceChildren(...diagnose());
    display();
  }

  function go(step) {
    if (timer && step >= steps.length) stop();
    example.step = Math.min(Math.max(step, 0), steps.length);
    display();
    save();
  }

  function display() {
    const { step, v } = example;
    const now = steps[step - 1];
    const truth = now && exact(s.slice(0, now.stop), v.slice(0, now.stop));
    place.set(step);
    disable(step === 0, buttons.first, buttons.back);
    disable(step === steps.length, buttons.next, buttons.last);
    said.textContent = narration(example, now, steps.length);
    keys.display(now, truth);
    state.replaceChildren(...carried(example, steps, s));
    result.replaceChildren(...outputs(example, steps, truth));
  }

  function play() {
    if (example.step === steps.length) go(0);
    buttons.play.textContent = "Pause";
    timer = setInterval(() => go(example.step + 1), PAUSE);
  }

  function stop() {
    clearInterval(timer);
    timer = undefined;
    buttons.play.textContent = "Play";
  }

  function save() {
    write("player", toAddress(example), toAddress(FIRST));
  }

  /** What the mistake is, and whether the example shows it. */
  function diagnose() {
    const { mistake } = example;
    if (!mistake) return [];
    const [o, want] = [steps.at(-1).o, right.at(-1).o];
    const harmless = Math.abs(o - want) <= 1e-5 * (1 + Math.abs(want));
    const says = make("p", {}, "The lab's diagnosis: ", make("strong", {}, MISTAKES[mistake]), ".");
    const here = make("p", {}, harmless
      ? `These scores don’t show it: at the end Online is right all the same, since ${HARMLESS[mistake](steps.at(-1))}. `
      : `After the last tile Online has ${show(o)} in place of ${show(want)}. `);
    const example_of = button("Show an example that does", () =>
      change(structuredClone({ ...SHOWN[mistake], step: 0 })));
    if (harmless) here.append(example_of);
    return [make("div", { class: "note" }, says, here)];
  }

  function fromHash() {
    const values = read("player");
    if (!values) return;
    const found = fromAddress(values);
    complain(...(found.problems.length
      ? [`The address holds no whole example. ${found.problems.join(" ")} What is wrong there is ` +
          "shown as in the first example."]
      : []));
    stop();
    example = found.example;
    compute();
  }

  compute();
  fromHash();
  follow("player", fromHash);
}

function button(text, act) {
  const onclick = ({ currentTarget }) => currentTarget.ariaDisabled === "true" || act();
  return make("button", { type: "button", onclick }, text);
}

/** Disable buttons, or enable them; they keep the focus, which one that is `disabled` would lose. */
function disable(whether, ...buttons) {
  for (const each of buttons) each.setAttribute("aria-disabled", whether);
}
