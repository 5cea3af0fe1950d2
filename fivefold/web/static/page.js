// The behaviour of the page. A page also works without scripts: every choice is a link, every form a GET. With scripts, a
// change fetches the page of the new URL and swaps the parts marked data-live; the URL always contains the full question.
"use strict";
document.documentElement.classList.add("scripted");

const fold = document.getElementById("asked"); // controls at the side, or above in a narrow window
if (fold && matchMedia("(max-width: 860px)").matches) fold.open = false;

document.querySelector("header nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

const parser = new DOMParser();
const form = document.getElementById("asking"); // the question; its controls stand anywhere on the page
const worker = form?.dataset.stream ? form : null; // a page whose answer is streamed
const said = () => (form ? String(new URLSearchParams(new FormData(form))) : ""); // by the controls
let running = null, waiting = null, typedLast = null, asked = said(), shown = location.pathname + location.search;

// Return the URL of the form's current question. `changed`: the name of the control that was changed.
function target(changed) {
  const url = new URL(form.action, location.href);
  url.search = new URL(location.href).pathname === url.pathname ? location.search : "";
  const names = new Set([...form.elements].map((field) => field.name).filter(Boolean));
  names.forEach((name) => url.searchParams.delete(name));
  for (const [name, value] of new FormData(form)) if (value !== "" || name === "model") url.searchParams.append(name, value);
  if (changed === "config" || changed === "model") for (const name of ["layers", "width", "heads", "kv_heads", "ffn", "vocab"]) if (changed === "model" || !names.has(name)) url.searchParams.delete(name);
  return url;
}

// Return the URL of a link with the controls that were changed after the link was made, unless it sets them itself.
function withEdits(url) {
  const before = new URLSearchParams(asked), now = new URLSearchParams(said());
  const values = (question, name) => question.getAll(name).filter(Boolean).join("\n");
  for (const name of new Set(now.keys())) {
    const isLinked = url.searchParams.has(name) && values(url.searchParams, name) !== values(before, name);
    if (isLinked || values(before, name) === values(now, name)) continue;
    url.searchParams.delete(name);
    for (const value of now.getAll(name)) if (value || name === "model") url.searchParams.append(name, value);
  }
  return url;
}

// Show the page of a URL. `push`: "push" or "replace" the history entry, or leave it; `typed`: the control that caused
// it, which keeps its text; `quiet`: only refresh what may have changed; `isBack`: the URL comes from a history entry.
async function go(url, { push = "", typed = null, quiet = false, isBack = false } = {}) {
  running?.abort();
  clearTimeout(waiting);
  if (typed === null && !quiet) typedLast = null;
  const mine = (running = new AbortController());
  if (!quiet) document.body.classList.add("busy");
  try {
    const answer = await fetch(url, { signal: mine.signal, headers: { accept: "text/html" } });
    if (!answer.headers.get("content-type")?.startsWith("text/html")) return location.assign(url);
    const next = parser.parseFromString(await answer.text(), "text/html");
    if (mine.signal.aborted) return;
    const to = new URL(url, location.href);
    if (push && to.href !== location.href) history[`${push}State`](null, "", to);
    shown = location.pathname + location.search;
    if (!quiet) restore(next, typed);
    asked = said();
    swap(next, { quiet, isBack });
    document.title = next.title;
    if (isBack) recall();
    if (!quiet) work(answer.ok);
  } catch (error) {
    if (error.name !== "AbortError" && !quiet) location.assign(url);
  } finally {
    if (running === mine) document.body.classList.remove("busy");
  }
}

// Set every control to the value in the new page, except the one the user is typing in.
function restore(next, typed) {
  const fresh = next.getElementById("asking");
  if (!form || !fresh) return; // an error, of a question whose controls stay to be corrected
  const growing = next.querySelectorAll("[data-grow]");
  document.querySelectorAll("[data-grow]").forEach((old, place) => {
    if (growing[place] && !old.contains(typed)) old.replaceChildren(...growing[place].childNodes);
  });
  for (const field of form.elements) {
    const other = field.name && field !== typed && !field.closest("[data-grow]") && fresh.elements.namedItem(field.name);
    if (!other) continue;
    if (field.tagName === "SELECT" && field.innerHTML !== other.innerHTML) field.replaceChildren(...other.cloneNode(true).childNodes);
    if (field.type === "checkbox") field.checked = other.checked;
    else if (field.value !== other.value) field.value = other.value;
  }
  const folded = (page) => [...page.querySelectorAll("details:not(#asked)")].filter((each) => !each.closest("[data-live]"));
  const wanted = folded(next); // those in which something is said
  folded(document).forEach((old, place) => { if (wanted[place]?.open) old.open = true; });
}

// Replace the live parts of the page, and keep what was opened, sorted, filtered or scrolled in them.
function swap(next, { quiet, isBack }) {
  const focused = document.activeElement?.dataset?.key;
  for (const old of document.querySelectorAll("[data-live]")) {
    const fresh = next.getElementById(old.id);
    if (!fresh || (quiet && fresh.innerHTML === sources.get(old))) continue;
    sources.set(old, fresh.innerHTML);
    hideTip();
    const again = isBack ? () => {} : remembered(old);
    keepPictures(old, fresh);
    old.replaceChildren(...fresh.childNodes);
    if (fresh.dataset.poll) old.dataset.poll = fresh.dataset.poll;
    else delete old.dataset.poll;
    dress(old);
    later(old);
    again();
    if (old.id === "answer") remember();
  }
  if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}
const sources = new WeakMap([...document.querySelectorAll("[data-live]")].map((each) => [each, each.innerHTML]));

// Until the new pictures are loaded, the former ones stay, pale: nothing below them moves.
function keepPictures(old, fresh) {
  const [former, next] = [old, fresh].map((page) => page.querySelector("#over-time"));
  if (!former || !next?.dataset.later) return;
  next.replaceChildren(...former.childNodes);
  next.setAttribute("aria-busy", "true");
}

function remembered(root) {
  const named = (all, name) => [...all].map((each) => [name(each), each]);
  const open = [...root.querySelectorAll("details[open] > summary")].map((each) => each.textContent);
  const sorted = [...root.querySelectorAll("th[aria-sort]")].map((each) => [each.textContent, each.getAttribute("aria-sort")]);
  const words = named(root.querySelectorAll("[data-filter]"), (each) => each.dataset.filter);
  const scrolled = named(root.querySelectorAll(".scroll"), (each) => each.getAttribute("aria-label")).map(([name, each]) => [name, each.scrollLeft, each.scrollTop]);
  const ticked = [...root.querySelectorAll("form input[type=checkbox]:checked")].map((each) => each.value);
  return () => {
    for (const box of root.querySelectorAll("form input[type=checkbox]")) if (ticked.includes(box.value)) { box.checked = true; count(box.form); }
    for (const each of root.querySelectorAll("details > summary")) if (open.includes(each.textContent)) each.parentElement.open = true;
    for (const [text, order] of sorted) for (const each of root.querySelectorAll("th[data-sort]")) if (each.textContent === text) sort(each, order);
    for (const [table, old] of words) {
      const field = old.value && root.querySelector(`[data-filter="${table}"]`);
      if (field) { field.value = old.value; filter(field); }
    }
    for (const [name, left, top] of scrolled) root.querySelector(`.scroll[aria-label="${CSS.escape(name ?? "")}"]`)?.scrollTo(left, top);
  };
}

// Store sorting, filters and ticked boxes of an answer in its history entry, to restore them on the way back.
function note() {
  const all = (selector, value) => [...document.querySelectorAll(`#answer ${selector}`)].map(value);
  history.replaceState({
    sorted: all("th[aria-sort]", (each) => [each.textContent, each.getAttribute("aria-sort")]),
    words: all("[data-filter]", (each) => [each.dataset.filter, each.value]),
    ticked: all("form input[type=checkbox]:checked", (each) => each.value),
    selected: all("#selected li:has(:checked) a", (each) => [each.textContent, each.getAttribute("href")]),
  }, "");
}
function recall() {
  const { sorted = [], words = [], ticked = [], selected = [] } = history.state ?? {}, answer = document.getElementById("answer");
  if (!answer) return;
  for (const [text, order] of sorted) for (const each of answer.querySelectorAll("th[data-sort]")) if (each.textContent === text) sort(each, order);
  for (const [table, value] of words) {
    const field = answer.querySelector(`[data-filter="${CSS.escape(table)}"]`);
    if (field) { field.value = value; filter(field); }
  }
  if (document.getElementById("selected")) for (const [layout, href] of selected) if (!boxes().some((each) => each.value === layout)) addSelected(layout, href);
  for (const box of answer.querySelectorAll("form input[type=checkbox]")) if (ticked.includes(box.value)) { box.checked = true; count(box.form); }
}

// Submit typed text after a pause. A series of changes of one control is one history entry.
document.addEventListener("input", (event) => {
  const field = event.target;
  if (worker && field.form === form && "reload" in field.dataset) { // other fields belong to this choice
    const url = target(field.name);
    url.searchParams.delete("run");
    return go(url, { push: "push" });
  }
  if (!form || worker || field.form !== form) return;
  running?.abort(); // its answer would be of what was asked before
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    const push = typedLast === field ? "replace" : "push";
    typedLast = field;
    go(target(field.name), { push, typed: field });
  }, field.tagName === "SELECT" ? 0 : 250);
});
document.addEventListener("submit", (event) => {
  if (event.target !== form) return;
  event.preventDefault();
  const isNew = said() !== asked || (worker && !new URL(location.href).searchParams.get("run"));
  go(isNew ? target() : location.href, { push: isNew ? "push" : "" });
});
document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-live] a[href]");
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
  const url = new URL(link.getAttribute("href"), location.href); // of a link in a picture, href is no text
  if (url.origin !== location.origin || url.pathname !== location.pathname) return;
  event.preventDefault();
  go(form && !worker ? withEdits(url) : url, { push: "push" });
});
addEventListener("popstate", () => { if (location.pathname + location.search !== shown) go(location.href, { isBack: true }); });

// Arrow keys move along a row of choices.
document.addEventListener("keydown", (event) => {
  const row = event.target.closest?.(".options");
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === "Escape") hideTip();
  if (!row || !step) return;
  const all = [...row.children];
  all[(all.indexOf(event.target) + step + all.length) % all.length].focus();
  event.preventDefault();
});

// Show a tooltip for the element under the mouse or with the focus.
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

// Save text or bytes as a file.
function save(name, data, type = "text/plain") {
  const link = Object.assign(document.createElement("a"), { download: name, href: URL.createObjectURL(new Blob([data], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy], [data-save]");
  if (!button) return;
  if (button.dataset.save) return save(button.dataset.save, button.closest(".file").querySelector("pre").textContent);
  const box = button.getBoundingClientRect(), text = button.dataset.copy || location.href;
  let isCopied = true;
  try { await navigator.clipboard.writeText(text); } catch { isCopied = false; }
  tell({ dataset: { tip: isCopied ? "copied" : text } }, box.left, box.bottom - 12);
});

// Every table can be saved as CSV and JSON, every picture as SVG and PNG. Numbers are saved in full: bytes and seconds.
function offer(root) {
  const button = (text, action, label) => {
    const each = Object.assign(document.createElement("button"), { type: "button", textContent: text });
    each.setAttribute("aria-label", `save ${label} as ${text}`);
    each.addEventListener("click", action);
    return each;
  };
  const bar = (below, buttons) => {
    const line = document.createElement("div");
    line.className = "saves";
    line.append(...buttons);
    below.after(line);
  };
  const forTable = (table, label) => [
    button("CSV", () => save(`${fileName(label)}.csv`, csv(records(table)), "text/csv"), label),
    button("JSON", () => save(`${fileName(label)}.json`, JSON.stringify(records(table), null, 2), "application/json"), label),
  ];
  for (const region of root.querySelectorAll(".scroll[aria-label]")) {
    const table = region.querySelector("table"), label = region.getAttribute("aria-label");
    if (!table?.tHead || region.closest(".book") || region.nextElementSibling?.className === "saves") continue;
    bar(region, forTable(table, label));
  }
  for (const table of root.querySelectorAll("table.parts")) {
    const above = table.previousElementSibling, heading = above?.tagName === "H3" ? above : table.closest("details, .card")?.querySelector("summary, h2");
    const label = heading?.firstChild?.textContent.trim() ?? "table";
    if (table.nextElementSibling?.className !== "saves") bar(table, forTable(table, label));
  }
  for (const figure of root.querySelectorAll("figure")) {
    const picture = figure.querySelector("svg.chart"), label = picture?.getAttribute("aria-label") || "picture";
    if (!picture || figure.nextElementSibling?.className === "saves") continue;
    const name = fileName(figure.closest("section")?.querySelector("h2, h3")?.firstChild?.textContent ?? label);
    bar(figure, [
      button("SVG", async () => save(`${name}.svg`, (await standalone(picture)).text, "image/svg+xml"), label),
      button("PNG", async () => save(`${name}.png`, await painted(picture), "image/png"), label),
    ]);
  }
}
const fileName = (text) => text.trim().toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "fivefold";
function records(table) {
  const names = [...(table.tHead?.rows[0].cells ?? [])].map((each) => each.textContent.trim());
  if (!table.tHead) names.push("name", "value", "share");
  return [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => Object.fromEntries(
    [...row.cells].flatMap((cell, place) => {
      if (cell.querySelector("input")) return [];
      const { value } = cell.dataset;
      return [[names[place] || "name", value !== undefined && value !== "" ? Number(value) : cell.textContent.trim()]];
    })));
}
function csv(rows) {
  const quote = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  const names = Object.keys(rows[0] ?? {});
  return [names, ...rows.map((row) => names.map((name) => row[name]))].map((cells) => cells.map(quote).join(",")).join("\r\n") + "\r\n";
}

// Return a picture as the text of an SVG file with its style sheet, and its size.
async function standalone(picture) {
  const rules = await (await fetch("/static/picture-file.css")).text();
  const { x, y, width, height } = picture.getBBox(), size = picture.getBoundingClientRect(), edge = 12;
  const copy = picture.cloneNode(true);
  for (const each of copy.querySelectorAll("[data-tip]")) {
    const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
    title.textContent = each.dataset.tip;
    each.append(title);
    each.removeAttribute("data-tip");
  }
  for (const [name, value] of Object.entries({ x: edge - x, y: edge - y, width: size.width, height: size.height, overflow: "visible" })) copy.setAttribute(name, value);
  const [wide, high] = [Math.ceil(width + 2 * edge), Math.ceil(height + 2 * edge)];
  const text = `<svg xmlns="http://www.w3.org/2000/svg" width="${wide}" height="${high}"><style><![CDATA[${rules}]]></style>`
    + `<rect class="ground" width="100%" height="100%"/>${new XMLSerializer().serializeToString(copy)}</svg>`;
  return { text, wide, high };
}
async function painted(picture) {
  const { text, wide, high } = await standalone(picture), image = new Image(), scale = 2;
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: wide * scale, height: high * scale });
  canvas.getContext("2d").drawImage(image, 0, 0, wide * scale, high * scale);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

// The browser keeps saved plans, by name, and the last ones; nothing of them is sent anywhere.
const RECENT = 10;
const stored = (key) => { try { return JSON.parse(localStorage.getItem(`fivefold.${key}`)) ?? []; } catch { return []; } };
function store(key, plans) {
  try { localStorage.setItem(`fivefold.${key}`, JSON.stringify(plans)); } catch { /* a private window */ }
  list();
}
function planName() {
  const more = [...new URLSearchParams(location.search)].filter(([name]) => !["model", "machine", "layout", "rank", "config"].includes(name));
  const name = `${document.title.split(" – ")[0]}: ${form.elements.namedItem("layout").value}`;
  return [name, ...more.map(([name, value]) => `${name}=${value}`)].join(" ");
}
function remember() {
  if (!document.getElementById("plans") || document.querySelector("#answer .mistake")) return;
  const url = location.pathname + location.search, name = planName();
  const isEdited = (each) => each.url === url || each.name === name;
  store("recent", [{ name, url }, ...stored("recent").filter((each) => !isEdited(each))].slice(0, RECENT));
  const field = document.querySelector("#saving [name=name]");
  if (document.activeElement !== field) field.value = name.slice(0, 200);
}
function list() {
  for (const key of ["saved", "recent"]) {
    const lines = stored(key).map(({ name, url }) => {
      const line = document.createElement("li"), link = document.createElement("a");
      link.textContent = name;
      link.setAttribute("href", url);
      line.append(link);
      if (key === "saved") {
        const drop = Object.assign(document.createElement("button"), { type: "button", textContent: "×" });
        drop.setAttribute("aria-label", `forget ${name}`);
        drop.addEventListener("click", () => store("saved", stored("saved").filter((each) => each.name !== name)));
        line.append(drop);
      }
      return line;
    });
    document.getElementById(key)?.replaceChildren(...lines);
  }
}
document.getElementById("saving")?.addEventListener("submit", (event) => {
  event.preventDefault();
  const name = event.target.elements.namedItem("name").value.trim(), url = location.pathname + location.search;
  if (name) store("saved", [{ name, url }, ...stored("saved").filter((each) => each.name !== name)]);
});
addEventListener("storage", list); // another tab
remember();
list();

// Tables: headings sort, text filters, boxes select up to a limit; in a narrow window each cell shows its heading.
function dress(root) {
  offer(root);
  for (const table of root.querySelectorAll("table.cards")) {
    const names = [...table.tHead.rows[0].cells].map((each) => each.textContent);
    for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, place) => { cell.dataset.name = names[place]; });
  }
  for (const heading of root.querySelectorAll("th[data-sort]")) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => { sort(heading, heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending"); note(); });
  }
}
function sort(heading, order) {
  const column = [...heading.parentElement.children].indexOf(heading);
  const down = order === "descending";
  for (const each of heading.parentElement.children) each.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", order);
  const body = heading.closest("table").tBodies[0];
  const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
  body.append(...[...body.rows].sort((a, b) => (down ? -1 : 1) * compare(key(a), key(b))));
}
function filter(field) {
  const table = document.getElementById(field.dataset.filter);
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  const says = (text) => words.every((word) => text.toLowerCase().includes(word));
  for (const row of table.tBodies[0].rows) row.hidden = !says(row.textContent);
  for (const point of table.closest("[data-live]").querySelectorAll("svg.chart a")) point.classList.toggle("out", !says(point.getAttribute("aria-label")));
}
function count(picks) {
  const button = picks.querySelector("button[data-most]"), picked = picks.querySelectorAll("input[type=checkbox]:checked").length;
  if (!button) return;
  button.disabled = picked < 2 || picked > Number(button.dataset.most);
  highlight();
  button.textContent = picked < 2 ? "Compare" : picked > Number(button.dataset.most) ? `at most ${button.dataset.most}` : `Compare ${picked}`;
}
document.addEventListener("input", (event) => {
  const field = event.target;
  if (field.dataset?.filter) filter(field);
  else if (field.type === "checkbox" && field.form && field.form !== form) count(field.form);
  else return;
  note();
});

// A point or line of a plot is selected to be compared with a click while the button is pressed, with Shift and a click,
// or with Space. It has a box in the table, or one of its own, and stays highlighted in both plots.
const selects = () => document.querySelector("[data-selects]")?.getAttribute("aria-pressed") === "true";
const boxes = () => [...document.querySelectorAll("#answer .pick input[name=layout]:is([type=checkbox])")];
const questionOf = (entries) => [...entries].filter(([name]) => name !== "layout").map(String).sort().join("\n");
// Return the layout of a plan's URL, or null if it differs from the question that is compared in more than its layout.
function comparable(href) {
  const plan = new URL(href, location.href).searchParams;
  const hidden = [...document.querySelectorAll("#answer .pick input[type=hidden]")].map((each) => [each.name, each.value]);
  return questionOf(plan) === questionOf(hidden) ? plan.get("layout") : null;
}
function select(link) {
  const form = document.querySelector("#answer .pick"), href = link.getAttribute("href"), layout = comparable(href);
  if (layout === null) {
    const box = link.getBoundingClientRect();
    return tell({ dataset: { tip: "its precision or reduction of gradients is its own: open its plan to compare it" } }, box.left, box.bottom);
  }
  const known = boxes().find((each) => each.value === layout);
  if (known?.closest("#selected")) known.closest("li").remove();
  else if (known) known.checked = !known.checked;
  else addSelected(layout, href);
  count(form);
  note();
}
function addSelected(layout, href) {
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
function highlight() {
  const chosen = new Set(boxes().filter((each) => each.checked).map((each) => each.value));
  for (const link of document.querySelectorAll("#answer svg.chart a[href]")) {
    link.firstElementChild.classList.toggle("selected", chosen.size > 0 && chosen.has(comparable(link.getAttribute("href"))));
  }
}
document.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-selects]");
  if (button) button.setAttribute("aria-pressed", String(!selects()));
  const link = event.target.closest?.("#answer svg.chart a[href]");
  if (!link || !document.getElementById("selected") || !(selects() || event.shiftKey)) return;
  event.preventDefault();
  select(link);
});
document.addEventListener("keydown", (event) => {
  const link = event.key === " " && document.getElementById("selected") && event.target.closest?.("#answer svg.chart a[href]");
  if (!link) return;
  event.preventDefault();
  select(link);
});

// A field that takes several values always has one empty input at its end.
document.addEventListener("input", (event) => {
  const last = event.target.closest?.("[data-grow]")?.lastElementChild;
  if (last !== event.target || !last.value) return;
  const next = last.cloneNode();
  next.value = "";
  last.after(next);
});

// A row and its point, which link to the same plan, are highlighted together; a click anywhere in a row opens the plan.
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

// Long work (a search, a dry run) streams its progress, then its result. Closing the stream ends the work at once; Stop
// asks for the result so far, and a second click ends the work.
const going = document.getElementById("going"), stop = document.getElementById("stop");
let stream = null, clock = null;
function end() { stream?.close(); stream = null; clearInterval(clock); if (worker) going.hidden = stop.hidden = true; }
function say(look, text) {
  const line = document.createElement("p");
  line.className = look;
  if (look === "mistake") line.setAttribute("role", "alert");
  line.textContent = text;
  document.getElementById("answer").replaceChildren(line);
}
function begin() {
  const found = document.getElementById("answer"), bar = going.querySelector("progress"), line = going.querySelector("p");
  found.replaceChildren();
  going.hidden = stop.hidden = false;
  stop.textContent = "Stop";
  bar.removeAttribute("value");
  let doing = "begins";
  const since = Date.now(), tick = () => { line.textContent = `${doing} · ${Math.round((Date.now() - since) / 1000)} s`; };
  tick();
  clock = setInterval(tick, 1000);
  stream = new EventSource(`${worker.dataset.stream}${location.search}`);
  stream.addEventListener("begun", (event) => { stop.dataset.work = JSON.parse(event.data); });
  stream.addEventListener("progress", (event) => {
    const [done, total, name] = JSON.parse(event.data);
    if (total && done) Object.assign(bar, { max: total, value: done });
    else bar.removeAttribute("value");
    const share = total && worker.dataset.of ? `${done.toLocaleString("en")} of ${total.toLocaleString("en")} ${worker.dataset.of}` : "";
    doing = [name, share].filter(Boolean).join(": ");
    tick();
  });
  stream.addEventListener("sketch", (event) => {
    found.replaceChildren(...parser.parseFromString(JSON.parse(event.data), "text/html").body.childNodes);
  });
  stream.addEventListener("found", (event) => {
    found.replaceChildren(...parser.parseFromString(JSON.parse(event.data), "text/html").body.childNodes);
    dress(found);
    later(found);
    recall();
    end();
  });
  stream.addEventListener("stopped", (event) => { end(); say("remark", JSON.parse(event.data)); });
  stream.addEventListener("mistake", (event) => { end(); say("mistake", JSON.parse(event.data)); });
  stream.addEventListener("error", () => { if (stream) { end(); say("mistake", "the server does not answer; is fivefold web still running?"); } });
}
function work(isAnswered = true) {
  if (!worker) return;
  end();
  if (isAnswered && new URL(location.href).searchParams.get("run")) begin();
}
stop?.addEventListener("click", () => {
  if (stop.dataset.work && stop.textContent === "Stop") {
    stop.textContent = "Stop now";
    fetch(`${worker.dataset.stream}/stop?work=${stop.dataset.work}`, { method: "POST" });
  } else { end(); say("remark", "Stopped before there was an answer."); }
});
work();
dress(document);
recall();

// Sections that take a while are requested when they are opened, or if they are not folded when they are near the window.
function later(root) {
  for (const part of root.querySelectorAll("[data-later]")) {
    const fold = part.closest("details");
    if (fold) {
      const open = () => {
        if (!fold.open || part.dataset.asked) return;
        part.textContent = "is computed …";
        load(part);
      };
      fold.addEventListener("toggle", open);
      open();
    } else near.observe(part);
  }
}
const near = new IntersectionObserver((entries) => {
  for (const { target: part, isIntersecting } of entries) {
    if (!part.isConnected) near.unobserve(part);
    else if (isIntersecting && !part.dataset.asked) setTimeout(() => { // the next change comes first
      if (part.isConnected && !part.dataset.asked) load(part);
    }, 100);
  }
}, { rootMargin: "300px" });
function load(part) {
  part.dataset.asked = "yes";
  fetch(part.dataset.later).then((answer) => answer.text()).then((text) => {
    const { body } = parser.parseFromString(text, "text/html"), mistake = body.querySelector("main .mistake");
    part.replaceChildren(...(mistake ? [mistake] : body.childNodes));
    part.removeAttribute("aria-busy");
    near.unobserve(part);
    dress(part);
  }, () => { part.textContent = ""; delete part.dataset.asked; });
}
later(document);

// Refresh what still changes while the page is visible; data-poll is the interval in milliseconds.
function poll() {
  const live = document.querySelector("[data-poll]");
  if (live && !document.hidden && !document.body.classList.contains("busy")) go(location.href, { quiet: true });
  setTimeout(poll, Number(live?.dataset.poll) || 2000);
}
setTimeout(poll, Number(document.querySelector("[data-poll]")?.dataset.poll) || 2000);

// Files that are dropped on the page, or chosen, are sent to its server, which runs on this computer, and then read.
async function read(files) {
  const line = going.querySelector("p"), names = [];
  end();
  going.hidden = false;
  for (const [place, file] of [...files].entries()) {
    line.textContent = `copying ${file.name} (${place + 1} of ${files.length})`;
    const answer = await fetch(`/files?name=${encodeURIComponent(file.name)}`, { method: "POST", body: file }).then((each) => each.json(), () => ({}));
    if (!answer.file) { end(); return say("mistake", answer.detail ?? `${file.name} could not be read`); }
    names.push(answer.file);
  }
  const url = target();
  url.searchParams.delete("files");
  for (const name of names) url.searchParams.append("files", name);
  url.searchParams.set("run", "1");
  go(url, { push: "push" });
}
for (const area of document.querySelectorAll("[data-drop]")) {
  area.querySelector("[data-chosen]").addEventListener("change", (event) => { if (event.target.files.length) read(event.target.files); event.target.value = ""; });
  for (const name of ["dragover", "dragleave", "drop"]) area.addEventListener(name, (event) => {
    event.preventDefault();
    area.classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files.length) read(event.dataTransfer.files);
  });
}
