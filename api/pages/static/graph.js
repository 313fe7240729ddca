// Interactive pictures of the graph of causes: a hovered or focused entry highlights its arrows, and buttons zoom.
// Used by the pages of the service and by the documentation site.
"use strict";

const SMALLEST = 0.3, LARGEST = 4; // scale relative to the drawn size

function point(target) {
  for (const svg of document.querySelectorAll("svg.pointed")) {
    svg.classList.remove("pointed");
    for (const part of svg.querySelectorAll(".on")) part.classList.remove("on");
  }
  const node = target instanceof Element ? target.closest(".graph a[data-id]") : null;
  if (!node) return;
  const svg = node.closest("svg");
  const ids = new Set([node.dataset.id]);
  for (const path of svg.querySelectorAll("path[data-from]")) {
    if (path.dataset.from !== node.dataset.id && path.dataset.to !== node.dataset.id) continue;
    path.classList.add("on");
    ids.add(path.dataset.from).add(path.dataset.to);
  }
  for (const other of svg.querySelectorAll("a[data-id]")) other.classList.toggle("on", ids.has(other.dataset.id));
  svg.classList.add("pointed");
}

// A `factor` of 0 fits the picture into its box.
function zoom(svg, factor) {
  const drawn = svg.viewBox.baseVal.width;
  const width = Math.min(LARGEST * drawn, Math.max(SMALLEST * drawn, svg.getBoundingClientRect().width * factor));
  svg.style.maxWidth = factor ? "none" : "";
  svg.style.width = factor ? `${width}px` : "";
}

document.addEventListener("pointerover", (event) => point(event.target));
document.addEventListener("focusin", (event) => point(event.target));
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-zoom]");
  const svg = button && document.querySelector(".map svg");
  if (svg) zoom(svg, Number(button.dataset.zoom));
});
