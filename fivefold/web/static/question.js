// The question of a page: the form with its controls, which stand anywhere on the page, and the URL that they make.

/** The form of the question, or null on a page that asks nothing. @type {HTMLFormElement | null} */
export const form = document.getElementById("asking");

/** Whether the answer of this page is streamed: it takes long, and is asked for with a button. */
export const isStreamed = Boolean(form?.dataset.stream);

const SHAPE = ["layers", "width", "heads", "kv_heads", "ffn", "vocab"]; // of another model, these are other numbers

const readControls = () => (form ? String(new URLSearchParams(new FormData(form))) : "");
let answered = readControls(); // the controls when the answer on the page was asked for

/** Note that the page answers what the controls say now. */
export function markAnswered() { answered = readControls(); }

/** Return whether the controls differ from what the page answers. */
export const isChanged = () => readControls() !== answered;

/** Return the URL of the form's current question. `changed`: the name of the control that was changed. */
export function buildUrl(changed) {
  const url = new URL(form.action, location.href);
  url.search = new URL(location.href).pathname === url.pathname ? location.search : "";
  const names = new Set([...form.elements].map((field) => field.name).filter(Boolean));
  names.forEach((name) => url.searchParams.delete(name));
  for (const [name, value] of new FormData(form)) if (isStated(name, value)) url.searchParams.append(name, value);
  if (form.elements[changed]?.dataset?.action) url.pathname = form.elements[changed].dataset.action; // fills in the others
  if (changed === "model") SHAPE.forEach((name) => url.searchParams.delete(name));
  if (changed === "config") SHAPE.filter((name) => !names.has(name)).forEach((name) => url.searchParams.delete(name));
  return url;
}

/** Return the URL of a link with the controls that were changed after the link was made, unless it sets them itself. */
export function addEdits(url) {
  const before = new URLSearchParams(answered), now = new URLSearchParams(readControls());
  const values = (question, name) => question.getAll(name).filter(Boolean).join("\n");
  for (const name of new Set(now.keys())) {
    const isCarried = Boolean(form.elements[name]?.dataset?.action); // a long text, which links leave out
    const isLinked = url.searchParams.has(name) && values(url.searchParams, name) !== values(before, name);
    if (isLinked || (values(before, name) === values(now, name) && !(isCarried && values(now, name)))) continue;
    url.searchParams.delete(name);
    for (const value of now.getAll(name)) if (isStated(name, value)) url.searchParams.append(name, value);
  }
  return url;
}

// An empty control is its default, except the model, which has none.
const isStated = (name, value) => value !== "" || name === "model" || name === "machine";
