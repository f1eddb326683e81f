export function mount(element) {
  element.append("…");
}
