/* Sorts tables, zooms timelines, and opens what is folded when the page is printed. The page is complete without it. */
"use strict";

/* Tables: a button in each header sorts by its column, the largest numbers first, and then the other way round. */
const collator = new Intl.Collator("en", { numeric: true });

/* What a cell sorts by: its value, a number of its text, or its text. */
const keyOf = (cell) => {
  const text = cell.dataset.value ?? cell.textContent;
  return text === "" || Number.isNaN(Number(text)) ? text : Number(text);
};

function compare(one, other) {
  if (typeof one === "number" && typeof other === "number") return one - other;
  if (typeof one === "number" || typeof other === "number") return typeof one === "number" ? 1 : -1;
  return collator.compare(one, other);
}

for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    if (!header.textContent) return; // bars sort by the numbers beside them
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const rows = [...body.rows].map((row) => [keyOf(row.cells[column]), row]);
      const numbers = rows.some(([key]) => typeof key === "number");
      const before = header.getAttribute("aria-sort");
      const down = before === null ? numbers : before === "ascending";
      for (const each of headers) each.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      rows.sort(([one], [other]) => (down ? compare(other, one) : compare(one, other)));
      body.append(...rows.map(([, row]) => row));
    });
  });
}

/* Timelines: a zoom makes all pictures wider; they scroll together, so that they show the same time. */
const LEVELS = [2, 4, 8, 16, 32, 64]; // of labels, by the width that a picture needs for them, in units of
const LEVEL_WIDTH = 500; // pixels
const MOST_ZOOM = 32;
const views = [...document.querySelectorAll(".zooms")];
let zoom = 1;

function resize() {
  for (const view of views) {
    const picture = view.firstElementChild;
    picture.style.width = `${100 * zoom}%`;
    for (const level of LEVELS) {
      picture.classList.toggle(`shows-${level}`, picture.clientWidth >= LEVEL_WIDTH * level);
    }
  }
}

/* Zoom by a factor, 0 for the whole step. `at`: the place in the view that keeps its time, from 0 to 1. */
function zoomBy(factor, at = 0.5) {
  const [{ scrollLeft, clientWidth, scrollWidth }] = views;
  const kept = (scrollLeft + at * clientWidth) / scrollWidth;
  zoom = Math.min(Math.max(zoom * factor, 1), MOST_ZOOM);
  resize();
  for (const view of views) view.scrollLeft = kept * view.scrollWidth - at * view.clientWidth;
}

for (const view of views) {
  view.addEventListener("scroll", () => {
    for (const other of views) other.scrollLeft = view.scrollLeft;
  });
  view.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page or the picture scrolls
      event.preventDefault();
      const { left, width } = view.getBoundingClientRect();
      zoomBy(Math.exp(-event.deltaY / 300), (event.clientX - left) / width);
    },
    { passive: false },
  );
}
for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => zoomBy(Number(button.dataset.zoom)));
}
addEventListener("resize", resize);
resize();

addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
});
document.documentElement.dataset.ready = "true";
