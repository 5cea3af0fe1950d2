// Files that are dropped on a page, or chosen, are sent to its server, which runs on this computer, and then read there.

import { showPage } from "./navigation.js";
import { buildUrl } from "./question.js";
import { endWork, showLine, showProgress } from "./stream.js";

/** Send files, each of at most `largest` bytes, and show what is in them. */
async function readFiles(files, largest) {
  const names = [];
  endWork();
  for (const { name, size } of files) if (size > largest) return showLine(
    "mistake",
    `${name} has ${writeMegabytes(size)} MB, and this page reads up to ${writeMegabytes(largest)}: read it on the command line`,
  );
  for (const [place, file] of [...files].entries()) {
    const { file: name, detail } = await sendFile(file, files.length > 1 ? ` (${place + 1} of ${files.length})` : "");
    if (!name) {
      endWork();
      return showLine("mistake", detail ?? `${file.name} could not be read`);
    }
    names.push(name);
  }
  const url = buildUrl();
  url.searchParams.delete("files");
  for (const name of names) url.searchParams.append("files", name);
  url.searchParams.set("run", "1");
  showPage(url, { push: "push" });
}

/** Send a file, show how far it is, and return the server's answer: the file's name there, or what is wrong with it. */
function sendFile(file, place) {
  const size = writeMegabytes(file.size);
  return new Promise((resolve) => {
    const request = new XMLHttpRequest(); // fetch does not tell how much it has sent
    request.upload.onprogress = ({ loaded }) => {
      showProgress(`copying ${file.name}${place}: ${writeMegabytes(loaded)} of ${size} MB`, loaded, file.size);
    };
    request.onload = () => resolve(request.response ?? {});
    request.onerror = () => resolve({});
    request.responseType = "json";
    request.open("POST", `/files?name=${encodeURIComponent(file.name)}`);
    request.send(file);
    showProgress(`copying ${file.name}${place}`);
  });
}
const writeMegabytes = (bytes) => Math.ceil(bytes / 1e6).toLocaleString("en");

for (const area of document.querySelectorAll("[data-drop]")) {
  area.querySelector("[data-chosen]").addEventListener("change", (event) => {
    if (event.target.files.length) readFiles([...event.target.files], Number(area.dataset.largest));
    event.target.value = "";
  });
  for (const name of ["dragover", "dragleave", "drop"]) area.addEventListener(name, (event) => {
    event.preventDefault();
    area.classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files.length) readFiles([...event.dataTransfer.files], Number(area.dataset.largest));
  });
}
