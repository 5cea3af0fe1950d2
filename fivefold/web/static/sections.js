// Sections that take a while (data-later) are requested when they are opened, or, where they are not folded, when they
// are near the window.

import { dressTables } from "./tables.js";

const PAUSE = 100; // milliseconds in which the next change of the question comes first

/** Request the later sections of a part of the page once they are needed. */
export function loadSections(root) {
  for (const section of root.querySelectorAll("[data-later]")) {
    if (section.closest("details")) loadIfOpen(section);
    else { // a section that is near already is reported again
      near.unobserve(section);
      near.observe(section);
    }
  }
}

function loadIfOpen(section) {
  if (!section.closest("details").open || section.dataset.asked) return;
  section.textContent = "is computed …";
  load(section);
}
document.addEventListener("toggle", ({ target: fold }) => {
  for (const section of fold.querySelectorAll("[data-later]")) if (section.closest("details") === fold) loadIfOpen(section);
}, true); // it does not bubble

const near = new IntersectionObserver((entries) => {
  for (const { target: section, isIntersecting } of entries) {
    if (!section.isConnected) near.unobserve(section);
    else if (isIntersecting && !section.dataset.asked) setTimeout(() => {
      if (section.isConnected && !section.dataset.asked) load(section);
    }, PAUSE);
  }
}, { rootMargin: "300px" });

async function load(section) {
  const url = section.dataset.later;
  section.dataset.asked = "yes";
  const text = await fetch(url).then((answer) => answer.text()).catch(() => null);
  if (section.dataset.later !== url) return; // the question has changed meanwhile
  if (text === null) { // the next time that it is opened, it is requested again
    section.textContent = "";
    delete section.dataset.asked;
    return;
  }
  const { body } = new DOMParser().parseFromString(text, "text/html"), error = body.querySelector("main .mistake");
  const focused = section.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  section.replaceChildren(...(error ? [error] : body.childNodes));
  if (focused) section.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  section.dataset.asked = "done";
  section.removeAttribute("aria-busy");
  near.unobserve(section);
  dressTables(section);
}
