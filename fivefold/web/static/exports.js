// Every table can be saved as CSV and JSON, every picture as SVG and PNG. Numbers are saved in full: bytes and seconds.

import { saveFile } from "./copying.js";

const EDGE = 12; // pixels around a picture
const SCALE = 2; // pixels of a PNG for each of the page

/** Add the buttons below the tables and pictures of a part of the page. */
export function addSaveButtons(root) {
  for (const region of root.querySelectorAll(".scroll[aria-label]")) {
    const label = region.getAttribute("aria-label");
    if (region.querySelector("table")?.tHead && !region.closest(".book")) addBar(region, TABLE_FORMATS, label, label);
  }
  for (const table of root.querySelectorAll("table.parts")) {
    const above = table.previousElementSibling;
    const heading = above?.tagName === "H3" ? above : table.closest("details, .card")?.querySelector("summary, h2");
    const label = heading?.firstChild?.textContent.trim() ?? "table";
    addBar(table, TABLE_FORMATS, label, label);
  }
  for (const figure of root.querySelectorAll("figure")) {
    const picture = figure.querySelector("svg.chart");
    if (!picture) continue;
    const label = picture.getAttribute("aria-label") || "picture";
    addBar(figure, PICTURE_FORMATS, label, figure.closest("section")?.querySelector("h2, h3")?.firstChild?.textContent ?? label);
  }
}

function addBar(above, formats, label, title) {
  if (above.nextElementSibling?.className === "saves") return;
  const bar = document.createElement("div");
  bar.className = "saves";
  for (const format of Object.keys(formats)) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: format });
    button.setAttribute("aria-label", `save ${label} as ${format}`);
    button.dataset.file = `${makeFileName(title)}.${format.toLowerCase()}`;
    bar.append(button);
  }
  above.after(bar);
}

document.addEventListener("click", ({ target: button }) => {
  if (!button.matches?.(".saves button")) return;
  const above = button.parentElement.previousElementSibling, format = button.textContent;
  if (format in TABLE_FORMATS) TABLE_FORMATS[format](button.dataset.file, above.querySelector("table") ?? above);
  else PICTURE_FORMATS[format](button.dataset.file, above.querySelector("svg.chart"));
});

const TABLE_FORMATS = {
  CSV: (name, table) => saveFile(name, writeCsv(readRows(table)), "text/csv"),
  JSON: (name, table) => saveFile(name, JSON.stringify(readRows(table), null, 2), "application/json"),
};
const PICTURE_FORMATS = {
  SVG: async (name, picture) => saveFile(name, (await writeSvg(picture)).text, "image/svg+xml"),
  PNG: async (name, picture) => saveFile(name, await paintPng(picture), "image/png"),
};

function makeFileName(text) {
  return text.trim().toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "fivefold";
}

/** Return the rows of a table that are shown, as objects by heading; cells with a box to tick are left out. */
function readRows(table) {
  const names = table.tHead ? [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim()) : ["name", "value", "share"];
  const readCell = ({ dataset: { value }, textContent }) => (value !== undefined && value !== "" ? Number(value) : textContent.trim());
  const readRow = (row) => [...row.cells].flatMap((cell, place) => (cell.querySelector("input") ? [] : [[names[place] || "name", readCell(cell)]]));
  return [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => Object.fromEntries(readRow(row)));
}

function writeCsv(rows) {
  const quote = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  const names = Object.keys(rows[0] ?? {});
  const lines = [names, ...rows.map((row) => names.map((name) => row[name]))];
  return `${lines.map((cells) => cells.map(quote).join(",")).join("\r\n")}\r\n`;
}

/** Return a picture as the text of an SVG file with its style sheet, and its size in pixels. */
async function writeSvg(picture) {
  const rules = await (await fetch("/static/picture-file.css")).text();
  const { x, y, width, height } = picture.getBBox(), shown = picture.getBoundingClientRect();
  const copy = picture.cloneNode(true);
  for (const element of copy.querySelectorAll("[data-tip]")) {
    const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
    title.textContent = element.dataset.tip;
    element.append(title);
    element.removeAttribute("data-tip");
  }
  const place = { x: EDGE - x, y: EDGE - y, width: shown.width, height: shown.height, overflow: "visible" };
  for (const [name, value] of Object.entries(place)) copy.setAttribute(name, value);
  const [fileWidth, fileHeight] = [Math.ceil(width + 2 * EDGE), Math.ceil(height + 2 * EDGE)];
  const text = `<svg xmlns="http://www.w3.org/2000/svg" width="${fileWidth}" height="${fileHeight}"><style><![CDATA[${rules}]]></style>`
    + `<rect class="ground" width="100%" height="100%"/>${new XMLSerializer().serializeToString(copy)}</svg>`;
  return { text, width: fileWidth, height: fileHeight };
}

async function paintPng(picture) {
  const { text, width, height } = await writeSvg(picture), image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: width * SCALE, height: height * SCALE });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}
