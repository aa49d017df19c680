/* The actions of one timeline: their times, their names, and what each waited for. */
"use strict";

pipepart.bytesText = (size) => {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) return `${size.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(1)} TiB`;
};

/* The first number from `low` up to `high` that a test holds for, and then for all behind it; `high` if there is none. */
pipepart.firstWhere = (low, high, test) => {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (test(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
};

pipepart.Actions = class {
  /* `number`: of the timeline in the section's columns. */
  constructor(number, data, columns, kinds, span) {
    Object.assign(this, data);
    const column = (name) => columns[`${number}.${name}`];
    for (const name of ["start", "end", "code", "stage", "micro_batch"]) this[name] = column(name);
    this.inputs = { source: column("source"), target: column("target"), arrived: column("arrived"), size: column("size") };
    this.second = span / (2 ** 32 - 1); // seconds of a tick
    this.kinds = new Map(kinds.map((kind) => [kind.code, kind]));
    this.chunk = this.device_of.map(
      (home, stage) => this.device_of.slice(0, stage).filter((other) => other === home).length % 2,
    );
  }

  get devicesCount() {
    return this.offsets.length - 1;
  }

  startOf(action) {
    return this.start[action] * this.second;
  }

  endOf(action) {
    return this.end[action] * this.second;
  }

  /* The device that an action stands on. */
  deviceOf(action) {
    return pipepart.firstWhere(0, this.devicesCount, (device) => this.offsets[device + 1] > action);
  }

  /* The first action of a device that ends after a moment; past its last one if there is none. */
  firstAfter(device, seconds) {
    const tick = seconds / this.second;
    return pipepart.firstWhere(this.offsets[device], this.offsets[device + 1], (action) => this.end[action] > tick);
  }

  /* The inputs of an action that come from another device or a host, as places in `inputs`. */
  inputsOf(action) {
    const target = this.inputs.target;
    const found = [];
    let low = pipepart.firstWhere(0, target.length, (input) => target[input] >= action);
    for (; low < target.length && target[low] === action; low += 1) found.push(low);
    return found;
  }

  /* The inputs that an action made for others. */
  outputsOf(action) {
    const source = this.inputs.source;
    if (!this.bySource) {
      this.bySource = Uint32Array.from(source.keys()).sort((one, other) => source[one] - source[other]);
    }
    const found = [];
    let low = pipepart.firstWhere(0, source.length, (place) => source[this.bySource[place]] >= action);
    for (; low < source.length && source[this.bySource[low]] === action; low += 1) found.push(this.bySource[low]);
    return found;
  }

  arrivedOf(input) {
    return Math.max(this.inputs.arrived[input] * this.second, this.endOf(this.inputs.source[input]));
  }

  /* The size of a message; without a number where the plan has none. */
  sizeText(input) {
    const size = this.sizes[this.inputs.size[input]];
    return size ? pipepart.bytesText(size) : "a message";
  }

  /* As schedules name it: 3F5 is the forward of micro-batch 5 on stage 3. */
  nameOf(action) {
    const part = this.micro_batch[action];
    return `${this.stage[action]}${this.kinds.get(this.code[action]).letter}${part < 0 ? "" : part}`;
  }

  /* Why an action did not start when its device was free: seconds for each cause, and the input that came last. */
  waitOf(action) {
    const device = this.deviceOf(action);
    const free = action > this.offsets[device] ? this.endOf(action - 1) : 0;
    const start = this.startOf(action);
    const inputs = this.inputsOf(action);
    const made = inputs.map((input) => this.endOf(this.inputs.source[input]));
    const lastMade = Math.max(free, ...made);
    const lastHere = Math.max(lastMade, ...inputs.map((input) => this.arrivedOf(input)));
    const forDevice = Math.min(lastMade, start) - free;
    const forMessage = Math.min(lastHere, start) - free - forDevice;
    return {
      total: start - free,
      device: forDevice,
      message: forMessage,
      delay: start - free - forDevice - forMessage,
      made: inputs[made.indexOf(Math.max(...made))],
      arrived: inputs.reduce((last, each) => (last === undefined || this.arrivedOf(each) > this.arrivedOf(last) ? each : last), undefined),
    };
  }

  /* The lines that say what an action waited for; none if it did not wait. */
  waitLines(action) {
    const { text } = pipepart.axis;
    const wait = this.waitOf(action);
    const least = this.makespan * 1e-7;
    if (wait.total <= least) return [];
    const lines = [`Its device was idle for ${text(wait.total)} before:`];
    if (wait.device > least) {
      const source = this.inputs.source[wait.made];
      lines.push(`  ${text(wait.device)} waiting for ${this.nameOf(source)} on ${this.devices[this.deviceOf(source)]}`);
    }
    if (wait.message > least) lines.push(`  ${text(wait.message)} waiting for it to arrive (${this.sizeText(wait.arrived)})`);
    if (wait.delay > least) lines.push(`  ${text(wait.delay)} after its inputs were there`);
    return lines;
  }

  /* The lines of an action's tooltip. */
  lines(action) {
    const { text } = pipepart.axis;
    const kind = this.kinds.get(this.code[action]);
    const part = this.micro_batch[action];
    const start = this.startOf(action);
    const [replica, stage] = [Math.floor(this.stage[action] / this.per_replica), this.stage[action] % this.per_replica];
    const lines = [
      `${this.nameOf(action)}: ${kind.word}, stage ${stage}${replica ? ` of replica ${replica}` : ""}${part < 0 ? "" : `, micro-batch ${part}`}`,
      `on ${this.devices[this.deviceOf(action)]}`,
      `${text(start)} to ${text(this.endOf(action))}: ${text(this.endOf(action) - start)}`,
    ];
    for (const input of this.inputsOf(action)) {
      lines.push(`takes ${this.sizeText(input)} from ${this.nameOf(this.inputs.source[input])}, there at ${text(this.arrivedOf(input))}`);
    }
    for (const input of this.outputsOf(action)) {
      lines.push(`sends ${this.sizeText(input)} to ${this.nameOf(this.inputs.target[input])}`);
    }
    return [...lines, ...this.waitLines(action)];
  }
};
