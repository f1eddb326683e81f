// A small line plot with a cursor that can be dragged.

import { make, show } from "./dom.js";
import { nice } from "./outputs.js";

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [460, 250, 44, 22, 14, 30];

/** `x`: [least, most]; `say` writes a tick; `drag(x)` is called while the reader drags. */
export function plot({ title, x: [least, most], ticks, say = String, drag }) {
  const content = make("g");
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "plot", "aria-hidden": "true" }, content);
  const across = (x) => LEFT + ((WIDTH - LEFT - RIGHT) * (x - least)) / (most - least);
  const move = (event) => {
    if (event.type === "pointermove" && !event.buttons) return;
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) * WIDTH) / box.width;
    const x = least + ((at - LEFT) * (most - least)) / (WIDTH - LEFT - RIGHT);
    drag(Math.min(Math.max(x, least), most));
  };
  svg.addEventListener("pointerdown", (event) => {
    svg.setPointerCapture(event.pointerId);
    move(event);
  });
  svg.addEventListener("pointermove", move);

  /** Draw a line through points [x, y], with the cursor at x. */
  function display(points, cursor) {
    const top = Math.max(...points.map(([, y]) => y), 1e-9);
    const high = (y) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * y) / (1.08 * top);
    const [, here] = points.reduce((a, b) => (Math.abs(a[0] - cursor) <= Math.abs(b[0] - cursor) ? a : b));
    content.replaceChildren(
      ...nice(0, top).flatMap((y) => [
        make("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: high(y), y2: high(y) }),
        make("text", { class: "soft", x: LEFT - 8, y: high(y) + 4, "text-anchor": "end" }, show(y)),
      ]),
      ...ticks.map((x) => make("text",
        { class: "soft", x: across(x), y: HEIGHT - 8, "text-anchor": "middle" }, say(x))),
      make("line", { class: "cursor", x1: across(cursor), x2: across(cursor), y1: TOP, y2: HEIGHT - BOTTOM }),
      make("polyline", { class: "lite", points: points.map(([x, y]) => `${across(x)},${high(y)}`).join(" ") }),
      make("rect", { class: "lite-mark", x: across(cursor) - 6, y: high(here) - 6, width: 12, height: 12 }),
    );
  }
  return { element: make("div", {}, make("h3", {}, title), svg), display };
}
