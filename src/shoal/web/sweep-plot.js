// All trials of a sweep in one picture: a scatter for one or two variables, parallel coordinates for more.

import { watchWidth } from "./canvas.js";
import { css, h, natural, s, short } from "./dom.js";

const HEIGHT = 260;
const PAD = { left: 54, right: 54, top: 26, bottom: 22 };
const LOG_FROM = 15; // values whose largest is so many times their smallest are spread by their logarithm
const POINTS_TEXTS = 5;

/** From values to 0..1, and the values that are written at the axis. */
function axisOf(name, texts) {
  const numbers = texts.map(Number);
  if (texts.some((text) => text === "") || !numbers.every(Number.isFinite)) {
    const all = [...new Set(texts)].sort(natural);
    const at = new Map(all.map((text, index) => [text, all.length > 1 ? index / (all.length - 1) : 0.5]));
    return { name, at: (text) => at.get(text), marks: all.length > 8 ? [all[0], all.at(-1)] : all };
  }
  const low = Math.min(...numbers);
  const high = Math.max(...numbers);
  const bend = low > 0 && high / low >= LOG_FROM ? Math.log : (number) => number;
  const spread = bend(high) - bend(low);
  const all = [...new Set(numbers)].sort((a, b) => a - b);
  const at = (text) => (spread ? (bend(Number(text)) - bend(low)) / spread : 0.5);
  // Marks that would stand over each other are left out.
  const marks = all.filter((one, place) => !place || place === all.length - 1 || clear(at, one, all[place - 1], high));
  return {
    name,
    at,
    marks: (all.length > POINTS_TEXTS ? [low, high] : marks).map(String),
  };
}
const clear = (at, one, before, high) => at(one) - at(before) > 0.06 && at(high) - at(one) > 0.06;

/** `set({ trials, variables, value, best, by, highest, open })`; `value` of a trial is null if it has none. */
export function sweepPlot() {
  const box = h("div", { class: "plot" });
  const readout = h("span", { class: "small dim" });
  const title = h("h3", {});
  const element = h(
    "figure",
    { class: "chart", "data-chart": "trials" },
    h("figcaption", { class: "row" }, title, h("span", { class: "push" }, readout)),
    box,
  );
  let given = null;
  let width = 0;
  const watcher = watchWidth(box, (now) => {
    width = now;
    draw();
  });

  function draw() {
    if (!given || !width) return;
    const { trials, value, best, by, highest, open } = given;
    const known = trials.filter((trial) => value(trial) !== null);
    // Variables with one value say nothing.
    const variables = given.variables.filter((name) => new Set(known.map((trial) => trial.values[name])).size > 1);
    element.hidden = known.length < 2 || !variables.length;
    if (element.hidden) return;
    const last = axisOf(
      by,
      known.map((trial) => String(value(trial))),
    );
    const axes = variables.map((name) =>
      axisOf(
        name,
        known.map((trial) => trial.values[name]),
      ),
    );
    /** 1: the best of all. */
    const rank = (trial) => (highest ? last.at(value(trial)) : 1 - last.at(value(trial)));
    const words = (trial) => {
      const values = variables.map((name) => `${name}=${trial.values[name]}`).join(" ");
      return `${trial.id}: ${values}, ${by} ${short(value(trial))}`;
    };
    const live = (shape, trial) => {
      shape.append(s("title", {}, words(trial)));
      shape.style.cursor = "pointer";
      shape.dataset.trial = trial.id;
      shape.addEventListener("pointerenter", () => {
        readout.textContent = words(trial);
      });
      shape.addEventListener("click", () => open(trial));
      return shape;
    };
    // The best is drawn last, above all others.
    const ordered = [...known].sort((a, b) => Number(a.id === best) - Number(b.id === best) || rank(a) - rank(b));
    const parallel = variables.length > 2;
    title.textContent = parallel ? `Variables and ${by}` : `${by} by ${variables.join(" and ")}`;
    const parts = parallel ? lines(axes, last, ordered, live, rank) : dots(axes, last, ordered, live);
    box.replaceChildren(
      s(
        "svg",
        { width, height: HEIGHT, role: "img", "aria-label": `${title.textContent}; the table below has the values` },
        parts,
      ),
    );
  }
  const X = (share) => PAD.left + share * (width - PAD.left - PAD.right);
  const Y = (share) => HEIGHT - PAD.bottom - share * (HEIGHT - PAD.top - PAD.bottom);
  const label = (text) => (Number.isFinite(Number(text)) ? short(Number(text)) : text.slice(0, 12));

  function lines(axes, last, trials, live, rank) {
    const all = [...axes, last];
    const x = (at) => X(at / (all.length - 1));
    const drawn = trials.map((trial) => {
      const isBest = trial.id === given.best;
      const points = all.map((axis, at) => {
        const share = at < axes.length ? axis.at(trial.values[axis.name]) : axis.at(String(given.value(trial)));
        return `${x(at)},${Y(share)}`;
      });
      return live(
        s("polyline", {
          points: points.join(" "),
          fill: "none",
          stroke: css(isBest ? "--ok" : "--accent"),
          "stroke-width": isBest ? 3 : 1.5,
          "stroke-opacity": isBest ? 1 : 0.15 + 0.6 * rank(trial) ** 2,
        }),
        trial,
      );
    });
    const frames = all.map((axis, at) => [
      s("line", { x1: x(at), x2: x(at), y1: PAD.top, y2: HEIGHT - PAD.bottom, stroke: css("--line-2") }),
      s(
        "text",
        { x: x(at), y: 14, "text-anchor": at ? (at === all.length - 1 ? "end" : "middle") : "start" },
        axis.name,
      ),
      axis.marks.map((mark) =>
        s(
          "text",
          {
            style: { "paint-order": "stroke", stroke: "var(--surface)", "stroke-width": "4px" },
            x: x(at) + (at === all.length - 1 ? 6 : -6),
            y: Y(axis.at(mark)) + 4,
            "text-anchor": at === all.length - 1 ? "start" : "end",
          },
          label(mark),
        ),
      ),
    ]);
    return [drawn, frames];
  }

  function dots(axes, last, trials, live) {
    const [across, second] = axes;
    const marks = [
      last.marks.map((mark) => [
        s("line", { x1: PAD.left, x2: width - PAD.right, y1: Y(last.at(mark)), y2: Y(last.at(mark)), class: "grid" }),
        s("text", { x: PAD.left - 8, y: Y(last.at(mark)) + 4, "text-anchor": "end" }, label(mark)),
      ]),
      across.marks.map((mark) =>
        s("text", { x: X(across.at(mark)), y: HEIGHT - 4, "text-anchor": "middle" }, label(mark)),
      ),
    ];
    const drawn = trials.map((trial) => {
      const isBest = trial.id === given.best;
      const share = second ? second.at(trial.values[second.name]) : 1;
      return live(
        s("circle", {
          cx: X(across.at(trial.values[across.name])),
          cy: Y(last.at(String(given.value(trial)))),
          r: isBest ? 7 : 4 + (second ? 3 * share : 1),
          fill: css(isBest ? "--ok" : "--accent"),
          "fill-opacity": isBest ? 1 : 0.3 + 0.5 * share,
          stroke: css("--surface"),
        }),
        trial,
      );
    });
    const key = second ? s("text", { x: PAD.left, y: 14 }, `Larger and darker: more ${second.name}`) : null;
    return [marks, drawn, key];
  }
  return {
    element,
    set(next) {
      given = next;
      draw();
    },
    stop: () => watcher.disconnect(),
  };
}
