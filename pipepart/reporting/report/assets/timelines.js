/* The section with the timelines: charts on one axis, what the pointer or the keys are at, and the actions in view. */
"use strict";

pipepart.section("timelines", (root, data, columns) => {
  const MOST_ROWS = 200; // of the table of actions in view
  const { axis, tip } = pipepart;
  axis.start(data.span);

  const timelines = data.timelines.map((each, number) => new pipepart.Actions(number, each, columns, data.kinds, data.span));
  const charts = [...root.querySelectorAll(".timeline")];
  const pictures = charts.map((chart, at) => new pipepart.TimelinePicture(chart.querySelector("canvas"), timelines[at]));
  const spoken = root.querySelector(".spoken");
  const inView = root.querySelector(".in-view");
  const messages = root.querySelector("input[name=messages]");
  const state = root.querySelector(".window");

  function drawAll() {
    for (const picture of pictures) picture.draw();
    const hidden = messages.checked && pictures.some((picture) => picture.tooMany);
    state.textContent =
      `In view: ${axis.text(axis.from)} to ${axis.text(axis.to)}.` + (hidden ? " Zoom in to see the messages." : "");
    if (inView.open) fillInView();
  }

  function hover(at, action) {
    for (const [number, picture] of pictures.entries()) {
      const wanted = number === at ? action : -1;
      if (picture.hovered === wanted) continue;
      picture.hovered = wanted;
      picture.draw();
    }
  }

  /* The same action in the other timelines of as many actions, such as the measured one beside the predicted one. */
  function elsewhere(at, action) {
    const own = timelines[at];
    return timelines.flatMap((other, number) => {
      if (number === at || other.start.length !== own.start.length || other.nameOf(action) !== own.nameOf(action)) return [];
      return [`${other.name}: ${axis.text(other.startOf(action))} to ${axis.text(other.endOf(action))}: ${axis.text(other.endOf(action) - other.startOf(action))}`];
    });
  }

  /* What a device does at a moment: an action, or -1 and why it is idle. */
  function found(at, { row: device, seconds }) {
    const own = timelines[at];
    const action = own.firstAfter(device, seconds);
    const last = own.offsets[device + 1];
    if (action < last && own.startOf(action) <= seconds) return { action, lines: [...own.lines(action), ...elsewhere(at, action)] };
    if (seconds > own.makespan) return { action: -1, lines: [`${own.name}: the step has ended`] };
    if (action === last) return { action: -1, lines: [`${own.devices[device]} has finished its part of the step`] };
    return { action: -1, lines: [`${own.devices[device]} is idle; next is ${own.nameOf(action)}`, ...own.waitLines(action)] };
  }

  for (const [at, chart] of charts.entries()) {
    const picture = pictures[at];
    const own = timelines[at];
    axis.attach(chart, () => ({ left: picture.size.left, width: picture.size.plot }));
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect();
      const place = picture.at(event.clientX - box.left, event.clientY - box.top);
      if (!place || event.buttons) {
        tip.hide();
        hover(at, -1);
        return;
      }
      const { action, lines } = found(at, place);
      hover(at, action);
      tip.show(lines, event.clientX, event.clientY);
    });
    chart.addEventListener("pointerleave", () => {
      tip.hide();
      hover(at, -1);
    });
    chart.addEventListener("blur", () => {
      tip.hide();
      hover(at, -1);
    });
    chart.addEventListener("keydown", (event) => {
      const next = stepped(own, picture.hovered, event.key);
      if (next === null) return;
      event.preventDefault();
      if (own.endOf(next) > axis.to || own.startOf(next) < axis.from) {
        const half = (axis.to - axis.from) / 2;
        axis.show(own.startOf(next) - half, own.startOf(next) + half);
      }
      hover(at, next);
      const box = chart.getBoundingClientRect();
      const lines = [...own.lines(next), ...elsewhere(at, next)];
      tip.show(lines, box.left + picture.x(own.startOf(next)), box.top + picture.top(own.deviceOf(next) + 1));
      spoken.textContent = lines.join(". ");
    });
  }

  /* The action that a key leads to: n and p along the device, d and u to the next device; null for another key. */
  function stepped(own, action, key) {
    if (!["n", "p", "d", "u", "Escape"].includes(key)) return null;
    if (key === "Escape") {
      tip.hide();
      for (const at of pictures.keys()) hover(at, -1);
      return null;
    }
    if (action < 0) return Math.min(own.firstAfter(0, axis.from), own.offsets[1] - 1);
    const device = own.deviceOf(action);
    const within = (row, each) => Math.min(Math.max(each, own.offsets[row]), own.offsets[row + 1] - 1);
    if (key === "n") return within(device, action + 1);
    if (key === "p") return within(device, action - 1);
    const row = Math.min(Math.max(device + (key === "d" ? 1 : -1), 0), own.devicesCount - 1);
    return within(row, own.firstAfter(row, own.startOf(action)));
  }

  /* The table of the actions that are in view, the first ones of each timeline. */
  function fillInView() {
    const rows = timelines.flatMap((own) => {
      const found = [];
      for (let device = 0; device < own.devicesCount; device += 1) {
        for (let action = own.firstAfter(device, axis.from); action < own.offsets[device + 1] && own.startOf(action) < axis.to; action += 1) {
          if (found.length === MOST_ROWS) return found;
          const wait = own.waitOf(action);
          found.push([
            own.name,
            own.devices[device],
            own.nameOf(action),
            own.kinds.get(own.code[action]).word,
            axis.text(own.startOf(action)),
            axis.text(own.endOf(action) - own.startOf(action)),
            axis.text(wait.device),
            axis.text(wait.message),
          ]);
        }
      }
      return found;
    });
    const body = inView.querySelector("tbody");
    body.replaceChildren(
      ...rows.map((cells) => {
        const row = document.createElement("tr");
        for (const [at, cell] of cells.entries()) {
          const element = row.appendChild(document.createElement("td"));
          element.textContent = cell;
          if (at < 4) element.className = "text";
        }
        return row;
      }),
    );
  }

  const BUTTONS = { whole: axis.whole, in: () => axis.zoom(2), out: () => axis.zoom(0.5), left: () => axis.pan(-0.5), right: () => axis.pan(0.5) };
  for (const [name, act] of Object.entries(BUTTONS)) root.querySelector(`button[name=${name}]`).addEventListener("click", act);
  messages.addEventListener("change", () => {
    for (const picture of pictures) picture.arrows = messages.checked;
    drawAll();
  });
  inView.addEventListener("toggle", () => {
    if (inView.open) fillInView();
  });
  axis.listen(drawAll);
  pipepart.onRedraw(drawAll);
  drawAll();
});
