/* Chooses the view of a layer graph, zooms it and moves it. */
"use strict";

(() => {
  /* A picture that shows a part of itself: its view box moves over it. */
  class View {
    constructor(svg) {
      const { x, y, width, height } = svg.viewBox.baseVal;
      this.svg = svg;
      this.whole = { x, y, width, height };
      this.part = { ...this.whole };
      svg.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
        event.preventDefault();
        this.zoom(Math.exp(-event.deltaY / 300), event);
      }, { passive: false });
      svg.addEventListener("pointerdown", (event) => this.grab(event));
    }

    show() {
      const { x, y, width, height } = this.part;
      this.svg.setAttribute("viewBox", `${x} ${y} ${width} ${height}`);
    }

    /* Pixels of the picture for one pixel of the screen. */
    get scale() {
      const box = this.svg.getBoundingClientRect();
      return Math.max(this.part.width / box.width, this.part.height / box.height) || 1;
    }

    zoom(factor, at) {
      const { part, whole } = this;
      const by = Math.min(Math.max(factor, part.width / (2 * whole.width)), part.width / 60);
      const box = this.svg.getBoundingClientRect();
      const u = at ? (at.clientX - box.left) / box.width : 0.5;
      const v = at ? (at.clientY - box.top) / box.height : 0.5;
      part.x += u * part.width * (1 - 1 / by);
      part.y += v * part.height * (1 - 1 / by);
      part.width /= by;
      part.height /= by;
      this.show();
    }

    move(dx, dy) {
      const { scale } = this;
      this.part.x -= dx * scale;
      this.part.y -= dy * scale;
      this.show();
    }

    fit() {
      this.part = { ...this.whole };
      this.show();
    }

    grab(event) {
      if (event.button !== 0 || event.pointerType === "touch") return;
      let last = event;
      const drag = (moved) => {
        this.move(moved.clientX - last.clientX, moved.clientY - last.clientY);
        last = moved;
      };
      this.svg.setPointerCapture(event.pointerId);
      this.svg.classList.add("moving");
      this.svg.addEventListener("pointermove", drag);
      this.svg.addEventListener("pointerup", () => {
        this.svg.classList.remove("moving");
        this.svg.removeEventListener("pointermove", drag);
      }, { once: true });
    }
  }

  const MOVES = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };

  for (const graph of document.querySelectorAll(".graph")) {
    const views = new Map();
    for (const svg of graph.querySelectorAll("svg[data-picture]")) views.set(svg.dataset.picture, new View(svg));
    let current = views.get(graph.dataset.first);
    for (const button of graph.querySelectorAll("[data-view]")) {
      button.addEventListener("click", () => {
        current = views.get(button.dataset.view);
        for (const view of views.values()) view.svg.toggleAttribute("hidden", view !== current);
        for (const each of graph.querySelectorAll("[data-view]")) {
          each.setAttribute("aria-pressed", String(each === button));
        }
      });
    }
    for (const button of graph.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => {
        if (button.dataset.zoom === "fit") current.fit();
        else current.zoom(Number(button.dataset.zoom));
      });
      button.addEventListener("keydown", (event) => {
        if (!MOVES[event.key]) return;
        event.preventDefault();
        current.move(...MOVES[event.key]);
      });
    }
  }
})();
