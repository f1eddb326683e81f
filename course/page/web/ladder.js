// The stages in a few words each, before the records.

import { make } from "./dom.js";

const PEERS_FROM = 100;

export function mount(element, { stages }) {
  const ours = stages.filter(({ number }) => number < PEERS_FROM);
  element.append(make("dl", { class: "stages" }, ...ours.map(({ number, title, idea }) =>
    make("div", {},
      make("dt", {}, make("span", { class: "swatch", style: `background:var(--stage-${number})` }), `${number} ${title}`),
      make("dd", {}, idea)))));
}
