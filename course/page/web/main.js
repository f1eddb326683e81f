// Starts the page: the theme's button, the list of sections, and each section's module.

import { place } from "./address.js";
import { make } from "./dom.js";
import { start } from "./predict.js";

const root = document.documentElement;
const data = JSON.parse(document.getElementById("data").textContent);
const sections = [...document.querySelectorAll("section[data-module]")];

function startTheme(button) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => button.setAttribute("aria-pressed", isDark());
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    show();
  });
  system.addEventListener("change", show);
  show();
}

startTheme(document.getElementById("theme"));
document.querySelectorAll(".predict").forEach(start);
for (const section of sections) {
  const heading = section.querySelector("h2");
  heading.id = `${section.id}-heading`;
  section.setAttribute("aria-labelledby", heading.id);
  const link = make("a", { href: `#${section.id}` }, section.dataset.short ?? heading.textContent);
  document.querySelector("nav").append(link);
}
for (const section of sections) {
  const mount = section.querySelector(".mount");
  try {
    (await import(section.dataset.module)).mount(mount, data);
  } catch (error) {
    // the other sections work without this one
    mount.append(make("p", { class: "note" }, `This part could not be shown: ${error.message}`));
    console.error(error);
  }
}
root.dataset.ready = "true";
const goTo = (options) => document.getElementById(place())?.scrollIntoView(options);
goTo({ behavior: "instant" }); // what was mounted has moved the section that the address names
addEventListener("hashchange", () => goTo());
