// A question before what answers it: the reader chooses, then sees what is right, and why.

import { make } from "./dom.js";

/** Start a fieldset.predict, whose data-answer is the right button's text. */
export function start(fieldset) {
  const why = fieldset.querySelector(".why");
  const verdict = make("strong");
  why.prepend(verdict, " ");
  const said = make("div", { role: "status" });
  fieldset.append(said);
  for (const button of fieldset.querySelectorAll("button")) {
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      for (const other of fieldset.querySelectorAll("button")) {
        other.setAttribute("aria-pressed", other === button);
      }
      verdict.textContent = button.textContent === fieldset.dataset.answer
        ? "Right." : `It is ${fieldset.dataset.answer}.`;
      why.hidden = false;
      said.append(why); // a change in a status is read out
    });
  }
}
