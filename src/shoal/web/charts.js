// Small charts without a library: lines, stacked bars, and a strip of members over time.

import { clock, css, h, moment, s, short } from "./dom.js";

const PAD = { left: 46, right: 12, top: 8, bottom: 20 };

/** About `count` round numbers. */
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

/** The powers of ten in the range. */
function decades(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high) + 1e-9; power += 1) found.push(Number((10 ** power).toPrecision(3)));
  return found.length ? found : [low, high];
}

/** Keeps the lowest and the highest point of each pixel, because more cannot be seen. */
function thin(points, width) {
  if (points.length <= width * 2) return points;
  const size = Math.ceil(points.length / width), found = [];
  for (let at = 0; at < points.length; at += size) {
    const part = points.slice(at, at + size);
    const low = part.reduce((a, b) => (b[1] < a[1] ? b : a)), high = part.reduce((a, b) => (b[1] > a[1] ? b : a));
    found.push(...(low[0] < high[0] ? [low, high] : [high, low]));
  }
  return found;
}

/**
 * A chart of lines: `set([{name, colour, points: [[x, y], ...]}])`. `unit` follows the figures; `times`
 * says that x is a moment, `places` how another x is written. What falls over more than a power of ten is drawn on a logarithmic scale if
 * it is `steep`. The figures under the pointer are shown beside the title.
 */
export function lineChart({ title, unit = "", height = 150, times = true, zero = true, steep = false, places = short }) {
  const readout = h("span", { class: "small dim" });
  const box = h("div", { class: "plot" });
  const element = h("figure", { class: "chart" }, h("figcaption", { class: "row" }, h("h3", {}, title), h("span", { class: "push" }, readout)), box);
  let series = [], width = 0, hover = null;
  const watcher = new ResizeObserver(() => { const now = Math.floor(box.clientWidth); if (now && now !== width) { width = now; draw(); } });
  watcher.observe(box);

  function draw() {
    const full = series.filter((one) => one.points.length);
    element.classList.toggle("hollow", !full.length);
    if (!full.length || !width) { box.replaceChildren(h("p", { class: "dim small" }, width ? "no data yet" : "")); readout.textContent = ""; return; }
    const all = full.flatMap((one) => one.points);
    const xs = [Math.min(...full.map((one) => one.points[0][0])), Math.max(...full.map((one) => one.points.at(-1)[0]))];
    let low = all.reduce((a, p) => Math.min(a, p[1]), Infinity), high = all.reduce((a, p) => Math.max(a, p[1]), -Infinity);
    if (zero) low = Math.min(0, low);
    if (high === low) { high = low + (Math.abs(low) || 1); }
    const powers = steep && low > 0 && high / low > 20;
    const marks = powers ? decades(low, high) : ticks(low, high, 4);
    high = Math.max(high, marks.at(-1));
    const scale = powers ? Math.log10 : (y) => y;
    const X = (x) => PAD.left + (xs[1] > xs[0] ? (x - xs[0]) / (xs[1] - xs[0]) : 0.5) * (width - PAD.left - PAD.right);
    const Y = (y) => height - PAD.bottom - ((scale(y) - scale(low)) / (scale(high) - scale(low))) * (height - PAD.top - PAD.bottom);
    const grid = marks.map((mark) => [s("line", { x1: PAD.left, x2: width - PAD.right, y1: Y(mark), y2: Y(mark), class: "grid" }), s("text", { x: PAD.left - 6, y: Y(mark) + 4, "text-anchor": "end" }, short(mark))]);
    const steps = ticks(xs[0], xs[1], Math.max(2, Math.floor(width / 160)));
    const spots = times ? [xs[0], xs[1]] : steps;
    const below = spots.map((mark, at) => s("text", { x: X(mark), y: height - 4, "text-anchor": times || X(mark) > width - 30 ? (at ? "end" : "start") : "middle" }, times ? moment(mark) : places(mark)));
    const lines = full.map((one) => s("polyline", { points: thin(one.points, width).map(([x, y]) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join(" "), fill: "none", stroke: one.colour, "stroke-width": 1.6, "stroke-linejoin": "round", "stroke-dasharray": one.dash }));
    const ends = full.filter((one) => one.points.length === 1).map((one) => s("circle", { cx: X(one.points[0][0]), cy: Y(one.points[0][1]), r: 2.5, fill: one.colour }));
    const cross = s("line", { y1: PAD.top, y2: height - PAD.bottom, class: "cross", visibility: "hidden" });
    const label = `${title}: ${full.map((one) => `${one.name || ""} now ${short(one.points.at(-1)[1])} ${unit}`).join(", ")}`;
    const picture = s("svg", { width, height, role: "img", "aria-label": label }, grid, below, lines, ends, cross);
    const at = (event) => {
      const x = xs[0] + ((event.clientX - picture.getBoundingClientRect().left - PAD.left) / (width - PAD.left - PAD.right)) * (xs[1] - xs[0]);
      hover = x;
      cross.setAttribute("x1", X(clamp(x, xs))); cross.setAttribute("x2", X(clamp(x, xs))); cross.setAttribute("visibility", "visible");
      showFigures(full, unit, x);
    };
    picture.addEventListener("pointermove", at);
    picture.addEventListener("pointerleave", () => { hover = null; cross.setAttribute("visibility", "hidden"); showFigures(full, unit, null); });
    box.replaceChildren(picture);
    showFigures(full, unit, hover);
  }

  function showFigures(full, suffix, x) {
    const parts = full.map((one) => {
      const point = x === null ? one.points.at(-1) : nearest(one.points, x);
      return h("span", { class: "key" }, full.length > 1 || one.name ? [h("i", { class: "dot", style: { background: one.colour } }), one.name, " "] : null, h("b", {}, short(point[1])), suffix ? ` ${suffix}` : "");
    });
    const where = x === null ? null : h("span", {}, times ? clock(nearest(full[0].points, x)[0]) : `at ${places(nearest(full[0].points, x)[0])}`);
    readout.replaceChildren(...parts, ...(where ? [where] : []));
  }

  return { element, set(next) { series = next; draw(); }, stop: () => watcher.disconnect() };
}

const clamp = (x, [low, high]) => Math.min(high, Math.max(low, x));
function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (points[middle][0] < x) low = middle + 1; else high = middle; }
  return low && Math.abs(points[low - 1][0] - x) < Math.abs(points[low][0] - x) ? points[low - 1] : points[low];
}

/** Stacked bars: `set(bars: [{label, parts: [{name, value}]}], colourOf, text)`. */
export function stackedBars({ title, height = 220 }) {
  const box = h("div", { class: "plot" });
  const readout = h("span", { class: "small dim" });
  const element = h("figure", { class: "chart" }, h("figcaption", { class: "row" }, h("h3", {}, title), h("span", { class: "push" }, readout)), box);
  let bars = [], colourOf = () => "grey", text = short, width = 0;
  const watcher = new ResizeObserver(() => { const now = Math.floor(box.clientWidth); if (now && now !== width) { width = now; draw(); } });
  watcher.observe(box);

  function draw() {
    if (!bars.length || !width) { box.replaceChildren(h("p", { class: "dim small" }, width ? "no data in this period" : "")); return; }
    const sums = bars.map((bar) => bar.parts.reduce((sum, part) => sum + part.value, 0));
    const high = Math.max(...sums) || 1;
    const marks = ticks(0, high, 4), top = Math.max(high, marks.at(-1));
    const slot = (width - PAD.left - PAD.right) / bars.length, thick = Math.min(46, Math.max(2, slot * 0.78));
    const Y = (y) => height - PAD.bottom - (y / top) * (height - PAD.top - PAD.bottom);
    const grid = marks.map((mark) => [s("line", { x1: PAD.left, x2: width - PAD.right, y1: Y(mark), y2: Y(mark), class: "grid" }), s("text", { x: PAD.left - 6, y: Y(mark) + 4, "text-anchor": "end" }, text(mark, true))]);
    const every = Math.max(1, Math.ceil(bars.length / Math.max(1, Math.floor(width / 74))));
    const drawn = bars.map((bar, at) => {
      let sum = 0;
      const x = PAD.left + slot * at + (slot - thick) / 2;
      const parts = bar.parts.filter((part) => part.value > 0).map((part) => {
        const rect = s("rect", { x, width: thick, y: Y(sum + part.value), height: Math.max(0.5, Y(sum) - Y(sum + part.value)), fill: colourOf(part.name) });
        sum += part.value;
        rect.append(s("title", {}, `${bar.label}: ${part.name} ${text(part.value)}`));
        rect.addEventListener("pointerenter", () => { readout.textContent = `${bar.label}: ${part.name} ${text(part.value)}`; });
        return rect;
      });
      const label = at % every === 0 ? s("text", { x: x + thick / 2, y: height - 4, "text-anchor": "middle" }, bar.short ?? bar.label) : null;
      return [parts, label];
    });
    box.replaceChildren(s("svg", { width, height, role: "img", "aria-label": `${title}: ${bars.length} bars, the table below has the figures` }, grid, drawn));
  }
  return { element, set(next, colours, words) { bars = next; colourOf = colours; text = words; draw(); }, stop: () => watcher.disconnect() };
}

/** One row per member, time to the right, shaded by `value` (0 to 1, or null). A bad row stands out. */
export function strip({ title, note, colour }) {
  const canvas = h("canvas", { role: "img", tabindex: "0" });
  const readout = h("span", { class: "small dim" }, note);
  const names = h("div", { class: "strip-names", "aria-hidden": "true" });
  const element = h("figure", { class: "chart" }, h("figcaption", { class: "row" }, h("h3", {}, title), h("span", { class: "push" }, readout)), h("div", { class: "strip" }, names, h("div", { class: "strip-box" }, canvas)));
  let rows = [];
  const watcher = new ResizeObserver(() => draw());
  watcher.observe(canvas.parentElement);
  const tall = () => (rows.length > 64 ? 4 : rows.length > 24 ? 8 : rows.length > 8 ? 14 : 20);

  function draw() {
    const width = canvas.parentElement.clientWidth, ratio = devicePixelRatio || 1, size = tall();
    canvas.width = Math.max(1, width * ratio); canvas.height = Math.max(1, rows.length * size * ratio);
    canvas.style.setProperty("width", `${width}px`); canvas.style.setProperty("height", `${rows.length * size}px`);
    names.replaceChildren(...(size >= 14 ? rows.map((row) => h("span", { class: row.marked ? "marked" : "", style: { height: `${size}px`, "line-height": `${size}px` } }, row.name)) : []));
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    rows.forEach((row, at) => {
      const each = width / Math.max(1, row.values.length);
      row.values.forEach((value, column) => {
        pen.fillStyle = value === null ? css("--cell-free") : colour(value);
        const from = Math.floor(column * each);
        pen.fillRect(from, at * size, Math.floor((column + 1) * each) - from, size - 1);
      });
    });
  }
  canvas.addEventListener("pointermove", (event) => {
    const area = canvas.getBoundingClientRect();
    const row = rows[Math.floor((event.clientY - area.top) / tall())];
    const value = row?.notes?.[Math.floor(((event.clientX - area.left) / area.width) * row.values.length)];
    readout.textContent = row ? `${row.name}: ${value ?? "no data"}` : note;
  });
  canvas.addEventListener("pointerleave", () => { readout.textContent = note; });
  return {
    element,
    set(next, label) { rows = next; canvas.setAttribute("aria-label", label); element.hidden = !rows.length; draw(); },
    stop: () => watcher.disconnect(),
  };
}

/** A line without axes, to use within text. */
export function spark(values, colour, width = 96, height = 22) {
  if (values.length < 2) return s("svg", { width, height, "aria-hidden": "true" });
  const high = Math.max(...values, 1e-9);
  const points = values.map((value, at) => `${((at / (values.length - 1)) * width).toFixed(1)},${(height - 1 - (value / high) * (height - 2)).toFixed(1)}`).join(" ");
  return s("svg", { width, height, "aria-hidden": "true" }, s("polyline", { points, fill: "none", stroke: colour, "stroke-width": 1.4 }));
}
