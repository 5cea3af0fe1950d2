// Long work (a search, a dry run, files that are read) streams its progress, then its result. Closing the stream ends
// the work at once; Stop asks for the result so far, and a second click ends the work.

import { restoreArrangement } from "./arrangement.js";
import { form, isChanged, isStreamed } from "./question.js";
import { loadSections } from "./sections.js";
import { dressTables } from "./tables.js";

const progress = document.getElementById("going"), stop = document.getElementById("stop");
const answer = document.getElementById("answer"), old = document.getElementById("old");
let stream = null, clock = null;

/** Say above the answer, if there is one or it is computed, whether the controls were changed since it was asked for. */
export function markOld() {
  const isAsked = isStreamed && new URL(location.href).searchParams.get("run");
  if (old) old.hidden = !(isAsked && isChanged());
}

/** Start the work that the address asks for, instead of what runs. */
export function startWork() {
  if (!isStreamed) return;
  endWork();
  const isInvalid = answer.querySelector(":scope > .mistake") !== null; // there is nothing to start
  if (new URL(location.href).searchParams.get("run") && !isInvalid) openStream();
}

/** End the work that runs, if any does. */
export function endWork() {
  stream?.close();
  stream = null;
  clearInterval(clock);
  if (isStreamed) progress.hidden = stop.hidden = true;
}

/** Show one line in place of the answer. `look`: "remark" or "mistake". */
export function showLine(look, text) {
  const line = document.createElement("p");
  line.className = look;
  if (look === "mistake") line.setAttribute("role", "alert");
  line.textContent = text;
  answer.replaceChildren(line);
}

/** Show what is being done, and `done` of `total` if both are known. */
export function showProgress(text, done = 0, total = 0) {
  const bar = progress.querySelector("progress");
  progress.hidden = false;
  progress.querySelector("p").textContent = text;
  if (total && done) Object.assign(bar, { max: total, value: done });
  else bar.removeAttribute("value");
}

function openStream() {
  const since = Date.now();
  let doing = "starting", done = 0, total = 0;
  const show = () => showProgress(`${doing} · ${Math.round((Date.now() - since) / 1000)} s`, done, total);
  answer.replaceChildren();
  delete stop.dataset.work; // of the work before, which this Stop does not end
  stop.hidden = false;
  stop.textContent = "Stop";
  show();
  clock = setInterval(show, 1000);
  stream = new EventSource(`${form.dataset.stream}${location.search}`);
  const listen = (name, handle) => stream.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  listen("begun", (work) => { stop.dataset.work = work; });
  listen("progress", (report) => {
    let name;
    [done, total, name] = report;
    const isCounted = total && "of" in form.dataset; // the name of what is counted, or "" where the report has it
    const share = isCounted ? `${done.toLocaleString("en")} of ${total.toLocaleString("en")} ${form.dataset.of}`.trim() : "";
    doing = [name, share].filter(Boolean).join(": ");
    show();
  });
  listen("sketch", showAnswer);
  listen("found", (html) => {
    showAnswer(html);
    dressTables(answer);
    loadSections(answer);
    restoreArrangement();
    endWork();
  });
  listen("stopped", (text) => { endWork(); showLine("remark", text); });
  listen("mistake", (text) => { endWork(); showLine("mistake", text); });
  stream.addEventListener("error", () => {
    if (!stream) return;
    endWork();
    showLine("mistake", "the server does not answer; is fivefold web still running?");
  });
}

function showAnswer(html) {
  answer.replaceChildren(...new DOMParser().parseFromString(html, "text/html").body.childNodes);
}

stop?.addEventListener("click", () => {
  if (stop.dataset.work && stop.textContent === "Stop") {
    stop.textContent = "Stop now";
    fetch(`${form.dataset.stream}/stop?work=${stop.dataset.work}`, { method: "POST" });
  } else {
    endWork();
    showLine("remark", "Stopped before there was an answer.");
  }
});
