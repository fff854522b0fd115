// Takes a chart or a table along: a menu at each of them saves it as a picture or as CSV, or copies the link.

import { toast } from "./dialog.js";
import { css, h } from "./dom.js";
import { save } from "./save.js";

const SHARP = 2; // pixels of the picture for each of the page
const MARGIN = 16;
const KINDS = "figure.chart, table, [role=grid]";
const outermost = (element) => element?.closest("figure.chart") ?? element?.closest(`${KINDS}, canvas`) ?? null;
const hasRows = (element) => Boolean(element.csv ?? element.querySelector("tr"));
let menu = null;
let at = null;

/** What can be shared in a view. */
const shareable = (main) =>
  [...main.querySelectorAll(`.view :is(${KINDS}, canvas)`)].filter(
    (one) => outermost(one) === one && one.clientWidth && !one.closest("[hidden]"),
  );

const titleOf = (element) =>
  element.querySelector(":scope > figcaption h3")?.textContent ||
  element.getAttribute("aria-label") ||
  element.closest("section")?.querySelector("h2")?.textContent ||
  element.closest("section")?.getAttribute("aria-label") ||
  document.title.split(" · ")[0];
function fileOf(element, ending) {
  const words = `${location.hash.split("?")[0]} ${titleOf(element)}`.toLowerCase().match(/[a-z0-9]+/g) ?? [];
  return `shoal-${words.join("-")}.${ending}`;
}

/** The same for the keyboard: commands of the palette. */
export const commands = (main) =>
  shareable(main).flatMap((element) => {
    const title = titleOf(element);
    return [
      { title: `Save ${title} as PNG`, hint: "action", run: () => savePicture(element) },
      ...(hasRows(element) ? [{ title: `Save ${title} as CSV`, hint: "action", run: () => saveCsv(element) }] : []),
    ];
  });

/** The menu stands at the chart or table that the pointer or the focus is at. */
export function watch(main) {
  const come = (event) => {
    const element = outermost(event.target);
    if (!element?.closest(".view") || (menu?.isConnected && (menu.open || at === element))) return;
    at = element;
    place(main, element);
  };
  main.addEventListener("pointerover", come);
  main.addEventListener("focusin", come);
}

function place(main, element) {
  const card = element.closest(".card") ?? element;
  const alone =
    card !== element && [...card.querySelectorAll(`${KINDS}, canvas`)].every((one) => outermost(one) === element);
  const corner = (alone ? card : element).getBoundingClientRect();
  menu?.remove();
  const item = (text, act) =>
    h(
      "button",
      {
        onclick: () => {
          menu.open = false;
          act();
        },
      },
      text,
    );
  menu = h(
    "details",
    {
      class: "export",
      onkeydown: (event) => {
        if (event.key === "Escape") menu.open = false;
      },
      onfocusout: (event) => {
        if (!menu.contains(event.relatedTarget)) menu.open = false;
      },
      style: {
        top: `${corner.top + scrollY - (alone ? 18 : 28)}px`,
        left: `${Math.min(corner.right, innerWidth - 8) - 34}px`,
      },
    },
    h("summary", { "aria-label": `Share ${titleOf(element)}`, title: "Share" }, "⤓"),
    h(
      "div",
      { class: "menu" },
      item("Save as PNG", () => savePicture(element)),
      hasRows(element) ? item("Save as CSV", () => saveCsv(element)) : null,
      item("Copy link", copyLink),
    ),
  );
  main.append(menu);
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    toast("Link copied");
  } catch {
    toast("Copy the link from the address bar");
  }
}

// -- tables --------------------------------------------------------------------------------

/** The rows of figures behind it: what it says it has, or what its table shows. */
function rowsOf(element) {
  if (element.csv) return element.csv();
  return [...element.querySelectorAll("tr")].map((row) =>
    [...row.children].map((cell) => cell.textContent.replace(/\s+/g, " ").trim()),
  );
}
// A spreadsheet would take a name that somebody chose for a formula.
const safe = (text) => (/^[=+\-@\t]/.test(text) && !Number.isFinite(Number(text)) ? `'${text}` : text);
const cell = (value) => {
  const text = safe(String(value ?? ""));
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
function saveCsv(element) {
  const lines = rowsOf(element).map((row) => row.map(cell).join(","));
  save(fileOf(element, "csv"), [`${lines.join("\n")}\n`]);
}

// -- pictures ------------------------------------------------------------------------------

/** Painted from what is on the screen: the page's security policy allows no picture that is made from markup. */
function savePicture(element) {
  const box = element.getBoundingClientRect();
  const canvas = h("canvas", {
    width: Math.ceil((box.width + 2 * MARGIN) * SHARP),
    height: Math.ceil((box.height + 2 * MARGIN) * SHARP),
  });
  const pen = canvas.getContext("2d");
  pen.scale(SHARP, SHARP);
  pen.fillStyle = css("--surface");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.translate(MARGIN - box.left, MARGIN - box.top);
  paint(pen, element);
  canvas.toBlob((blob) => save(fileOf(element, "png"), [blob]));
}

function paint(pen, element) {
  const look = getComputedStyle(element);
  if (look.display === "none" || look.visibility === "hidden" || element.matches(".options, .chart-bar, .unseen"))
    return;
  pen.save();
  pen.globalAlpha *= Number(look.opacity);
  if (element instanceof SVGElement && element.nodeName !== "svg") shape(pen, element, look);
  else if (!(element instanceof SVGElement)) ground(pen, element, look);
  for (const child of element.childNodes)
    if (child instanceof Element) paint(pen, child);
    else if (child instanceof Text && !(element instanceof SVGElement)) words(pen, child, look);
  pen.restore();
}

const clear = (color) => color === "none" || color === "transparent" || /, 0\)$/.test(color);
const font = (look) => `${look.fontStyle} ${look.fontWeight} ${look.fontSize} ${look.fontFamily}`;

function ground(pen, element, look) {
  const box = element.getBoundingClientRect();
  if (!clear(look.backgroundColor)) {
    pen.fillStyle = look.backgroundColor;
    pen.beginPath();
    pen.roundRect(box.x, box.y, box.width, box.height, parseFloat(look.borderTopLeftRadius) || 0);
    pen.fill();
  }
  if (parseFloat(look.borderBottomWidth) && look.borderBottomStyle !== "none") {
    pen.fillStyle = look.borderBottomColor;
    pen.fillRect(box.x, box.bottom - 1, box.width, 1);
  }
  if (element instanceof HTMLCanvasElement && element.width)
    pen.drawImage(element, box.x, box.y, box.width, box.height);
  if (look.overflowX !== "visible") {
    pen.beginPath();
    pen.rect(box.x, box.y, box.width, box.height);
    pen.clip();
  }
  const sign = getComputedStyle(element, "::before").content;
  if (/^"[^"]+"$/.test(sign)) {
    pen.font = font(look);
    pen.fillStyle = look.color;
    pen.textBaseline = "middle";
    pen.fillText(sign.slice(1, -1), box.x + parseFloat(look.paddingLeft), box.y + box.height / 2);
  }
}

/** Word by word, each where the browser has put it. */
function words(pen, text, look) {
  pen.font = font(look);
  pen.fillStyle = look.color;
  pen.textBaseline = "middle";
  const range = document.createRange();
  for (const found of text.data.matchAll(/\S+/g)) {
    range.setStart(text, found.index);
    range.setEnd(text, found.index + found[0].length);
    const box = range.getBoundingClientRect();
    if (box.width) pen.fillText(found[0], box.x, box.y + box.height / 2);
  }
}

function shape(pen, element, look) {
  const place = element.getScreenCTM?.();
  if (!place) return;
  pen.transform(place.a, place.b, place.c, place.d, place.e, place.f);
  const at = (name) => Number(element.getAttribute(name)) || 0;
  const path = new Path2D(element.getAttribute("d") ?? "");
  const kind = element.nodeName;
  if (kind === "line") {
    path.moveTo(at("x1"), at("y1"));
    path.lineTo(at("x2"), at("y2"));
  } else if (kind === "rect") path.rect(at("x"), at("y"), at("width"), at("height"));
  else if (kind === "circle") path.arc(at("cx"), at("cy"), at("r"), 0, 7);
  else if (kind === "polyline" || kind === "polygon") {
    const numbers = (element.getAttribute("points") ?? "").split(/[\s,]+/).map(Number);
    for (let index = 0; index + 1 < numbers.length; index += 2) path.lineTo(numbers[index], numbers[index + 1]);
  } else if (kind === "text") {
    pen.font = font(look);
    pen.fillStyle = look.fill;
    pen.textAlign = { middle: "center", end: "right" }[look.textAnchor] ?? "left";
    pen.fillText(element.textContent, at("x"), at("y"));
    return;
  }
  if (!clear(look.fill) && kind !== "line") {
    pen.save();
    pen.globalAlpha *= Number(look.fillOpacity);
    pen.fillStyle = look.fill;
    pen.fill(path);
    pen.restore();
  }
  if (clear(look.stroke)) return;
  pen.globalAlpha *= Number(look.strokeOpacity);
  pen.strokeStyle = look.stroke;
  pen.lineWidth = parseFloat(look.strokeWidth) || 1;
  pen.setLineDash(look.strokeDasharray === "none" ? [] : look.strokeDasharray.split(/[\s,]+/).map(parseFloat));
  pen.stroke(path);
}
