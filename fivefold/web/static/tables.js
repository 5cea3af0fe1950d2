// Tables: headings sort, a text filters rows, and in a narrow window each cell of a table of cards shows its heading.

import { addSaveButtons } from "./exports.js";

/** Give the tables and pictures of a part of the page their buttons. */
export function dressTables(root) {
  addSaveButtons(root);
  for (const table of root.querySelectorAll("table.cards")) {
    const names = [...table.tHead.rows[0].cells].map((cell) => cell.querySelector(".sr") ? "" : cell.textContent);
    for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, place) => { cell.dataset.name = names[place]; });
  }
  for (const heading of root.querySelectorAll("th[data-sort]")) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
  }
}

/** Sort the rows of a table by the column of a heading. `order`: "ascending" or "descending". */
export function sortRows(heading, order) {
  const column = [...heading.parentElement.children].indexOf(heading);
  const sign = order === "descending" ? -1 : 1;
  for (const cell of heading.parentElement.children) cell.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", order);
  const body = heading.closest("table").tBodies[0];
  const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
  body.append(...[...body.rows].sort((a, b) => sign * compare(key(a), key(b))));
}

/** Show only the rows, and points of the pictures, with every word of a filter. */
export function filterRows(field) {
  const table = document.getElementById(field.dataset.filter);
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (text) => words.every((word) => text.toLowerCase().includes(word));
  for (const row of table.tBodies[0].rows) row.hidden = !matches(row.textContent);
  for (const point of table.closest("[data-live]").querySelectorAll("svg.chart a")) {
    point.classList.toggle("out", !matches(point.getAttribute("aria-label")));
  }
}

// A row and its point, which link to the same plan, are highlighted together; a click anywhere in a row opens the plan.
const findRow = (element) => element.closest?.("table.linking tbody tr");

function highlightLinked(event) {
  const link = findRow(event.target)?.querySelector("a[href]") ?? event.target.closest?.("svg.chart a[href]");
  for (const element of document.querySelectorAll(".linked")) element.classList.remove("linked");
  if (!link) return;
  for (const other of document.querySelectorAll(`[href="${CSS.escape(link.getAttribute("href"))}"]`)) {
    (other.querySelector("circle") ?? findRow(other))?.classList.add("linked");
  }
}
document.addEventListener("pointerover", highlightLinked);
document.addEventListener("focusin", highlightLinked);
document.addEventListener("click", (event) => {
  const row = !event.target.closest?.("a, button, input, label") && findRow(event.target);
  if (row && !getSelection().toString()) row.querySelector("a[href]")?.click();
});
