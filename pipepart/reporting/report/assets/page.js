/* What every section needs: its data, the theme, printing, and one start when the page is there. */
"use strict";

const pipepart = (() => {
  const scripts = new Map();
  const redraws = new Set();
  const root = document.documentElement;

  /* Register the script of a section: a function of its element, its data and its columns. */
  function section(key, script) {
    scripts.set(key, script);
  }

  /* Call a function whenever colours or sizes change: theme, window, print. */
  function onRedraw(draw) {
    redraws.add(draw);
  }

  function redraw() {
    for (const draw of redraws) draw();
  }

  /* The value of a colour variable, for charts on a canvas. */
  function colour(name) {
    return getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  }

  async function columnsOf(element) {
    const script = element.querySelector("script.columns");
    if (!script) return {};
    const { layout, block } = JSON.parse(script.textContent);
    const packed = Uint8Array.from(atob(block), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = await new Response(stream).arrayBuffer();
    const columns = {};
    for (const [name, [type, at, size]] of Object.entries(layout)) {
      columns[name] = new globalThis[type](bytes, at, size);
    }
    return columns;
  }

  /* What the script of a section is called with, or null if the page has no such section. */
  async function partsOf(key) {
    const element = document.getElementById(key);
    if (!element) return null;
    const data = element.querySelector("script.data");
    return [element, data ? JSON.parse(data.textContent) : null, await columnsOf(element)];
  }

  const THEMES = ["system", "light", "dark"];

  function startTheme() {
    const button = document.getElementById("theme");
    const show = () => {
      const theme = root.dataset.theme || "system";
      button.textContent = `Theme: ${theme}`;
    };
    button.addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(root.dataset.theme || "system") + 1) % THEMES.length];
      if (next === "system") delete root.dataset.theme;
      else root.dataset.theme = next;
      show();
      redraw();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    show();
  }

  /* On paper the page is light, and what is folded is open. */
  function startPrinting() {
    let before = null;
    addEventListener("beforeprint", () => {
      const folded = [...document.querySelectorAll("details:not([open])")].filter((each) => !each.dataset.screenOnly);
      before = { theme: root.dataset.theme, folded };
      root.dataset.theme = "light";
      for (const each of folded) each.open = true;
      redraw();
    });
    addEventListener("afterprint", () => {
      if (!before) return;
      if (before.theme) root.dataset.theme = before.theme;
      else delete root.dataset.theme;
      for (const each of before.folded) each.open = false;
      before = null;
      redraw();
    });
  }

  /* Start all sections; then the page's `data-ready` says so. */
  async function start() {
    startTheme();
    startPrinting();
    addEventListener("resize", redraw);
    // Columns are unpacked at once. Scripts start in the order of the page: timelines set the axis that memory draws on.
    const parts = await Promise.all([...scripts.keys()].map(partsOf));
    [...scripts.values()].forEach((script, at) => parts[at] && script(...parts[at]));
    root.dataset.ready = "true";
  }

  return { section, onRedraw, colour, start };
})();
