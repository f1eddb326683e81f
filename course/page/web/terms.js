// What the terms of the page mean, folded.

import { make, terms as items } from "./dom.js";

export function mount(element, { terms }) {
  element.append(make("details", {}, make("summary", {}, `${terms.length} terms`),
    make("dl", { class: "terms" }, ...items(Object.fromEntries(terms)))));
}
