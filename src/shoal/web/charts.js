// Small charts without a library: stacked bars, and a strip of members over time.

import { penFor, watchWidth } from "./canvas.js";
import { PAD } from "./chart-line.js";
import { ticks } from "./chart-scale.js";
import { isDark } from "./colors.js";
import { css, h, s, short } from "./dom.js";

// Lines that are told apart without color vision too: by lightness, and by dashes.
const LINES = {
  light: ["#0a6ca6", "#c2410c", "#0d7a5f", "#a3246b", "#6b4fc0", "#8a6100", "#3f4a54", "#1f8fb8", "#b0413e", "#4d7c0f"],
  dark: ["#58b4e8", "#f59a5b", "#4fc9a4", "#ea8fbf", "#b3a0f5", "#e0bf55", "#c5ced6", "#7fdbef", "#f08a84", "#a9d159"],
};
const DASHES = [undefined, "7 3", "2 2", "9 3 2 3"];
/** How the nth of several lines looks. */
export const look = (at) => {
  const all = LINES[isDark() ? "dark" : "light"];
  return { color: all[at % all.length], dash: DASHES[(at + Math.floor(at / all.length)) % DASHES.length] };
};

/** Stacked bars: `set(bars: [{label, parts: [{name, value}]}], colorOf, text)`. `text` writes a value, with `narrow`
 * for the axis. */
export function stackedBars({ title, height = 220 }) {
  const box = h("div", { class: "plot" });
  const readout = h("span", { class: "small dim" });
  const element = h(
    "figure",
    { class: "chart" },
    h("figcaption", { class: "row" }, h("h3", {}, title), h("span", { class: "push" }, readout)),
    box,
  );
  element.csv = () => [
    ["bar", "part", "value"],
    ...(bars ?? []).flatMap((bar) => bar.parts.map((part) => [bar.label, part.name, part.value])),
  ];
  let bars = null; // nothing was answered yet
  let colorOf = (_name) => "gray";
  /** @type {(value: number, narrow?: boolean) => string} */
  let text = short;
  let width = 0;
  const watcher = watchWidth(box, (now) => {
    width = now;
    draw();
  });

  function draw() {
    if (!bars?.length || !width) {
      box.style.setProperty("min-height", `${height}px`);
      box.replaceChildren(bars && width ? h("p", { class: "dim small" }, "No data in this period") : "");
      return;
    }
    const sums = bars.map((bar) => bar.parts.reduce((sum, part) => sum + part.value, 0));
    const high = Math.max(...sums) || 1;
    const marks = ticks(0, high, 4);
    const top = Math.max(high, marks.at(-1));
    const slot = (width - PAD.left - PAD.right) / bars.length;
    const thick = Math.min(46, Math.max(2, slot * 0.78));
    const Y = (y) => height - PAD.bottom - (y / top) * (height - PAD.top - PAD.bottom);
    const grid = marks.map((mark) => [
      s("line", { x1: PAD.left, x2: width - PAD.right, y1: Y(mark), y2: Y(mark), class: "grid" }),
      s("text", { x: PAD.left - 6, y: Y(mark) + 4, "text-anchor": "end" }, text(mark, true)),
    ]);
    const every = Math.max(1, Math.ceil(bars.length / Math.max(1, Math.floor(width / 74))));
    const drawn = bars.map((bar, at) => {
      let sum = 0;
      const x = PAD.left + slot * at + (slot - thick) / 2;
      const parts = bar.parts
        .filter((part) => part.value > 0)
        .map((part) => {
          const rect = s("rect", {
            x,
            width: thick,
            y: Y(sum + part.value),
            height: Math.max(0.5, Y(sum) - Y(sum + part.value)),
            fill: colorOf(part.name),
          });
          sum += part.value;
          rect.append(s("title", {}, `${bar.label}: ${part.name} ${text(part.value)}`));
          rect.addEventListener("pointerenter", () => {
            readout.textContent = `${bar.label}: ${part.name} ${text(part.value)}`;
          });
          return rect;
        });
      const label =
        at % every === 0
          ? s("text", { x: x + thick / 2, y: height - 4, "text-anchor": "middle" }, bar.short ?? bar.label)
          : null;
      return [parts, label];
    });
    box.replaceChildren(
      s(
        "svg",
        { width, height, role: "img", "aria-label": `${title}: ${bars.length} bars, the table below has the figures` },
        grid,
        drawn,
      ),
    );
  }
  return {
    element,
    set(next, colors, words) {
      bars = next;
      colorOf = colors;
      text = words;
      draw();
    },
    stop: () => watcher.disconnect(),
  };
}

/** One row per member, time to the right, shaded by `value` (0 to 1, or null). A bad row stands out. */
export function strip({ title, note, color }) {
  const canvas = h("canvas", { role: "img", tabindex: "0" });
  const readout = h("span", { class: "small dim" }, note);
  const names = h("div", { class: "strip-names", "aria-hidden": "true" });
  const element = h(
    "figure",
    { class: "chart" },
    h("figcaption", { class: "row" }, h("h3", {}, title), h("span", { class: "push" }, readout)),
    h("div", { class: "strip" }, names, h("div", { class: "strip-box" }, canvas)),
  );
  element.csv = () => [["row"], ...rows.map((row) => [row.name, ...row.values])];
  let rows = [];
  const watcher = new ResizeObserver(() => draw());
  watcher.observe(canvas.parentElement);
  const tall = () => (rows.length > 64 ? 4 : rows.length > 24 ? 8 : rows.length > 8 ? 14 : 20);

  function draw() {
    const width = canvas.parentElement.clientWidth;
    const size = tall();
    names.replaceChildren(
      ...(size >= 14
        ? rows.map((row) =>
            h(
              "span",
              { class: row.marked ? "marked" : "", style: { height: `${size}px`, "line-height": `${size}px` } },
              row.name,
            ),
          )
        : []),
    );
    const pen = penFor(canvas, width, rows.length * size);
    rows.forEach((row, at) => {
      const each = width / Math.max(1, row.values.length);
      row.values.forEach((value, column) => {
        pen.fillStyle = value === null ? css("--cell-free") : color(value);
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
  canvas.addEventListener("pointerleave", () => {
    readout.textContent = note;
  });
  return {
    element,
    set(next, label) {
      rows = next;
      canvas.setAttribute("aria-label", label);
      element.hidden = !rows.length;
      draw();
    },
    stop: () => watcher.disconnect(),
  };
}
