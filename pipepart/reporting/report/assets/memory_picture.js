/* Draws the memory of each device over the step on a canvas: a stack of categories, and the limit as a dashed line. */
"use strict";

pipepart.MemoryPicture = class extends pipepart.TimeChart {
  static FAR = 3; // times the peak; a limit that is farther away is not drawn

  /* `number`: of the run in the section's columns. */
  constructor(canvas, number, data, columns, span) {
    super(canvas, data.devices, [[4, 84], [8, 56], [16, 36], [32, 26], [Infinity, 18]]);
    Object.assign(this, data);
    this.start = columns[`${number}.at`];
    this.second = span / (2 ** 32 - 1); // seconds of a tick
    this.bytes = data.categories.map(({ name }) => columns[`${number}.${name}`]);
    this.total = new Float64Array(this.start.length);
    for (const column of this.bytes) for (let at = 0; at < column.length; at += 1) this.total[at] += column[at];
    const peak = this.total.reduce((most, each) => Math.max(most, each), 0);
    const measured = Math.max(0, ...(this.peaks ?? []));
    const near = this.limits.filter((limit) => limit !== null && limit <= peak * pipepart.MemoryPicture.FAR);
    this.scale = Math.max(peak * 1.08, measured * 1.08, ...near.map((limit) => limit * 1.04), 1);
  }

  drawRows() {
    const { pen, size, colours } = this;
    const height = size.row - size.gap;
    this.fills = this.categories.map(({ colour }) => pipepart.colour(colour));
    for (let device = 0; device < size.rows; device += 1) {
      const top = this.top(device);
      pen.fillStyle = colours.soft;
      const until = Math.min(this.x(this.makespan), size.left + size.plot);
      if (until > size.left) pen.fillRect(size.left, top, until - size.left, height);
      this.drawStack(device, top, height);
      this.drawLevel(this.limits[device], top, height, colours.bad, [5, 4]);
      if (this.peaks) this.drawLevel(this.peaks[device], top, height, colours.text, []);
    }
  }

  /* Of a device, the last row that holds at a moment. */
  rowAt(device, seconds) {
    const tick = seconds / this.second;
    let low = this.offsets[device];
    let high = this.offsets[device + 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.start[middle] <= tick) low = middle;
      else high = middle;
    }
    return low;
  }

  /* For each pixel the row with the largest total that holds within it, so that no peak is lost. */
  columnsOf(device) {
    const { size } = this;
    const { from, to } = pipepart.axis;
    const columns = new Int32Array(Math.ceil(size.plot)).fill(-1);
    const perSecond = size.plot / (to - from);
    const last = this.offsets[device + 1];
    for (let row = this.rowAt(device, from); row < last; row += 1) {
      const begin = this.start[row] * this.second;
      if (begin > to) break;
      const end = row + 1 < last ? this.start[row + 1] * this.second : this.makespan;
      const first = Math.max(0, Math.floor((begin - from) * perSecond));
      const until = Math.min(columns.length, Math.max(first + 1, Math.ceil((end - from) * perSecond)));
      for (let column = first; column < until; column += 1) {
        if (columns[column] < 0 || this.total[row] > this.total[columns[column]]) columns[column] = row;
      }
    }
    return columns;
  }

  drawStack(device, top, height) {
    const { pen, size } = this;
    const columns = this.columnsOf(device);
    const below = new Float64Array(columns.length);
    for (const [at, bytes] of this.bytes.entries()) {
      pen.fillStyle = this.fills[at];
      pen.beginPath();
      let first = 0;
      for (let column = 0; column < columns.length; column = first) {
        const row = columns[column];
        const value = row < 0 ? 0 : bytes[row];
        const base = below[column];
        // Neighbours of equal height are one rectangle.
        for (first = column + 1; first < columns.length; first += 1) {
          const other = columns[first];
          if (below[first] !== base || (other < 0 ? 0 : bytes[other]) !== value) break;
        }
        if (!value) continue;
        const [low, high] = [base, base + value].map((each) => top + height * (1 - each / this.scale));
        pen.rect(size.left + column, high, first - column, low - high);
      }
      pen.fill();
      for (let column = 0; column < columns.length; column += 1) if (columns[column] >= 0) below[column] += bytes[columns[column]];
    }
  }

  /* A line at a number of bytes, unless that is unknown or above the scale. */
  drawLevel(level, top, height, colour, dashes) {
    if (level === null || level > this.scale) return;
    const { pen, size } = this;
    const y = Math.round(top + height * (1 - level / this.scale)) + 0.5;
    pen.strokeStyle = colour;
    pen.lineWidth = 1.5;
    pen.setLineDash(dashes);
    pen.beginPath();
    pen.moveTo(size.left, y);
    pen.lineTo(size.left + size.plot, y);
    pen.stroke();
    pen.setLineDash([]);
  }

  /* What the rows show, in words. */
  get scaleText() {
    const far = this.limits.filter((limit) => limit !== null && limit > this.scale);
    const above = far.length ? `; limits from ${pipepart.bytesText(Math.min(...far))} on are above that` : "";
    return `each row from 0 to ${pipepart.bytesText(this.scale)}${above}`;
  }

  /* The lines of the tooltip for a device at a moment. */
  lines({ row: device, seconds }) {
    const { text } = pipepart.axis;
    const bytes = pipepart.bytesText;
    const row = this.rowAt(device, seconds);
    const own = this.total.subarray(this.offsets[device], this.offsets[device + 1]);
    const limit = this.limits[device];
    return [
      `${this.devices[device]} from ${text(this.start[row] * this.second)}: ${bytes(this.total[row])}`,
      ...this.categories.map(({ name }, at) => [name, this.bytes[at][row]]).filter(([, size]) => size).reverse().map(([name, size]) => `  ${name} ${bytes(size)}`),
      ...(this.peaks?.[device] ? [`measured peak ${bytes(this.peaks[device])}`] : []),
      `peak ${bytes(own.reduce((most, each) => Math.max(most, each), 0))}` + (limit === null ? ", no limit" : `, limit ${bytes(limit)}`),
    ];
  }
};
