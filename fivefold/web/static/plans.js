// The browser keeps saved plans, by name, and the last ones; nothing of them is sent anywhere.

import { form } from "./question.js";

const MAX_RECENT = 10;
const OMITTED = ["model", "machine", "layout", "rank", "config", "run_config"]; // of a plan's name: they are in the title, or no part of it

/** Add the plan of the page to the recent ones. */
export function rememberPlan() {
  if (!document.getElementById("plans") || document.querySelector("#answer .mistake")) return;
  const url = location.pathname + location.search, name = namePlan();
  const others = readPlans("recent").filter((plan) => plan.url !== url && plan.name !== name);
  storePlans("recent", [{ name, url }, ...others].slice(0, MAX_RECENT));
  const field = document.querySelector("#saving [name=name]");
  if (document.activeElement !== field) field.value = name.slice(0, 200);
}

/** List the saved and the recent plans. */
export function listPlans() {
  for (const key of ["saved", "recent"]) document.getElementById(key)?.replaceChildren(...readPlans(key).map((plan) => makeLine(plan, key)));
}

function makeLine({ name, url }, key) {
  const line = document.createElement("li"), link = document.createElement("a");
  link.textContent = name;
  link.setAttribute("href", url);
  line.append(link);
  if (key === "saved") {
    const drop = Object.assign(document.createElement("button"), { type: "button", textContent: "×" });
    drop.setAttribute("aria-label", `forget ${name}`);
    drop.addEventListener("click", () => storePlans("saved", readPlans("saved").filter((plan) => plan.name !== name)));
    line.append(drop);
  }
  return line;
}

function namePlan() {
  const settings = [...new URLSearchParams(location.search)].filter(([name]) => !OMITTED.includes(name));
  const plan = `${document.title.split(" – ")[0]}: ${form.elements.namedItem("layout").value}`;
  return [plan, ...settings.map(([name, value]) => `${name}=${value}`)].join(" ");
}

function readPlans(key) {
  try { return JSON.parse(localStorage.getItem(`fivefold.${key}`)) ?? []; } catch { return []; }
}

function storePlans(key, plans) {
  try { localStorage.setItem(`fivefold.${key}`, JSON.stringify(plans)); } catch { /* a private window */ }
  listPlans();
}

document.getElementById("saving")?.addEventListener("submit", (event) => {
  event.preventDefault();
  const name = event.target.elements.namedItem("name").value.trim(), url = location.pathname + location.search;
  if (name) storePlans("saved", [{ name, url }, ...readPlans("saved").filter((plan) => plan.name !== name)]);
});
addEventListener("storage", listPlans); // another tab
