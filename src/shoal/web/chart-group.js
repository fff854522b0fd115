// What several charts have in common: the range of their axis, smoothing, the scale, the crosshair, and
// one bar of controls for all of them. The choices are in the address.

import { choose, chosen } from "./address.js";
import { h, span } from "./dom.js";

const LAST = [5, 15, 60, 360, 1440, 10080]; // minutes
const SCALES = [
  ["", "automatic"],
  ["linear", "linear"],
  ["log", "logarithmic"],
];
const HELP =
  "Drag over a chart to zoom in, double click to zoom out. Keys on a chart: arrows read values, Shift and arrows " +
  "mark a range, Enter zooms into it, + and - zoom, 0 shows all.";

const inAddress = { get: chosen, set: choose };
const inMemory = () => {
  const kept = new Map();
  return { get: (name) => kept.get(name) ?? "", set: (name, value) => kept.set(name, String(value)) };
};
const pair = (text) => {
  const found = /^(-?[\d.]+)_(-?[\d.]+)$/.exec(text)?.slice(1).map(Number);
  return found && found[1] > found[0] ? found : null;
};
const written = (range) => (range ? range.map((one) => Number(one.toPrecision(15))).join("_") : "");

/**
 * `axes`: whether there is a choice between steps and time; the first is used until somebody chooses.
 * `times`: whether there are charts over time. `element`: the bar of controls, for the view to place.
 */
export function chartGroup({ axes = [], times = true, address = true } = {}) {
  const kept = address ? inAddress : inMemory();
  const charts = new Set();
  let frame = 0;
  let held = null;
  const name = (kind) => (kind === "time" ? "range" : kind === "step" ? "steps" : "over");
  const group = {
    get axis() {
      const named = kept.get("axis");
      return axes.includes(named) ? named : (axes[0] ?? "time");
    },
    get smoothing() {
      return Math.min(0.99, Math.max(0, Number(kept.get("smooth")) || 0));
    },
    get scale() {
      const named = kept.get("scale");
      return named === "log" || named === "linear" ? named : "";
    },
    get tables() {
      return kept.get("table") === "1";
    },
    /** The last so many milliseconds; 0: all. */
    get last() {
      return Math.max(0, Number(kept.get("last")) || 0) * 60_000;
    },
    range: (kind) => pair(kept.get(name(kind))),
    zoom(kind, range) {
      kept.set(name(kind), written(range));
      if (range && kind === "time") kept.set("last", "");
      changed();
    },
    reset() {
      for (const one of ["range", "steps", "over", "last"]) kept.set(one, "");
      changed();
    },
    get zoomed() {
      return ["range", "steps", "over"].some((one) => pair(kept.get(one)));
    },
    join(chart) {
      charts.add(chart);
      return () => charts.delete(chart);
    },
    /** Shows the crosshair in all charts; `spot`: { at, step, x }, or null. */
    point(spot) {
      held = spot;
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        for (const chart of charts) chart.point(held);
      });
    },
    element: null,
    stop() {
      cancelAnimationFrame(frame);
      charts.clear();
    },
  };
  const put = (key, value) => {
    kept.set(key, value);
    changed();
  };

  const option = (value, text, now) => h("option", { value, selected: value === now }, text);
  const last = h(
    "select",
    {
      onchange: () => {
        kept.set("range", "");
        kept.set("steps", "");
        put("last", last.value);
      },
    },
    option("", "All", ""),
    LAST.map((minutes) => option(String(minutes), `Last ${span(minutes * 60_000)}`, "")),
  );
  const amount = h("output", { class: "dim" });
  const soft = h("input", {
    type: "range",
    min: "0",
    max: "0.99",
    step: "0.01",
    oninput: () => put("smooth", Number(soft.value) ? soft.value : ""),
  });
  const scale = h(
    "select",
    { onchange: () => put("scale", scale.value) },
    SCALES.map((one) => option(one[0], one[1], "")),
  );
  const table = h("input", { type: "checkbox", onchange: () => put("table", table.checked ? "1" : "") });
  const reset = h(
    "button",
    {
      onclick: () => {
        group.reset();
        last.focus();
      },
    },
    "Show all",
  );
  const turn = `axis-${Math.random().toString(36).slice(2)}`;
  const radios = axes.map((one) =>
    h("input", { type: "radio", name: turn, value: one, onchange: () => put("axis", one === axes[0] ? "" : one) }),
  );
  group.element = h(
    "div",
    { class: "row small chart-bar", role: "group", "aria-label": "How the charts are drawn", title: HELP },
    axes.length > 1
      ? h(
          "fieldset",
          { class: "choice", "aria-label": "Axis" },
          radios.map((one) => h("label", {}, one, one.value === "step" ? "Steps" : "Time")),
        )
      : null,
    times ? h("label", { class: "log-follow" }, "Range ", last) : null,
    h("label", { class: "log-follow" }, "Smoothing ", soft, amount),
    h("label", { class: "log-follow" }, "Scale ", scale),
    h("label", { class: "log-follow" }, table, "Tables"),
    reset,
  );

  function show() {
    last.value = LAST.includes(group.last / 60_000) ? String(group.last / 60_000) : "";
    soft.value = String(group.smoothing);
    amount.textContent = group.smoothing ? group.smoothing.toFixed(2) : "off";
    scale.value = group.scale;
    table.checked = group.tables;
    reset.hidden = !group.zoomed;
    for (const one of radios) one.checked = one.value === group.axis;
  }
  function changed() {
    show();
    for (const chart of charts) chart.draw();
  }
  show();
  return group;
}
