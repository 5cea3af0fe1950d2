// A change of the question fetches the page of the new URL and swaps the parts marked data-live; the URL always contains
// the full question.

import { keepArrangement, restoreArrangement } from "./arrangement.js";
import { markMistake } from "./mistakes.js";
import { morph } from "./morph.js";
import { rememberPlan } from "./plans.js";
import { addEdits, buildUrl, form, isChanged, isStreamed, markAnswered } from "./question.js";
import { loadSections } from "./sections.js";
import { endWork, markOld, startWork } from "./stream.js";
import { dressTables } from "./tables.js";
import { hideTip } from "./tooltip.js";

const TYPING_PAUSE = 250; // milliseconds after which typed text is a question
const POLL = 2000; // milliseconds between two looks whether there is something to refresh

let running = null; // the request whose answer is shown next
let waiting = null; // the timer of text that is being typed
let lastTyped = null; // the control that was typed in last: a series of its changes is one history entry
let shown = location.pathname + location.search;
const sources = new WeakMap(); // of the parts that were refreshed, which most refreshes leave as they are

/**
 * Show the page of a URL.
 * @param {{push?: "" | "push" | "replace", typed?: Element | null, quiet?: boolean, isBack?: boolean}} how
 * `push`: what to do with the history; `typed`: the control that caused it, which keeps its text; `quiet`: only refresh
 * what may have changed; `isBack`: the URL comes from a history entry.
 */
export async function showPage(url, { push = "", typed = null, quiet = false, isBack = false } = {}) {
  abortRequest();
  if (typed === null && !quiet) lastTyped = null;
  const request = (running = new AbortController());
  if (!quiet) document.body.classList.add("busy");
  try {
    const answer = await fetch(url, { signal: request.signal, headers: { accept: "text/html" } });
    if (!answer.headers.get("content-type")?.startsWith("text/html")) return location.assign(url);
    const next = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (request.signal.aborted) return;
    const address = new URL(answer.redirected ? answer.url : url, location.href);
    if (push && address.href !== location.href) history[`${push}State`](null, "", address);
    shown = location.pathname + location.search;
    if (!quiet) updateControls(next, typed);
    swapParts(next, { quiet, isBack });
    if (!quiet) markAnswered(); // with the controls that are within the parts
    markOld();
    markMistake();
    document.title = next.title;
    if (isBack) restoreArrangement();
    if (!quiet && answer.ok) startWork();
    else if (!quiet) endWork();
  } catch (error) {
    if (error.name !== "AbortError" && !quiet) location.assign(url);
  } finally {
    if (running === request) document.body.classList.remove("busy");
  }
}

function abortRequest() { // its answer would be of what was asked before
  running?.abort();
  clearTimeout(waiting);
}

// Set every control to the value in the new page, except the one the user is typing in.
function updateControls(next, typed) {
  const fresh = next.getElementById("asking");
  if (!form || !fresh) return; // an error, of a question whose controls stay to be corrected
  const growing = next.querySelectorAll("[data-grow]");
  document.querySelectorAll("[data-grow]").forEach((old, place) => {
    if (growing[place] && !old.contains(typed)) old.replaceChildren(...growing[place].childNodes);
  });
  for (const field of form.elements) {
    const other = field.name && field !== typed && !field.closest("[data-grow]") && fresh.elements.namedItem(field.name);
    if (!other) continue;
    if (field.tagName === "SELECT" && !field.isEqualNode(other)) field.replaceChildren(...other.cloneNode(true).childNodes);
    if (field.type === "checkbox") field.checked = other.checked;
    else if (field.value !== other.value) field.value = other.value;
    if (other.placeholder) field.placeholder = other.placeholder; // a default that follows from other fields
  }
  const listFolds = (page) => [...page.querySelectorAll("details:not(#asked)")].filter((fold) => !fold.closest("[data-live]"));
  const wanted = listFolds(next); // those in which a control is set are open
  listFolds(document).forEach((old, place) => { if (wanted[place]?.open) old.open = true; });
}

// Change the live parts of the page, and keep what was opened, sorted, filtered or scrolled in them. What asks for the
// layout of the page comes before all changes, or after.
function swapParts(next, { quiet, isBack }) {
  const focused = document.activeElement?.dataset?.key;
  const parts = [...document.querySelectorAll("[data-live]")].flatMap((old) => {
    const fresh = next.getElementById(old.id), source = quiet ? fresh?.innerHTML : null;
    if (!fresh || (quiet && source === sources.get(old))) return [];
    sources.set(old, source);
    return [{ old, fresh, arrange: isBack ? () => {} : keepArrangement(old) }];
  });
  if (parts.length) hideTip();
  for (const { old, fresh } of parts) {
    if (isBack) for (const field of old.querySelectorAll("input")) Object.assign(field, { value: field.defaultValue, checked: field.defaultChecked });
    dressTables(fresh);
    morph(old, fresh);
    if (fresh.dataset.poll) old.dataset.poll = fresh.dataset.poll;
    else delete old.dataset.poll;
  }
  for (const { old, arrange } of parts) {
    loadSections(old);
    arrange();
    if (old.id === "answer") rememberPlan();
  }
  if (focused && document.activeElement?.dataset?.key !== focused) {
    document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }
}

// A changed control is a question: typed text after a pause, a list at once. A long answer waits for its button.
document.addEventListener("input", (event) => {
  const field = event.target;
  if (!form || field.form !== form) return;
  if (isStreamed) {
    markOld();
    if (!("reload" in field.dataset)) return;
    const url = buildUrl(field.name); // other fields belong to this choice
    url.searchParams.delete("run");
    showPage(url, { push: "push" });
    return;
  }
  abortRequest();
  waiting = setTimeout(() => {
    const push = lastTyped === field ? "replace" : "push";
    lastTyped = field;
    showPage(buildUrl(field.name), { push, typed: field });
  }, field.tagName === "SELECT" ? 0 : TYPING_PAUSE);
});
document.addEventListener("submit", (event) => {
  if (event.target !== form) return;
  event.preventDefault();
  const isNew = isChanged() || (isStreamed && !new URL(location.href).searchParams.get("run"));
  showPage(isNew ? buildUrl() : location.href, { push: isNew ? "push" : "" });
});
document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-live] a[href]");
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
  const url = new URL(link.getAttribute("href"), location.href); // of a link in a picture, href is no text
  if (url.origin !== location.origin || url.pathname !== location.pathname) return;
  event.preventDefault();
  showPage(form && !isStreamed ? addEdits(url) : url, { push: "push" });
});
addEventListener("popstate", () => { if (location.pathname + location.search !== shown) showPage(location.href, { isBack: true }); });

// Refresh what still changes while the page is visible; data-poll is the interval in milliseconds.
const findPolled = () => document.querySelector("[data-poll]");
function poll() {
  if (findPolled() && !document.hidden && !document.body.classList.contains("busy")) showPage(location.href, { quiet: true });
  waitToPoll();
}
function waitToPoll() { setTimeout(poll, Number(findPolled()?.dataset.poll) || POLL); }
waitToPoll();
