// The tooltip: shows the text of data-tip for the element under the mouse or with the focus.

const tip = document.getElementById("tip");
let focused = null; // the element with the focus, while the tooltip shows its text

/** Hide the tooltip. */
export function hideTip() {
  tip.hidden = true;
  focused = null;
}

/** Show `text` next to a point of the window. */
export function showTip(text, x, y) {
  if (tip.textContent !== text) tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 6))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
}

/** Show `text` below an element. */
export function showTipBelow(text, element) {
  const box = element.getBoundingClientRect();
  showTip(text, box.left, box.bottom - 12);
}

document.addEventListener("pointermove", (event) => {
  const element = event.target.closest?.("[data-tip]");
  hideTip();
  if (element) showTip(element.dataset.tip, event.clientX, event.clientY);
});
document.addEventListener("focusin", (event) => {
  const element = event.target.closest?.("[data-tip]");
  hideTip();
  if (!element) return;
  showTipBelow(element.dataset.tip, element);
  focused = element;
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
document.addEventListener("scroll", () => { // also into which the focus has brought its element
  if (focused) showTipBelow(focused.dataset.tip, focused);
  else hideTip();
}, { passive: true });
