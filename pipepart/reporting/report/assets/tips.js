/* Shows the `data-tip` of what is under the pointer. */
"use strict";

(() => {
  const tip = document.createElement("div");
  tip.className = "tip screen-only";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true"); // the tables say the same
  document.body.append(tip);

  document.addEventListener("pointerover", (event) => {
    const owner = event.target.closest?.("[data-tip]");
    tip.hidden = !owner;
    if (owner) tip.textContent = owner.dataset.tip;
  });
  document.addEventListener("pointermove", (event) => {
    if (tip.hidden) return;
    const { offsetWidth: width, offsetHeight: height } = tip;
    const left = Math.min(event.clientX + 14, innerWidth - width - 6);
    const below = event.clientY + 18;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${below + height > innerHeight ? event.clientY - height - 10 : below}px`;
  });
})();
