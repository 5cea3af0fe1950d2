// How a reader arranged an answer: opened, sorted, filtered, ticked, scrolled. It is kept when the answer is refreshed,
// and stored in the history entry, to be restored on the way back.

import { addSelected, countSelected, findLink, hasSelection, isSelecting, toggleSelected } from "./selection.js";
import { filterRows, sortRows } from "./tables.js";

const BOXES = "form input[type=checkbox]";

/** Return the arrangement of a part of the page, as data. */
function readArrangement(root) {
  const list = (selector, read) => [...root.querySelectorAll(selector)].map(read);
  return {
    open: list("details[open] > summary", (summary) => summary.textContent),
    sorted: list("th[aria-sort]", (heading) => [heading.textContent, heading.getAttribute("aria-sort")]),
    filters: list("[data-filter]", (field) => [field.dataset.filter, field.value]),
    ticked: list(`${BOXES}:checked`, (box) => box.value),
    selected: list("#selected li:has(:checked) a", (link) => [link.textContent, link.getAttribute("href")]),
    scrolled: list(".scroll", (region) => [region.getAttribute("aria-label") ?? "", region.scrollLeft, region.scrollTop]),
  };
}

/** Arrange a part of the page as it was. */
function applyArrangement(root, { open = [], sorted = [], filters = [], ticked = [], selected = [], scrolled = [] }) {
  for (const summary of root.querySelectorAll("details > summary")) if (open.includes(summary.textContent)) summary.parentElement.open = true;
  for (const [name, order] of sorted) {
    for (const heading of root.querySelectorAll("th[data-sort]")) if (heading.textContent === name) sortRows(heading, order);
  }
  for (const [table, text] of filters) {
    const field = text && root.querySelector(`[data-filter="${CSS.escape(table)}"]`);
    if (field) { field.value = text; filterRows(field); }
  }
  if (hasSelection()) for (const [layout, href] of selected) addSelected(layout, href);
  for (const box of root.querySelectorAll(BOXES)) if (ticked.includes(box.value)) { box.checked = true; countSelected(box.form); }
  for (const [name, left, top] of scrolled) {
    if (left || top) root.querySelector(`.scroll[aria-label="${CSS.escape(name)}"]`)?.scrollTo(left, top);
  }
}

/** Return a function that arranges a part of the page, once it is refreshed, as it is now. */
export function keepArrangement(root) {
  const arrangement = readArrangement(root);
  return () => applyArrangement(root, arrangement);
}

/** Arrange the answer as its history entry says. */
export function restoreArrangement() {
  const answer = document.getElementById("answer");
  if (answer) applyArrangement(answer, history.state ?? {});
}

function storeArrangement() {
  const answer = document.getElementById("answer");
  if (!answer) return;
  const { sorted, filters, ticked, selected } = readArrangement(answer);
  history.replaceState({ sorted, filters, ticked, selected }, "");
}

document.addEventListener("input", (event) => {
  const field = event.target;
  if (field.dataset?.filter) filterRows(field);
  else if (field.type === "checkbox" && field.closest("#answer") && field.form) countSelected(field.form);
  else return;
  storeArrangement();
});
document.addEventListener("click", (event) => {
  const heading = event.target.closest?.("th[data-sort] button")?.parentElement;
  if (heading) {
    sortRows(heading, heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending");
    storeArrangement();
  }
  const button = event.target.closest?.("[data-selects]");
  if (button) button.setAttribute("aria-pressed", String(!isSelecting()));
  const link = isSelecting() || event.shiftKey ? findLink(event) : null;
  if (link) select(event, link);
});
document.addEventListener("keydown", (event) => {
  const link = event.key === " " ? findLink(event) : null;
  if (link) select(event, link);
});
function select(event, link) {
  event.preventDefault(); // it does not open its plan
  toggleSelected(link);
  storeArrangement();
}
