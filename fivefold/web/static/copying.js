// Buttons that copy a text (data-copy; without a text, the address of the page) or save the file next to them (data-save).

import { showTipBelow } from "./tooltip.js";

/** Save text or bytes as a file. */
export function saveFile(name, data, type = "text/plain") {
  const link = Object.assign(document.createElement("a"), { download: name, href: URL.createObjectURL(new Blob([data], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy], [data-save]");
  if (!button) return;
  if (button.dataset.save) return saveFile(button.dataset.save, button.closest(".file").querySelector("pre").textContent);
  const text = button.dataset.copy || location.href;
  const isCopied = await navigator.clipboard?.writeText(text).then(() => true, () => false);
  showTipBelow(isCopied ? "copied" : text, button); // a text that could not be copied can be read
});
