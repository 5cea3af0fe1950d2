// Controls of the question beyond what the browser does by itself.

const asked = document.getElementById("asked"); // the fold of the controls: at the side, or above in a narrow window
if (asked && matchMedia("(max-width: 860px)").matches) asked.open = false;

document.querySelector("header nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

// Arrow keys move along a row of choices.
document.addEventListener("keydown", (event) => {
  const row = event.target.closest?.(".options");
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!row || !step) return;
  const choices = [...row.children];
  choices[(choices.indexOf(event.target) + step + choices.length) % choices.length].focus();
  event.preventDefault();
});

// A field with a list is selected once it is entered, so that typing replaces it and the list is not cut to what it holds.
let entered = null;
document.addEventListener("focusin", ({ target }) => {
  entered = target.list ? target : null;
  entered?.select();
});
document.addEventListener("click", ({ target }) => { // the click that enters it puts the cursor into the text
  if (target === entered && target.selectionStart === target.selectionEnd) target.select();
  entered = null;
});

// A field that takes several values always has one empty input at its end.
document.addEventListener("input", (event) => {
  const last = event.target.closest?.("[data-grow]")?.lastElementChild;
  if (last !== event.target || !last.value) return;
  const next = last.cloneNode();
  next.value = "";
  last.after(next);
});

// A file that is chosen for a text, or dropped on it, becomes the text. One that is too long is cut, which the server says.
for (const area of document.querySelectorAll("[data-text]")) {
  const text = area.querySelector("textarea"), chosen = area.querySelector("[data-chosen]");
  const readFile = async ([file]) => {
    if (!file) return;
    text.value = await file.slice(0, Number(area.dataset.text) + 1).text();
    text.dispatchEvent(new Event("input", { bubbles: true }));
  };
  chosen.addEventListener("change", async () => {
    await readFile(chosen.files);
    chosen.value = "";
  });
  for (const name of ["dragover", "dragleave", "drop"]) area.addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return; // dragged text is inserted by the browser
    event.preventDefault();
    area.classList.toggle("over", name === "dragover");
    if (name === "drop") readFile(event.dataTransfer.files);
  });
}
