/* Draws one timeline on a canvas: boxes of actions, or the share of each kind where boxes are too narrow to see. */
"use strict";

pipepart.TimelinePicture = class extends pipepart.TimeChart {
  static BOX = 3; // pixels that actions need on average to be drawn as boxes
  static COLUMN = 6; // actions that a column of shares has at least, so that no pattern of single ones shows
  static MOST_ARROWS = 1500;

  constructor(canvas, actions) {
    super(canvas, actions.devices, [[8, 26], [16, 20], [32, 14], [Infinity, 10]]);
    this.actions = actions;
    this.hovered = -1;
    this.arrows = false;
  }

  drawRows() {
    for (let device = 0; device < this.size.rows; device += 1) this.drawRow(device);
    this.drawEnd();
    if (this.arrows) this.drawArrows(this.inputsInView());
    if (this.hovered >= 0) this.drawHovered();
  }

  drawRow(device) {
    const { pen, size, actions, colours } = this;
    const { from, to } = pipepart.axis;
    const top = this.top(device);
    const height = size.row - size.gap;
    pen.fillStyle = colours.soft;
    const until = Math.min(this.x(actions.makespan), size.left + size.plot);
    if (until > size.left) pen.fillRect(size.left, top, until - size.left, height);
    const first = actions.firstAfter(device, from);
    const last = Math.min(actions.firstAfter(device, to) + 1, actions.offsets[device + 1]);
    if ((last - first) * pipepart.TimelinePicture.BOX > size.plot) this.drawShares(first, last, top, height);
    else for (let action = first; action < last; action += 1) this.drawBox(action, top, height);
  }

  fillOf(action) {
    const kind = this.actions.kinds.get(this.actions.code[action]);
    return this.actions.chunk[this.actions.stage[action]] ? kind.dark : kind.light;
  }

  drawBox(action, top, height) {
    const { pen, actions } = this;
    const left = this.x(actions.startOf(action));
    const width = Math.max(this.x(actions.endOf(action)) - left, 0.5);
    const shown = width > 4 ? width - 1 : width;
    pen.fillStyle = this.fillOf(action);
    pen.fillRect(left, top, shown, height);
    const part = actions.micro_batch[action];
    const [first, last] = [Math.max(left, this.size.left), Math.min(left + shown, this.size.left + this.size.plot)];
    if (part >= 0 && height >= 11 && last - first > 7 * String(part).length + 3) {
      pen.fillStyle = actions.chunk[actions.stage[action]] ? "#ffffff" : "#1f2328";
      pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "center";
      pen.fillText(String(part), (first + last) / 2, top + height / 2 + 0.5);
      pen.textAlign = "start";
    }
  }

  /* In each column of pixels the share of each kind, from the bottom up; what is left is idle. */
  drawShares(first, last, top, height) {
    const { actions, size } = this;
    const { from, to } = pipepart.axis;
    const width = Math.max(2, Math.round((pipepart.TimelinePicture.COLUMN * size.plot) / (last - first)));
    const columns = Math.ceil(size.plot / width);
    const kinds = [...actions.kinds.keys()];
    const place = new Map(kinds.map((code, at) => [code, at * columns]));
    const shares = new Float32Array(kinds.length * columns);
    const perTick = (actions.second / (to - from)) * (size.plot / width);
    const origin = (from / (to - from)) * (size.plot / width);
    for (let action = first; action < last; action += 1) {
      const begin = Math.max(actions.start[action] * perTick - origin, 0);
      const end = Math.min(actions.end[action] * perTick - origin, columns);
      const row = place.get(actions.code[action]);
      for (let column = Math.floor(begin); column < end; column += 1) {
        shares[row + column] += Math.min(end, column + 1) - Math.max(begin, column);
      }
    }
    this.paintShares(shares, kinds, width, top, height);
  }

  paintShares(shares, kinds, width, top, height) {
    const { pen, actions, size } = this;
    const columns = shares.length / kinds.length;
    const below = new Float32Array(columns);
    for (const [at, code] of kinds.entries()) {
      pen.fillStyle = actions.kinds.get(code).light;
      pen.beginPath();
      for (let column = 0; column < columns; column += 1) {
        const share = shares[at * columns + column];
        if (!share) continue;
        const high = Math.min(below[column] + share, 1);
        pen.rect(size.left + column * width, top + height * (1 - high), width, height * (high - below[column]));
        below[column] = high;
      }
      pen.fill();
    }
  }

  /* A line where the step ends. */
  drawEnd() {
    const { pen, size } = this;
    const x = Math.round(this.x(this.actions.makespan)) - 0.5;
    pen.strokeStyle = this.colours.text;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x, this.top(0));
    pen.lineTo(x, this.top(size.rows));
    pen.stroke();
  }

  /* The messages that are on their way within the window. */
  inputsInView() {
    const { actions } = this;
    const { from, to } = pipepart.axis;
    const found = [];
    for (let input = 0; input < actions.inputs.target.length; input += 1) {
      if (actions.endOf(actions.inputs.source[input]) > to || actions.startOf(actions.inputs.target[input]) < from) continue;
      found.push(input);
      if (found.length > pipepart.TimelinePicture.MOST_ARROWS) return found;
    }
    return found;
  }

  drawArrows(inputs, colour = this.colours.text, alpha = 0.45) {
    const { pen } = this;
    this.tooMany = inputs.length > pipepart.TimelinePicture.MOST_ARROWS;
    if (this.tooMany) return;
    pen.strokeStyle = colour;
    pen.fillStyle = colour;
    pen.globalAlpha = alpha;
    pen.lineWidth = 1;
    for (const input of inputs) this.drawArrow(input);
    pen.globalAlpha = 1;
  }

  /* From the end of the action that made a message to the start of the one that takes it. */
  drawArrow(input) {
    const { pen, size, actions } = this;
    const source = actions.inputs.source[input];
    const target = actions.inputs.target[input];
    const middle = (action) => this.top(actions.deviceOf(action)) + (size.row - size.gap) / 2;
    const [x0, y0] = [this.x(actions.endOf(source)), middle(source)];
    const [x1, y1] = [this.x(Math.min(actions.arrivedOf(input), actions.startOf(target))), middle(target)];
    const angle = Math.atan2(y1 - y0, x1 - x0);
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(x1, y1);
    for (const turn of [-0.4, 0.4]) pen.lineTo(x1 - 6 * Math.cos(angle + turn), y1 - 6 * Math.sin(angle + turn));
    pen.fill();
  }

  drawHovered() {
    const { pen, size, actions, hovered } = this;
    const top = this.top(actions.deviceOf(hovered));
    const left = this.x(actions.startOf(hovered));
    pen.strokeStyle = this.colours.text;
    pen.lineWidth = 2;
    pen.strokeRect(left, top + 1, Math.max(this.x(actions.endOf(hovered)) - left, 2), size.row - size.gap - 2);
    this.drawArrows([...actions.inputsOf(hovered), ...actions.outputsOf(hovered)], this.colours.text, 1);
  }
};
