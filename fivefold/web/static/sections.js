// Sections that take a while (data-later) are requested when they are opened, or, where they are not folded, when they
// are near the window.

import { dressTables } from "./tables.js";

const PAUSE = 100; // milliseconds in which the next change of the question comes first

/** Request the later sections of a part of the page once they are needed. */
export function loadSections(root) {
  for (const section of root.querySelectorAll("[data-later]")) {
    const fold = section.closest("details");
    if (!fold) { near.observe(section); continue; }
    const open = () => {
      if (!fold.open || section.dataset.asked) return;
      section.textContent = "is computed …";
      load(section);
    };
    fold.addEventListener("toggle", open);
    open();
  }
}

const near = new IntersectionObserver((entries) => {
  for (const { target: section, isIntersecting } of entries) {
    if (!section.isConnected) near.unobserve(section);
    else if (isIntersecting && !section.dataset.asked) setTimeout(() => {
      if (section.isConnected && !section.dataset.asked) load(section);
    }, PAUSE);
  }
}, { rootMargin: "300px" });

async function load(section) {
  section.dataset.asked = "yes";
  const text = await fetch(section.dataset.later).then((answer) => answer.text()).catch(() => null);
  if (text === null) { // the next time that it is opened, it is requested again
    section.textContent = "";
    delete section.dataset.asked;
    return;
  }
  const { body } = new DOMParser().parseFromString(text, "text/html"), error = body.querySelector("main .mistake");
  section.replaceChildren(...(error ? [error] : body.childNodes));
  section.removeAttribute("aria-busy");
  near.unobserve(section);
  dressTables(section);
}
