/* The tooltip of the page: lines of text beside a place of a chart, or the `data-tip` of what is under the pointer. */
"use strict";

pipepart.tip = (() => {
  const element = document.createElement("div");
  element.className = "tip";
  element.hidden = true;
  element.setAttribute("aria-hidden", "true"); // the tables say the same
  document.body.append(element);

  /* Show lines of text beside a place of the window, in pixels. */
  function show(lines, x, y) {
    element.replaceChildren(
      ...lines.map((line) => {
        const row = document.createElement("div");
        row.textContent = line;
        return row;
      }),
    );
    element.hidden = false;
    const { width, height } = element.getBoundingClientRect();
    const left = Math.min(x + 14, document.documentElement.clientWidth - width - 4);
    element.style.left = `${Math.max(4, left)}px`;
    element.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18}px`;
  }

  function hide() {
    element.hidden = true;
  }

  let owned = false; // by an element with data-tip
  document.addEventListener("pointermove", (event) => {
    const owner = event.target.closest?.("[data-tip]");
    if (owner) show(owner.dataset.tip.split("\n"), event.clientX, event.clientY);
    else if (owned) hide();
    owned = Boolean(owner);
  });

  return { show, hide };
})();
