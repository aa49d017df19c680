/* The section with the memory over the step: its charts, and what the pointer or the keys are at. */
"use strict";

pipepart.section("memory", (root, data, columns) => {
  const { axis, tip } = pipepart;
  const spoken = root.querySelector(".spoken");
  const charts = [...root.querySelectorAll(".memory")];
  const pictures = charts.map(
    (chart, at) => new pipepart.MemoryPicture(chart.querySelector("canvas"), at, data.runs[at], columns, data.span),
  );

  function drawAll() {
    for (const picture of pictures) picture.draw();
  }

  for (const [at, chart] of charts.entries()) {
    const picture = pictures[at];
    chart.previousElementSibling.querySelector(".scale").textContent = picture.scaleText;
    axis.attach(chart, () => ({ left: picture.size.left, width: picture.size.plot }));
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect();
      const place = picture.at(event.clientX - box.left, event.clientY - box.top);
      if (!place || event.buttons || place.seconds > picture.makespan) tip.hide();
      else tip.show(picture.lines(place), event.clientX, event.clientY);
    });
    for (const name of ["pointerleave", "blur"]) chart.addEventListener(name, tip.hide);
    // d and u go through the devices, at the middle of what is in view.
    let row = -1;
    chart.addEventListener("keydown", (event) => {
      if (event.key === "Escape") tip.hide();
      if (event.key !== "d" && event.key !== "u") return;
      row = Math.min(Math.max(row + (event.key === "d" ? 1 : -1), 0), picture.devices.length - 1);
      const seconds = Math.min((axis.from + axis.to) / 2, picture.makespan);
      const lines = picture.lines({ row, seconds });
      const box = chart.getBoundingClientRect();
      tip.show(lines, box.left + picture.x(seconds), box.top + picture.top(row));
      spoken.textContent = lines.join(". ");
    });
  }

  axis.listen(drawAll);
  pipepart.onRedraw(drawAll);
  drawAll();
});
