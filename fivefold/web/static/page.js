// The page's behaviour. A page works without it: every choice is a link, every form a GET. With it, a change fetches
// the page of the new address, and swaps the parts that are marked data-live; the address is always the question.
"use strict";
document.documentElement.classList.add("scripted");

const asked = document.getElementById("asked");
if (asked && matchMedia("(max-width: 860px)").matches) asked.open = false;

document.querySelector("header nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

const parser = new DOMParser();
let running = null;

function target(form, changed) {
  const url = new URL(form.action || location.href, location.href);
  url.search = new URL(location.href).pathname === url.pathname ? location.search : "";
  const names = new Set([...form.elements].map((field) => field.name).filter(Boolean));
  names.forEach((name) => url.searchParams.delete(name));
  for (const [name, value] of new FormData(form)) if (value !== "") url.searchParams.append(name, value);
  if (changed === "config" || changed === "model") for (const name of ["layers", "width", "heads", "kv_heads", "ffn", "vocab"]) if (changed === "model" || !names.has(name)) url.searchParams.delete(name);
  return url;
}

async function go(url, { push = "push", quiet = false } = {}) {
  running?.abort();
  const mine = (running = new AbortController());
  if (!quiet) document.body.classList.add("busy");
  try {
    const answer = await fetch(url, { signal: mine.signal, headers: { accept: "text/html" } });
    if (!answer.headers.get("content-type")?.startsWith("text/html")) return location.assign(url);
    const next = parser.parseFromString(await answer.text(), "text/html");
    swap(next);
    if (push === "push") history.pushState(null, "", url);
    if (push === "replace") history.replaceState(null, "", url);
    document.title = next.title;
    fill(new URL(url, location.href));
  } catch (error) {
    if (error.name !== "AbortError" && !quiet) location.assign(url);
  } finally {
    if (running === mine) document.body.classList.remove("busy");
  }
}

function swap(next) {
  const focused = document.activeElement?.dataset?.key;
  hideTip();
  for (const old of document.querySelectorAll("[data-live]")) {
    const fresh = next.getElementById(old.id);
    if (!fresh) continue;
    const open = [...old.querySelectorAll("details[open] > summary")].map((each) => each.textContent);
    old.replaceChildren(...fresh.childNodes);
    old.toggleAttribute("data-poll", fresh.hasAttribute("data-poll"));
    dress(old);
    later(old);
    for (const each of old.querySelectorAll("details > summary")) if (open.includes(each.textContent)) each.parentElement.open = true;
  }
  if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

function fill(url) {
  for (const form of document.querySelectorAll("form[data-live-form]"))
    for (const field of form.elements) {
      if (!field.name || field === document.activeElement || field.name === "set" || field.type === "checkbox") continue;
      const value = url.searchParams.get(field.name);
      if (value !== null) field.value = value;
      else if (field.name !== "model" && field.name !== "machine" && field.name !== "layout") field.value = "";
    }
}

let waiting = null;
document.addEventListener("input", (event) => {
  const form = event.target.closest?.("form[data-live-form]");
  if (!form) return;
  clearTimeout(waiting);
  waiting = setTimeout(() => go(target(form, event.target.name), { push: "replace" }), event.target.tagName === "SELECT" ? 0 : 250);
});
document.addEventListener("submit", (event) => {
  const form = event.target.closest("form[data-live-form]");
  if (!form) return;
  event.preventDefault();
  clearTimeout(waiting);
  go(target(form));
});
document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-live] a[href]");
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
  const url = new URL(link.getAttribute("href"), location.href); // of a link in a picture, href is no text
  if (url.origin !== location.origin || url.pathname !== location.pathname) return;
  event.preventDefault();
  go(url);
});
addEventListener("popstate", () => go(location.href, { push: "" }));

// Arrow keys go along a row of choices.
document.addEventListener("keydown", (event) => {
  const row = event.target.closest?.(".options");
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === "Escape") hideTip();
  if (!row || !step) return;
  const all = [...row.children];
  all[(all.indexOf(event.target) + step + all.length) % all.length].focus();
  event.preventDefault();
});

// What is under the mouse, or has the focus, is told.
const tip = document.getElementById("tip");
function hideTip() { tip.hidden = true; }
function tell(element, x, y) {
  if (tip.textContent !== element.dataset.tip) tip.textContent = element.dataset.tip;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 6))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
}
document.addEventListener("pointermove", (event) => {
  const element = event.target.closest?.("[data-tip]");
  element ? tell(element, event.clientX, event.clientY) : hideTip();
});
document.addEventListener("focusin", (event) => {
  const element = event.target.closest?.("[data-tip]");
  if (!element) return hideTip();
  const box = element.getBoundingClientRect();
  tell(element, box.left, box.bottom - 12);
});
document.addEventListener("scroll", hideTip, { passive: true });

// Tables: a heading sorts, a word filters, boxes choose up to so many.
function dress(root) {
  for (const heading of root.querySelectorAll("th[data-sort]")) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => sort(heading));
  }
}
function sort(heading) {
  const column = [...heading.parentElement.children].indexOf(heading);
  const down = heading.getAttribute("aria-sort") === "ascending";
  for (const each of heading.parentElement.children) each.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const body = heading.closest("table").tBodies[0];
  const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const order = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
  body.append(...[...body.rows].sort((a, b) => (down ? -1 : 1) * order(key(a), key(b))));
}
document.addEventListener("input", (event) => {
  const table = document.getElementById(event.target.dataset?.filter);
  if (table) {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    const says = (text) => words.every((word) => text.toLowerCase().includes(word));
    for (const row of table.tBodies[0].rows) row.hidden = !says(row.textContent);
    for (const point of table.closest("[data-live], #found").querySelectorAll("svg.chart a")) point.classList.toggle("out", !says(point.getAttribute("aria-label")));
  }
  const form = event.target.type === "checkbox" && event.target.form;
  const button = form && form.querySelector("button[data-most]");
  if (button) {
    const picked = form.querySelectorAll("input[type=checkbox]:checked").length;
    button.disabled = picked < 2 || picked > Number(button.dataset.most);
    button.textContent = picked < 2 ? "Compare" : picked > Number(button.dataset.most) ? `at most ${button.dataset.most}` : `Compare ${picked}`;
  }
});

// Of what may be said several times there is always room for one more.
document.addEventListener("input", (event) => {
  const last = event.target.closest?.("[data-grow]")?.lastElementChild;
  if (last !== event.target || !last.value) return;
  const next = last.cloneNode();
  next.value = "";
  last.after(next);
});

// A row and its point, which lead to the same plan, light up together; a click anywhere in a row is its plan.
const rowOf = (element) => element.closest?.("table.linking tbody tr");
const leads = (element) => (element?.tagName === "TR" ? element.querySelector("a[href]") : element)?.getAttribute("href");
function light(event) {
  const href = leads(rowOf(event.target) ?? event.target.closest?.("svg.chart a[href]"));
  for (const each of document.querySelectorAll(".linked")) each.classList.remove("linked");
  if (!href) return;
  for (const link of document.querySelectorAll(`[href="${CSS.escape(href)}"]`)) (link.querySelector("circle") ?? rowOf(link))?.classList.add("linked");
}
document.addEventListener("pointerover", light);
document.addEventListener("focusin", light);
document.addEventListener("click", (event) => {
  const row = !event.target.closest?.("a, button, input, label") && rowOf(event.target);
  if (row && !getSelection().toString()) row.querySelector("a[href]")?.click();
});

// Long work (a search, a rehearsal) streams: how far it is, then what was found. Closing the stream ends the work.
const worker = document.querySelector("form[data-stream]");
if (worker) {
  const going = document.getElementById("going"), found = document.getElementById("found"), stop = document.getElementById("stop");
  let stream = null;
  const end = () => { stream?.close(); stream = null; going.hidden = stop.hidden = true; };
  const begin = (url) => {
    end();
    found.replaceChildren();
    going.hidden = stop.hidden = false;
    const bar = going.querySelector("progress"), line = going.querySelector("p");
    bar.removeAttribute("value");
    line.textContent = "begins …";
    stream = new EventSource(`${worker.dataset.stream}${url.search}`);
    stream.addEventListener("progress", (event) => {
      const [done, total, name] = JSON.parse(event.data);
      if (total) Object.assign(bar, { max: total, value: done });
      line.textContent = total ? `${done.toLocaleString("en")} of ${total.toLocaleString("en")} ${worker.dataset.of}` : `search ${done}: ${name}`;
    });
    stream.addEventListener("found", (event) => {
      found.replaceChildren(...parser.parseFromString(JSON.parse(event.data), "text/html").body.childNodes);
      dress(found);
      end();
    });
    stream.addEventListener("mistake", (event) => { end(); complain(JSON.parse(event.data)); });
    stream.addEventListener("error", () => { if (stream) { end(); complain("the server does not answer; is fivefold web still running?"); } });
  };
  const complain = (text) => {
    const line = document.createElement("p");
    line.className = "mistake";
    line.setAttribute("role", "alert");
    line.textContent = text;
    found.replaceChildren(line);
  };
  const address = () => { const url = target(worker); url.searchParams.set("run", "1"); return url; };
  worker.addEventListener("submit", (event) => { event.preventDefault(); const url = address(); history.pushState(null, "", url); begin(url); });
  stop.addEventListener("click", () => { end(); complain("stopped"); });
  if (found.dataset.run) begin(new URL(location.href));
}
dress(document);

// What takes a while is asked for when it is opened.
function later(root) {
  for (const part of root.querySelectorAll("details [data-later]")) {
    const open = () => {
      if (!part.closest("details").open || part.dataset.asked) return;
      part.dataset.asked = "yes";
      fetch(part.dataset.later).then((answer) => answer.text()).then((text) => part.replaceChildren(...parser.parseFromString(text, "text/html").body.childNodes));
    };
    part.closest("details").addEventListener("toggle", open);
    open();
  }
}
later(document);

// What still changes is asked again, as long as somebody looks.
setInterval(() => {
  const live = document.querySelector("[data-poll]");
  if (live && !document.hidden && !document.body.classList.contains("busy")) go(location.href, { push: "", quiet: true });
}, 2000);
