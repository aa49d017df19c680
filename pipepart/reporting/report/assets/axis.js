/* The axis of time that all charts of the page share: the window in view, and the keys and gestures that move it. */
"use strict";

pipepart.axis = (() => {
  const NARROWEST = 1e-6; // of the whole span
  const STEP = 0.2; // of the window, that a key moves it by
  const ZOOM = 1.5;
  const CLICK = 4; // pixels; a shorter drag is a click
  const listeners = new Set();
  let span = 1;
  let from = 0;
  let to = 1;
  let queued = false;

  function start(seconds) {
    span = seconds || 1;
    from = 0;
    to = span;
  }

  /* Call a function after each change of the window, at most once a frame. */
  function listen(changed) {
    listeners.add(changed);
  }

  function show(newFrom, newTo) {
    const width = Math.min(Math.max(newTo - newFrom, span * NARROWEST), span);
    from = Math.min(Math.max(newFrom, 0), span - width);
    to = from + width;
    if (queued) return;
    queued = true;
    requestAnimationFrame(() => {
      queued = false;
      for (const changed of listeners) changed();
    });
  }

  const whole = () => show(0, span);
  const pan = (windows) => show(from + windows * (to - from), to + windows * (to - from));

  function zoom(factor, at = (from + to) / 2) {
    show(at - (at - from) / factor, at + (to - at) / factor);
  }

  const KEYS = {
    ArrowLeft: () => pan(-STEP),
    ArrowRight: () => pan(STEP),
    ArrowUp: () => zoom(ZOOM),
    ArrowDown: () => zoom(1 / ZOOM),
    "+": () => zoom(ZOOM),
    "=": () => zoom(ZOOM),
    "-": () => zoom(1 / ZOOM),
    Home: whole,
    0: whole,
  };

  /* Let a chart move the window. `plot` gives left edge and width of its plot, in pixels from the chart's own. */
  function attach(chart, plot) {
    const moment = (event) => {
      const { left, width } = plot();
      const x = event.clientX - chart.getBoundingClientRect().left - left;
      return from + (Math.min(Math.max(x, 0), width) / width) * (to - from);
    };
    chart.addEventListener("keydown", (event) => {
      const act = event.ctrlKey || event.metaKey || event.altKey ? null : KEYS[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
    chart.addEventListener(
      "wheel",
      (event) => {
        if (event.ctrlKey || event.metaKey) zoom(Math.exp(-event.deltaY / 300), moment(event));
        else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
          pan((event.deltaX || event.deltaY) / plot().width);
        } else return; // the page scrolls
        event.preventDefault();
      },
      { passive: false },
    );
    chart.addEventListener("dblclick", whole);
    attachDrag(chart, plot, moment);
  }

  /* A mouse marks the part to zoom to; with the shift key, and with a finger, it pulls the chart along. */
  function attachDrag(chart, plot, moment) {
    const mark = chart.appendChild(document.createElement("div"));
    mark.className = "mark";
    mark.hidden = true;
    let drag = null;
    chart.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      drag = { x: event.clientX, at: moment(event), from, to, pulls: event.shiftKey || event.pointerType === "touch" };
      chart.setPointerCapture(event.pointerId);
    });
    chart.addEventListener("pointermove", (event) => {
      if (!drag) return;
      const { left, width } = plot();
      if (drag.pulls) {
        const moved = ((drag.x - event.clientX) / width) * (drag.to - drag.from);
        show(drag.from + moved, drag.to + moved);
        return;
      }
      const edges = [drag.at, moment(event)].sort((one, other) => one - other);
      const [first, last] = edges.map((at) => left + ((at - from) / (to - from)) * width);
      mark.hidden = last - first < CLICK;
      mark.style.left = `${first}px`;
      mark.style.width = `${last - first}px`;
    });
    const end = (event) => {
      if (drag && !drag.pulls && !mark.hidden && event.type === "pointerup") {
        show(...[drag.at, moment(event)].sort((one, other) => one - other));
      }
      mark.hidden = true;
      drag = null;
    };
    chart.addEventListener("pointerup", end);
    chart.addEventListener("pointercancel", end);
  }

  /* Round moments in the window, about as many as asked for. */
  function ticks(count) {
    const rough = (to - from) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
    const found = [];
    for (let number = Math.ceil(from / step); number * step <= to; number += 1) found.push(number * step);
    return { moments: found, step };
  }

  const UNITS = [
    ["s", 1],
    ["ms", 1e-3],
    ["µs", 1e-6],
    ["ns", 1e-9],
  ];

  /* A time with its unit, to four digits; or to a step of the axis, so that its labels tell moments apart. */
  function text(seconds, step = 0) {
    if (Math.abs(seconds) < span * 1e-9) return "0";
    const size = step ? Math.max(Math.abs(seconds), to) : Math.abs(seconds);
    const [name, unit] = UNITS.find(([, each]) => size >= each) || UNITS.at(-1);
    const value = seconds / unit;
    const digits = step
      ? Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9))
      : Math.max(0, 3 - Math.floor(Math.log10(Math.abs(value))));
    return `${value.toLocaleString("en", { minimumFractionDigits: step ? digits : 0, maximumFractionDigits: digits })} ${name}`;
  }

  return {
    start,
    listen,
    show,
    whole,
    pan,
    zoom,
    attach,
    ticks,
    text,
    get from() {
      return from;
    },
    get to() {
      return to;
    },
    get span() {
      return span;
    },
  };
})();
