// A cell for each pair of nodes, on a canvas: thousands of nodes are drawn in one go.

import { penFor, watchWidth } from "./canvas.js";
import { inkOn, rateColor, rateName, rateOf, rates } from "./colors.js";
import { css, h, whole } from "./dom.js";

const LABELS_MAX = 48;
const GUTTER = 74;
const SIDE_MAX = 860;
function shade(link, usual) {
  const key = link[5] ? "failed" : rateOf(usual ? (Math.min(link[3], link[4]) * 1000) / usual : 1000);
  return [1, 3, 5].map((at) => Number.parseInt(rateColor(key).slice(at, at + 2), 16));
}

/** `set(view, groups)`. A pair's figures are shown for the pointer, a tap, or the arrow keys. */
export function matrix() {
  const readout = h("p", { class: "small", role: "status" });
  const canvas = h("canvas", {
    tabindex: "0",
    role: "application",
    "aria-label": "Link matrix. Arrow keys move.",
  });
  const legend = h(
    "p",
    { class: "legend row small" },
    rates.map((key) =>
      h("span", { class: "key" }, h("i", { class: "dot", style: { background: rateColor(key) } }), rateName(key)),
    ),
  );
  const box = h("div", { class: "matrix" }, canvas);
  const element = h("div", {}, legend, box, readout);
  let nodes = [];
  let starts = [];
  let links = new Map();
  let usual = 0;
  let image = null;
  let cell = 1;
  let left = 0;
  let at = null;
  let width = 0;
  const watcher = watchWidth(box, (next) => {
    width = next;
    draw();
  });
  window.addEventListener("shoal-theme", draw);

  function set(view, groups) {
    nodes = groups.flatMap(([, names]) => names);
    let sum = 0;
    starts = groups
      .map(([, names]) => {
        sum += names.length;
        return sum;
      })
      .slice(0, -1);
    usual = view.usual_mbs;
    links = new Map();
    at = null;
    const place = new Map(nodes.map((name, number) => [name, number]));
    const n = nodes.length;
    image = document.createElement("canvas");
    image.width = image.height = n;
    const pixels = new ImageData(n, n);
    for (const link of view.links) {
      const a = place.get(link[0]);
      const b = place.get(link[1]);
      if (a === undefined || b === undefined) continue;
      const key = Math.min(a, b) * n + Math.max(a, b);
      const known = links.get(key);
      if (known && (link[5] || Math.min(link[3], link[4]) > Math.min(known[3], known[4])) && !known[5]) continue;
      links.set(key, link);
      const color = shade(link, usual);
      for (const spot of [a * n + b, b * n + a]) pixels.data.set([...color, 255], spot * 4);
    }
    image.getContext("2d").putImageData(pixels, 0, 0);
    readout.textContent = "Hover over a cell or use the arrow keys.";
    draw();
  }

  function draw() {
    if (!image || !width) return;
    const n = nodes.length;
    const named = n <= LABELS_MAX;
    left = named ? GUTTER : 0;
    const side = Math.max(60, Math.min(width, SIDE_MAX) - left);
    cell = named ? Math.max(8, Math.floor(Math.min(side / n, 40))) : side / n;
    const total = cell * n;
    const pen = penFor(canvas, left + total, total);
    pen.imageSmoothingEnabled = cell < 1;
    pen.drawImage(image, left, 0, total, total);
    pen.fillStyle = css("--ink-2");
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    if (named)
      for (const [row, name] of nodes.entries())
        pen.fillText(name.length > 10 ? `${name.slice(0, 9)}…` : name, 0, (row + 0.5) * cell);
    if (cell >= 18) figures(pen, n);
    if (named) {
      pen.strokeStyle = css("--surface");
      pen.lineWidth = 1;
      for (let k = 1; k < n; k += 1) line(pen, k, total);
    }
    pen.strokeStyle = css("--ink");
    pen.lineWidth = named ? 2 : 1;
    for (const start of starts) line(pen, start, total);
    if (at) {
      pen.strokeStyle = css("--ink");
      pen.lineWidth = 3;
      const wide = Math.max(cell, 6);
      pen.strokeRect(left + at[1] * cell - (wide - cell) / 2, at[0] * cell - (wide - cell) / 2, wide, wide);
    }
  }

  function line(pen, k, total) {
    pen.beginPath();
    pen.moveTo(left + k * cell, 0);
    pen.lineTo(left + k * cell, total);
    pen.moveTo(left, k * cell);
    pen.lineTo(left + total, k * cell);
    pen.stroke();
  }

  /** Color is not the only sign: tenths of the usual rate, x for failed. */
  function figures(pen, n) {
    pen.textAlign = "center";
    for (const [key, link] of links) {
      const a = Math.floor(key / n);
      const b = key % n;
      const tenths = usual ? Math.floor((Math.min(link[3], link[4]) * 10) / usual) : 0;
      const parts = shade(link, usual).map((part) => part.toString(16).padStart(2, "0"));
      pen.fillStyle = inkOn(`#${parts.join("")}`);
      const text = link[5] ? "x" : tenths >= 15 ? "+" : String(Math.min(9, tenths));
      for (const [row, column] of [
        [a, b],
        [b, a],
      ])
        pen.fillText(text, left + (column + 0.5) * cell, (row + 0.5) * cell);
    }
    pen.textAlign = "start";
  }

  function choose(row, column) {
    const n = nodes.length;
    if (!n) return;
    at = [Math.max(0, Math.min(n - 1, row)), Math.max(0, Math.min(n - 1, column))];
    const [a, b] = [Math.min(...at), Math.max(...at)];
    const link = links.get(a * n + b);
    const names = `${nodes[at[0]]} - ${nodes[at[1]]}`;
    readout.textContent =
      a === b
        ? nodes[a]
        : !link
          ? `${names}: not measured`
          : link[5]
            ? `${names}: ${link[5]}`
            : `${names}: ${whole(link[3])} MB/s ${link[0]} → ${link[1]}, ${whole(link[4])} MB/s back, ` +
              `${whole(link[2])} µs`;
    draw();
  }

  const point = (event) => {
    const here = canvas.getBoundingClientRect();
    choose(Math.floor((event.clientY - here.top) / cell), Math.floor((event.clientX - here.left - left) / cell));
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("focus", () => {
    if (!at && nodes.length > 1) choose(0, 1);
  });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    choose((at?.[0] ?? 0) + move[0], (at?.[1] ?? 0) + move[1]);
  });
  return {
    element,
    set,
    stop: () => {
      watcher.disconnect();
      window.removeEventListener("shoal-theme", draw);
    },
  };
}
