/* A chart with one row for each device on the axis of time: its sizes, the names of its rows, and its axis. */
"use strict";

pipepart.TimeChart = class {
  static AXIS = 22; // pixels below the rows
  static TOP = 3; // pixels above them

  /* `heights`: pairs of a number of rows and the height of a row, in pixels, for up to so many. */
  constructor(canvas, names, heights) {
    this.canvas = canvas;
    this.names = names;
    this.row = heights.find(([most]) => names.length <= most)[1];
  }

  /* Sizes in pixels of the page. */
  layout() {
    const { row, names } = this;
    const width = this.canvas.parentElement.clientWidth;
    const widest = Math.max(0, ...names.map((name) => this.pen.measureText(name).width));
    const left = Math.ceil(Math.min(widest + 10, 200, width * 0.25));
    const plot = Math.max(40, width - left - 8);
    const height = pipepart.TimeChart.TOP + names.length * row + pipepart.TimeChart.AXIS;
    return { rows: names.length, row, gap: row > 12 ? 3 : 1, left, plot, width, height };
  }

  /* Where a moment lies, in pixels from the chart's left edge. */
  x(seconds) {
    const { from, to } = pipepart.axis;
    return this.size.left + ((seconds - from) / (to - from)) * this.size.plot;
  }

  /* Where a row begins, in pixels from the chart's upper edge. */
  top(row) {
    return pipepart.TimeChart.TOP + row * this.row;
  }

  draw() {
    const { canvas } = this;
    this.pen = canvas.getContext("2d");
    this.pen.font = "12px system-ui, sans-serif";
    const size = (this.size = this.layout());
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = `${size.height}px`;
    canvas.width = Math.round(size.width * scale);
    canvas.height = Math.round(size.height * scale);
    const { pen } = this;
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.colours = Object.fromEntries(
      ["card", "text", "muted", "line", "soft", "bad"].map((name) => [name, pipepart.colour(name)]),
    );
    this.drawNames();
    this.drawAxis();
    pen.save();
    pen.beginPath();
    pen.rect(size.left, 0, size.plot, size.height);
    pen.clip();
    this.drawRows();
    pen.restore();
  }

  drawNames() {
    const { pen, size, names } = this;
    pen.fillStyle = this.colours.muted;
    const every = Math.ceil(13 / size.row);
    for (let row = 0; row < size.rows; row += every) {
      pen.fillText(this.fitted(names[row], size.left - 8), 0, this.top(row) + (size.row - size.gap) / 2 + 0.5);
    }
  }

  /* A name, without its middle where it is too long. */
  fitted(name, width) {
    const { pen } = this;
    if (pen.measureText(name).width <= width) return name;
    for (let kept = name.length - 1; kept > 1; kept -= 1) {
      const shorter = `${name.slice(0, Math.ceil(kept / 2))}…${name.slice(name.length - Math.floor(kept / 2))}`;
      if (pen.measureText(shorter).width <= width) return shorter;
    }
    return "…";
  }

  drawAxis() {
    const { pen, size, colours } = this;
    const bottom = this.top(size.rows);
    const { moments, step } = pipepart.axis.ticks(Math.max(2, Math.floor(size.plot / 110)));
    pen.fillStyle = colours.muted;
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    for (const moment of moments) {
      const x = Math.round(this.x(moment)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, this.top(0));
      pen.lineTo(x, bottom + 4);
      pen.stroke();
      const label = pipepart.axis.text(moment, step);
      const half = pen.measureText(label).width / 2;
      const middle = Math.min(Math.max(x, size.left + half), size.left + size.plot - half);
      pen.fillText(label, middle - half, bottom + 13);
    }
  }

  /* The row and the moment at a place of the canvas; null outside the rows. */
  at(x, y) {
    const { size } = this;
    const row = Math.floor((y - pipepart.TimeChart.TOP) / size.row);
    if (row < 0 || row >= size.rows || x < size.left || x > size.left + size.plot) return null;
    const { from, to } = pipepart.axis;
    return { row, seconds: from + ((x - size.left) / size.plot) * (to - from) };
  }
};
