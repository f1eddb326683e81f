// What the terms of the page mean, folded.

import { make } from "./dom.js";

export function mount(element, { terms }) {
  element.append(make("details", {}, make("summary", {}, `${terms.length} terms`),
    make("dl", { class: "terms" }, ...terms.map(([term, words]) =>
      make("div", {}, make("dt", {}, term), make("dd", {}, words))))));
}
