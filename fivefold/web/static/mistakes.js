// The mistake of a question is also said beside its control: the answer may be far from it, or out of sight.

import { form } from "./question.js";

const NOTE = "mistake-of-control";

/** Repeat the mistake of the answer beside the control that it names, and nowhere else. */
export function markMistake() {
  const old = document.getElementById(NOTE);
  if (old) {
    const marked = document.querySelector(`[aria-describedby=${NOTE}]`);
    marked?.removeAttribute("aria-describedby");
    marked?.removeAttribute("aria-invalid");
    old.remove();
  }
  const mistake = document.querySelector("#answer > .mistake[data-field]");
  const controls = [...(form?.elements ?? [])].filter((field) => field.name === mistake?.dataset.field);
  const control = controls[mistake?.dataset.entry] ?? controls[0]; // a list has a control for each entry
  if (!control) return;
  const value = new URL(location.href).searchParams.get(control.name); // which the server has left out
  if (value !== null && ["text", "textarea"].includes(control.type) && !control.closest("[data-grow]")) control.value = value;
  const note = document.createElement("small");
  Object.assign(note, { id: NOTE, textContent: mistake.textContent });
  control.after(note);
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-describedby", NOTE);
  for (let fold = control.closest("details"); fold && fold.id !== "asked"; fold = fold.parentElement.closest("details")) fold.open = true;
}
