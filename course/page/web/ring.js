// Stage 10's ring of GPUs over time: what each rank computes, sends and merges, by the cost model.

import { kept } from "./address.js";
import { choice, make, show, slider } from "./dom.js";
import { drawn } from "./lanes.js";
import { alone, schedule, seconds, total } from "./ring_cost.js";

const LIMITS = { // N = 2^n
  world: [4, 2, 8], n: [16, 12, 20], causal: [1, 0, 1], zigzag: [0, 0, 1], overlap: [1, 0, 1], link: [0, 0, 1],
};
const CHOICES = {
  causal: ["Mask", { 1: "causal", 0: "none" }],
  zigzag: ["Parts of the text", { 0: "in order", 1: "zigzag" }],
  overlap: ["A hop sends", { 1: "while it computes", 0: "before it computes" }],
};
const KINDS = {
  compute: ["computes", "computes"], merge: ["merges", "merges with what it has"], send: ["sends", "sends K and V on"],
};

export function mount(element, { ring }) {
  if (!ring) {
    element.append(make("p", { class: "note" }, "This copy of the ladder has no stage 10."));
    return;
  }
  const { state, change } = kept("ring", LIMITS, display);
  const world = slider("GPUs", { min: 2, max: 8, value: state.world, input: (x) => change({ world: x }) });
  const keys = slider("Keys and queries N", {
    min: 12, max: 20, value: state.n, say: (x) => (2 ** x).toLocaleString("en"), input: (x) => change({ n: x }),
  });
  const links = Object.fromEntries(ring.links.map(({ name, link }, i) => [i, `${name}, ${link / 1e9} GB/s`]));
  const choices = Object.entries({ ...CHOICES, link: ["Link", links] }).map(([name, [label, options]]) =>
    [name, choice(label, options, state[name], (x) => change({ [name]: Number(x) }))]);
  const said = make("p", { "aria-live": "polite" });
  const figures = make("dl", { class: "figures" });
  const picture = make("div");
  const { heads } = ring;
  const latencies = ring.links.map(({ name, latency }) => `${Math.round(1e6 * latency)} us by ${name}`);
  element.append(
    make("div", { class: "controls" }, world.element, keys.element, ...choices.map(([, each]) => each.element)),
    said, figures,
    make("ul", { class: "legend" }, ...Object.values(KINDS).map(([kind, words]) =>
      make("li", {}, make("span", { class: `swatch ${kind}` }), words))),
    picture,
    make("p", { class: "small soft" },
      `Not measured: a cost model (docs/ring.md) of the forward pass, with ${heads.h} heads, d = ${heads.d} and bfloat16. ` +
        `Assumed: ${ring.rate / 1e12} TFLOP/s, and for a message ${latencies.join(", ")}. ` +
        "NVLink joins the GPUs of one host, a network those of several. All ranks meet after each exchange."));

  function display() {
    world.set(state.world);
    keys.set(state.n);
    for (const [name, each] of choices) each.input.value = state[name];
    const problem = { ...heads, ...state, keys: 2 ** state.n };
    const machine = { ...ring, ...ring.links[state.link] };
    const ranks = schedule(problem, machine);
    const instead = (changes) => seconds(schedule({ ...problem, ...changes }, machine));
    said.textContent = `${whoWaits(problem, ranks, instead)} ${whatIsHidden(problem, ranks, instead)}`;
    const [end, one] = [seconds(ranks), alone(problem, machine)];
    const busy = ranks.reduce((sum, spans) => sum + total(spans, "compute", "merge"), 0);
    figures.replaceChildren(...Object.entries({
      "a call takes": ms(end),
      "one GPU with the whole sequence": ms(one),
      [`times as fast, with ${state.world} GPUs`]: show(one / end, 2),
      "of its time a GPU waits, on average": `${Math.round(100 * (1 - busy / (state.world * end)))}%`,
    }).flatMap(([words, x]) => [make("div", {}, make("dt", {}, words), make("dd", {}, x))]));
    const lanes = ranks.map((spans, rank) => ({
      name: `rank ${rank}`,
      bars: spans.map(({ what, start, end }) => ({ kind: KINDS[what][0], start, end, row: Number(what === "send") })),
    }));
    picture.replaceChildren(drawn(lanes, end, ["ms", 1e3]));
  }

  display();
}

const ms = (x) => `${show(1e3 * x, 2)}\u00a0ms`;

/** Which rank waits for another one, and why. */
function whoWaits({ causal, zigzag, world }, ranks, instead) {
  if (!causal) return "Without a mask each rank sees all keys: all compute for the same time, in order or in zigzag.";
  if (zigzag) {
    return "Each rank has an early and a late part of the text: all compute for the same time at each hop, and " +
      `none waits for another. In order a call takes ${ms(instead({ zigzag: 0 }))}.`;
  }
  return `Rank 0 has the first part of the text, and sees no other keys: it computes for ${ms(total(ranks[0], "compute"))}, ` +
    `then waits for rank ${world - 1}, which has something to compute at every hop. In zigzag a call takes ` +
    `${ms(instead({ zigzag: 1 }))}.`;
}

/** Whether the slowest rank, the last one, waits for keys. */
function whatIsHidden({ overlap }, ranks, instead) {
  const end = seconds(ranks);
  const waits = end - total(ranks.at(-1), "compute", "merge");
  const send = ranks[0].find(({ what }) => what === "send");
  const sends = `${ms(send.end - send.start)} a hop`;
  if (!overlap) {
    return `Each hop sends first, for ${sends}, and so every rank waits for ${ms(waits)} of ${ms(end)}. With overlap ` +
      `a call takes ${ms(instead({ overlap: 1 }))}.`;
  }
  if (waits < 1e-9 * end) { // all of it rounding
    return `What is sent, ${sends}, is hidden behind what the slowest rank computes meanwhile: without overlap ` +
      `a call takes ${ms(instead({ overlap: 0 }))}.`;
  }
  return `To send takes ${sends}, at times longer than to compute, and so every rank waits for keys, for ${ms(waits)} of ` +
    `${ms(end)}. Computing grows with the square of N, sending with N: more keys would hide it.`;
}
