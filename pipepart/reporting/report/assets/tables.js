/* Makes tables sortable by their headers, and long ones searchable. Without this script they are plain tables. */
"use strict";

(() => {
  const SEARCHABLE = 10; // rows
  const TALL = 20;

  const number = (cell) => (cell.dataset.value === undefined ? NaN : Number(cell.dataset.value));
  const collator = new Intl.Collator("en", { numeric: true });

  /* Rows without a number come last in either order; equal rows keep the order that the report gave them. */
  function compare(column, down) {
    return (one, other) => {
      const [a, b] = [one.cells[column], other.cells[column]];
      const [x, y] = [number(a), number(b)];
      let order;
      if (Number.isNaN(x) && Number.isNaN(y)) order = collator.compare(a.textContent, b.textContent);
      else if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
      else order = x - y;
      return (down ? -order : order) || one.place - other.place;
    };
  }

  function makeSortable(table) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    rows.forEach((row, place) => { row.place = place; });
    const headers = [...table.tHead.rows[0].cells];
    headers.forEach((header, column) => {
      if (header.querySelector(".visually-hidden")) return; // bars sort by the numbers beside them
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      header.append(button);
      const numbers = rows.some((row) => row.cells[column].dataset.value !== undefined);
      button.addEventListener("click", () => {
        const now = header.getAttribute("aria-sort");
        // The most expensive rows first; names from A to Z.
        const down = now === null ? numbers : now === "ascending";
        for (const each of headers) each.removeAttribute("aria-sort");
        header.setAttribute("aria-sort", down ? "descending" : "ascending");
        body.append(...rows.sort(compare(column, down)));
      });
    });
  }

  function makeSearchable(table, place) {
    const rows = [...table.tBodies[0].rows];
    const bar = document.createElement("div");
    bar.className = "table-search screen-only";
    const label = document.createElement("label");
    const input = document.createElement("input");
    const found = document.createElement("span");
    input.type = "search";
    label.append("Search ", input);
    input.setAttribute("aria-label", `Search in: ${table.caption.textContent}`);
    found.setAttribute("role", "status");
    bar.append(label, found);
    place.before(bar);
    const texts = rows.map((row) => row.textContent.toLowerCase());
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, at) => {
        row.hidden = !words.every((word) => texts[at].includes(word));
        shown += row.hidden ? 0 : 1;
      });
      found.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
    });
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const place = table.closest(".scroll");
    const rows = table.tBodies[0].rows.length;
    if (rows >= SEARCHABLE) makeSearchable(table, place);
    if (rows > TALL) place.classList.add("tall");
    makeSortable(table);
  }

  // Who has no mouse scrolls a wide table with the arrow keys. A table that fits is no stop of the Tab key.
  const markScrollable = () => {
    for (const place of document.querySelectorAll(".scroll")) {
      const overflows = place.scrollWidth > place.clientWidth || place.scrollHeight > place.clientHeight;
      if (!overflows) {
        place.removeAttribute("tabindex");
        continue;
      }
      place.tabIndex = 0;
      place.setAttribute("role", "group");
      place.setAttribute("aria-label", place.querySelector("caption")?.textContent ?? "Table");
    }
  };
  markScrollable();
  addEventListener("resize", markScrollable);
  document.addEventListener("toggle", markScrollable, true);
})();
