// Rows of a table, points and lines of its plots are selected to be compared, up to a limit. A point without a row gets
// a box of its own, and what is selected stays highlighted in the plots.

import { showTipBelow } from "./tooltip.js";

const LINKS = "#answer svg.chart a[href]";

/** Return whether the plots of this page can be selected in. */
export const hasSelection = () => document.getElementById("selected") !== null;

/** Return the link of a plot that an event happened on. */
export const findLink = (event) => (hasSelection() ? event.target.closest?.(LINKS) : null);

/** Return whether the button is pressed with which a click selects. */
export const isSelecting = () => document.querySelector("[data-selects]")?.getAttribute("aria-pressed") === "true";

const listBoxes = () => [...document.querySelectorAll("#answer .pick input[name=layout]:is([type=checkbox])")];

/** Select the layout of a point or line, or take it off the selection. */
export function toggleSelected(link) {
  const href = link.getAttribute("href"), layout = findComparable(href);
  if (layout === null) return showTipBelow("its precision or reduction of gradients is its own: open its plan to compare it", link);
  const box = listBoxes().find((known) => known.value === layout);
  if (box?.closest("#selected")) box.closest("li").remove();
  else if (box) box.checked = !box.checked;
  else addSelected(layout, href);
  countSelected(document.querySelector("#answer .pick"));
}

/** Add a ticked box for a layout that has no row, unless it has one. */
export function addSelected(layout, href) {
  if (listBoxes().some((known) => known.value === layout)) return;
  const line = document.createElement("li"), label = document.createElement("label"), link = document.createElement("a");
  const box = Object.assign(document.createElement("input"), { type: "checkbox", name: "layout", value: layout, checked: true });
  box.setAttribute("aria-label", `compare ${layout}`);
  label.append(box);
  link.className = "code";
  link.textContent = layout;
  link.setAttribute("href", href);
  line.append(label, link);
  document.getElementById("selected").append(line);
}

/** Update the button that compares what is ticked in its form, and the plots. */
export function countSelected(picks) {
  const button = picks.querySelector("button[data-most]");
  if (!button) return;
  const ticked = picks.querySelectorAll("input[type=checkbox]:checked").length, most = Number(button.dataset.most);
  button.disabled = ticked < 2 || ticked > most;
  button.textContent = ticked < 2 ? "Compare" : ticked > most ? `at most ${most}` : `Compare ${ticked}`;
  const layouts = new Set(listBoxes().filter((box) => box.checked).map((box) => box.value));
  for (const link of document.querySelectorAll(LINKS)) {
    link.firstElementChild.classList.toggle("selected", layouts.size > 0 && layouts.has(findComparable(link.getAttribute("href"))));
  }
}

// Return the layout of a plan's URL, or null if it differs from the question that is compared in more than its layout.
function findComparable(href) {
  const plan = new URL(href, location.href).searchParams;
  const compared = [...document.querySelectorAll("#answer .pick input[type=hidden]")].map((field) => [field.name, field.value]);
  return listOthers(plan) === listOthers(compared) ? plan.get("layout") : null;
}
const listOthers = (entries) => [...entries].filter(([name]) => name !== "layout").map(String).sort().join("\n");
