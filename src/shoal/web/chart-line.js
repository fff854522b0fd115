// A chart of lines that can be zoomed, smoothed and read by keyboard. Its choices are its group's.

import { watchWidth } from "./canvas.js";
import { chartGroup } from "./chart-group.js";
import { decades, from, label, nearest, rising, smooth, thin, ticks, timeTicks } from "./chart-scale.js";
import { clock, h, moment, s, short, span, whole } from "./dom.js";
import { replace } from "./patch.js";
import { table } from "./table.js";

export const PAD = { left: 46, right: 12, top: 8, bottom: 20 };
const ROWS_MAX = 40; // of a chart's table
const NEAR_PX = 6;

const clamp = (x, [low, high]) => Math.min(high, Math.max(low, x));

/**
 * `set([{name, color, dash, points: [[x, y, step], ...], marks: [{at, text, sign}]}])`, points in order of x.
 * x is a moment, or with `times: "since"` the milliseconds since a start, or with `times: false` anything else,
 * written by `places`. Where points have a step, the group may choose steps as the axis. `marks` are moments with
 * a vertical line. `unit` follows the figures. What falls over more than a power of ten is drawn on a logarithmic
 * scale if it is `steep`, unless somebody chose a scale. `zero`: the axis begins at 0. Without a `group` the
 * chart has its controls behind a button.
 * @param {{ title: string, unit?: string, height?: number, times?: boolean | "since", zero?: boolean, steep?: boolean,
 *   places?: (x: number) => string, group?: ReturnType<typeof chartGroup> | null }} options
 */
export function lineChart({
  title,
  unit = "",
  height = 150,
  times = true,
  zero = true,
  steep = false,
  places = short,
  group = null,
}) {
  const own = group ? null : chartGroup({ address: false, times: Boolean(times) });
  const shared = group ?? own;
  const readout = h("span", { class: "small dim readout" });
  const box = h("div", { class: "plot", role: "slider", tabindex: "0", "aria-label": title, "aria-valuemin": 0 });
  const figures = h("div", {
    class: "figures-table scroll",
    hidden: true,
    tabindex: "0",
    role: "region",
    "aria-label": `${title}, figures`,
  });
  if (own) own.element.hidden = true;
  const options = own
    ? h(
        "button",
        {
          class: "quiet options",
          "aria-label": `${title}: options of the chart`,
          "aria-expanded": "false",
          onclick: () => {
            own.element.hidden = !own.element.hidden;
            options.setAttribute("aria-expanded", String(!own.element.hidden));
          },
        },
        "⋯",
      )
    : null;
  const element = h(
    "figure",
    { class: "chart" },
    h("figcaption", { class: "row" }, h("h3", {}, title), h("span", { class: "push" }, readout), options),
    own?.element,
    box,
    figures,
  );
  // Not a part of the picture, which would be painted again with every move.
  const cross = h("i", {
    class: "cross",
    hidden: true,
    style: { top: `${PAD.top}px`, height: `${height - PAD.top - PAD.bottom}px` },
  });
  element.csv = () => [
    ["series", times === true ? "time" : times ? "ms" : "x", "value", "step"],
    ...series.flatMap((one) =>
      one.points.map(([x, y, step]) => [one.name, times === true ? new Date(x).toISOString() : x, y, step]),
    ),
  ];
  const ready = new WeakMap();
  let series = [];
  let width = 0;
  let view = null;
  let spot = null;
  let drag = null;
  let marked = null;

  const steps = () => times && shared.axis === "step" && series.some((one) => one.points[0]?.length > 2);
  const kind = () => (steps() ? "step" : times ? "time" : "x");
  const written = (x) =>
    view.kind === "step" ? `step ${whole(x)}` : times === "since" ? span(x) : times ? moment(x) : `at ${places(x)}`;

  /** What is to be drawn: each line's points as [x, y, raw y, at, step], and the ranges of both axes. */
  function plan() {
    const named = kind();
    const weight = shared.smoothing;
    const lines = series
      .map((one) => ({ ...one, points: prepared(one.points, named, weight) }))
      .filter((one) => one.points.length);
    if (!lines.length) return null;
    const all = [
      Math.min(...lines.map((one) => one.points[0][0])),
      Math.max(...lines.map((one) => one.points.at(-1)[0])),
    ];
    const xs = reach(named, lines, all);
    const inside = lines.map((one) => ({
      ...one,
      points: one.points.slice(Math.max(0, from(one.points, xs[0]) - 1), from(one.points, xs[1]) + 1),
    }));
    return { kind: named, lines, inside, xs, all, ...heights(inside, xs) };
  }

  /** Kept, because a zoom asks for the same again. */
  function prepared(points, named, weight) {
    const have = ready.get(points);
    if (have?.named === named && have.weight === weight) return have.sorted;
    const raw = points.filter((point) => Number.isFinite(point[1]));
    const sorted =
      named === "step"
        ? rising(raw.map(([at, y, step]) => [step, y, y, at, step]))
        : raw.map(([x, y, step]) => [x, y, y, x, step]);
    if (weight)
      smooth(
        sorted.map((point) => point[1]),
        weight,
      ).forEach((y, at) => {
        sorted[at][1] = y;
      });
    ready.set(points, { named, weight, sorted });
    return sorted;
  }

  function reach(named, lines, all) {
    const chosen = shared.range(named);
    if (chosen || !shared.last || !times) return chosen ?? all;
    const begin = Math.max(...lines.map((one) => one.points.at(-1)[3])) - shared.last;
    if (named === "time") return [Math.max(all[0], begin), all[1]];
    return [Math.min(...lines.map((one) => one.points.find((point) => point[3] >= begin)?.[0] ?? Infinity)), all[1]];
  }

  function heights(lines, xs) {
    let low = Infinity;
    let high = -Infinity;
    let least = Infinity;
    const count = (all) => {
      for (const { points } of lines)
        for (const [x, y, raw] of points) {
          if (!all && (x < xs[0] || x > xs[1])) continue;
          low = Math.min(low, y, raw);
          high = Math.max(high, y, raw);
          if (y > 0) least = Math.min(least, y);
          if (raw > 0) least = Math.min(least, raw);
        }
    };
    count(false);
    if (low === Infinity) count(true); // a zoom between two points
    const powers = shared.scale === "log" ? high > 0 : shared.scale === "" && steep && low > 0 && high / low > 20;
    if (powers) low = least;
    else if (zero) low = Math.min(0, low);
    if (high - low <= Math.abs(high) * 1e-9) {
      // the rest is the rounding of numbers
      if (powers) {
        low /= 2;
        high = low * 4;
      } else {
        const room = Math.abs(low) || 1;
        if (!zero) low -= room / 2;
        high = low + room;
      }
    }
    const grid = powers ? decades(low, high) : ticks(low, high, 4);
    return { powers, low, high: powers ? high : Math.max(high, grid.at(-1)), grid };
  }

  function draw() {
    view = width ? plan() : null;
    element.classList.toggle("hollow", !series.some((one) => one.points.length));
    figures.hidden = !view || !shared.tables;
    if (!view) {
      box.replaceChildren(h("p", { class: "dim small" }, width ? "no data yet" : ""));
      readout.replaceChildren();
      box.setAttribute("aria-valuetext", "no data yet");
      return;
    }
    const { xs, low, high, powers, grid } = view;
    const scale = powers ? Math.log10 : (y) => y;
    const X = (x) => PAD.left + (xs[1] > xs[0] ? (x - xs[0]) / (xs[1] - xs[0]) : 0.5) * (width - PAD.left - PAD.right);
    view.X = X;
    const Y = (y) =>
      height - PAD.bottom - ((scale(y) - scale(low)) / (scale(high) - scale(low))) * (height - PAD.top - PAD.bottom);
    const level = grid.map((mark) => [
      s("line", { x1: PAD.left, x2: width - PAD.right, y1: Y(mark), y2: Y(mark), class: "grid" }),
      s("text", { x: PAD.left - 6, y: Y(mark) + 4, "text-anchor": "end" }, label(mark)),
    ]);
    const inner = s(
      "svg",
      {
        x: PAD.left,
        y: 0,
        width: Math.max(1, width - PAD.left - PAD.right),
        height: height - PAD.bottom + 2,
        viewBox: `${PAD.left} 0 ${Math.max(1, width - PAD.left - PAD.right)} ${height - PAD.bottom + 2}`,
      },
      view.inside.map((one) => [shared.smoothing ? path(one, 2, X, Y, 1, 0.28) : null, path(one, 1, X, Y, 1.6, 1)]),
    );
    view.marks = view.lines
      .flatMap((one) => (one.marks ?? []).map((mark) => ({ ...mark, color: one.color, x: placed(one, mark.at) })))
      .filter((mark) => mark.x >= xs[0] && mark.x <= xs[1]);
    const signs = view.marks.map((mark) =>
      s(
        "g",
        { class: "mark" },
        s("line", { x1: X(mark.x), x2: X(mark.x), y1: PAD.top + 6, y2: height - PAD.bottom, stroke: mark.color }),
        s("text", { x: X(mark.x), y: PAD.top + 4, "text-anchor": "middle" }, mark.sign ?? "↻"),
        s("title", {}, mark.text),
      ),
    );
    view.brush = s("rect", { y: PAD.top, height: height - PAD.top - PAD.bottom, class: "brush", visibility: "hidden" });
    box.replaceChildren(
      s("svg", { width, height, "aria-hidden": "true" }, level, below(X), view.brush, inner, signs),
      cross,
    );
    brushed();
    point(spot);
    if (shared.tables) replace(figures, rowsOf());
  }

  function below(X) {
    const count = Math.max(2, Math.floor(width / 110));
    const [low, high] = view.xs;
    const marks =
      view.kind === "time"
        ? timeTicks(low, high, count, times === "since")
        : ticks(low, high, Math.max(2, Math.floor(width / 90))).map((at) => ({
            at,
            text: view.kind === "step" ? short(at) : places(at),
          }));
    return marks.map(({ at, text }) =>
      s(
        "text",
        {
          x: X(at),
          y: height - 4,
          "text-anchor": X(at) > width - 34 ? "end" : X(at) < PAD.left + 20 ? "start" : "middle",
        },
        text,
      ),
    );
  }

  function path(one, of, X, Y, thick, opacity) {
    const points = thin(one.points, of, X, view.powers);
    if (points.length === 1)
      return s("circle", { cx: X(points[0][0]), cy: Y(points[0][of]), r: 2.5, fill: one.color, opacity });
    // in a dense line dashes cannot be seen, and take long to paint
    const dash = points.length < width ? one.dash : null;
    return s("polyline", {
      points: points.map((point) => `${X(point[0]).toFixed(1)},${Y(point[of]).toFixed(1)}`).join(" "),
      fill: "none",
      stroke: one.color,
      "stroke-width": thick,
      "stroke-linejoin": "bevel",
      "stroke-dasharray": dash,
      opacity,
    });
  }

  /** Where a moment is on the axis; on steps, the first step after it. */
  const placed = (one, at) =>
    view.kind !== "step" ? at : (one.points.find((point) => point[3] >= at)?.[0] ?? Infinity);

  const figure = (one, x) => (x === null ? one.points.at(-1) : one.points[nearest(one.points, x)]);
  const amount = (point) =>
    shared.smoothing
      ? [h("b", {}, short(point[1])), h("span", {}, ` (${short(point[2])})`)]
      : h("b", {}, short(point[1]));

  /** `at`: { x, at, step } of the pointer in some chart of the group, or null. */
  function point(at) {
    spot = at;
    if (!view) return;
    const x = at && where(at);
    const shown = x !== null && x >= view.xs[0] && x <= view.xs[1];
    if (shown) cross.style.setProperty("transform", `translateX(${view.X(x).toFixed(1)}px)`);
    cross.hidden = !shown;
    const many = view.lines.length > 1;
    const place = shown ? x : null;
    const parts = view.lines.map((one) =>
      h(
        "span",
        { class: "key" },
        many || one.name ? [h("i", { class: "dot", style: { background: one.color } }), one.name, " "] : null,
        amount(figure(one, place)),
        unit ? ` ${unit}` : "",
      ),
    );
    const near = shown ? view.marks.find((mark) => Math.abs(view.X(mark.x) - view.X(x)) < NEAR_PX) : null;
    replace(readout, parts, shown ? h("span", {}, written(x), near ? `: ${near.text}` : "") : null);
    const first = view.lines[0].points;
    box.setAttribute("aria-valuemax", String(first.length - 1));
    box.setAttribute("aria-valuenow", String(shown ? nearest(first, x) : first.length - 1));
    box.setAttribute("aria-valuetext", readout.textContent);
  }

  function where(at) {
    if (view.kind === "x") return at.x;
    if (view.kind === "time") return at.at;
    if (at.step !== undefined) return at.step;
    const one = view.lines[0].points;
    return one[nearest(one, at.at, 3)][0];
  }
  const hover = (x) => {
    const one = view.lines[0].points;
    const found = one[nearest(one, x)];
    shared.point(
      view.kind === "x" ? { x } : view.kind === "time" ? { at: x, step: found[4] } : { at: found[3], step: x },
    );
  };

  // -- the pointer ---------------------------------------------------------------------------

  const under = (event) =>
    clamp(
      view.xs[0] +
        ((event.clientX - box.getBoundingClientRect().left - PAD.left) / (width - PAD.left - PAD.right)) *
          (view.xs[1] - view.xs[0]),
      view.xs,
    );
  function brushed() {
    const range = drag?.moved ? [drag.from, drag.to] : marked;
    view?.brush.setAttribute("visibility", range ? "visible" : "hidden");
    if (!range || !view) return;
    const [a, b] = range.map(view.X).sort((one, other) => one - other);
    view.brush.setAttribute("x", a);
    view.brush.setAttribute("width", Math.max(1, b - a));
  }
  function zoom(range) {
    marked = null;
    const [a, b] = [...range].sort((one, other) => one - other);
    if (b > a) shared.zoom(view.kind, [a, b]);
  }
  box.addEventListener("pointerdown", (event) => {
    if (view && event.button === 0) {
      const x = under(event);
      drag = { from: x, to: x, start: event.clientX, moved: false };
      hover(x);
    }
  });
  box.addEventListener("pointermove", (event) => {
    if (!view) return;
    const x = under(event);
    hover(x);
    if (!drag) return;
    drag.to = x;
    if (!drag.moved && Math.abs(event.clientX - drag.start) > NEAR_PX) {
      drag.moved = true;
      box.setPointerCapture(event.pointerId);
    }
    brushed();
  });
  box.addEventListener("pointerup", () => {
    const range = drag?.moved ? [drag.from, drag.to] : null;
    drag = null;
    if (range && view) zoom(range);
    brushed();
  });
  box.addEventListener("pointercancel", () => {
    drag = null;
    brushed();
  });
  box.addEventListener("pointerleave", () => {
    if (!drag?.moved) {
      drag = null;
      shared.point(null);
    }
  });
  box.addEventListener("dblclick", () => shared.reset());

  // -- the keyboard --------------------------------------------------------------------------

  /** Moves by about a hundredth of what is shown, and by ten times that with `far`. */
  function move(way, far, mark) {
    const points = view.inside[0].points;
    const now = spot && where(spot);
    const at = now === null || now === undefined ? (way > 0 ? -1 : points.length) : nearest(points, now);
    const stride = Math.max(1, Math.round(points.length / 100)) * (far ? 10 : 1);
    const x = clamp(points[clamp(at + way * stride, [0, points.length - 1])][0], view.xs);
    marked = mark ? [marked?.[0] ?? now ?? x, x] : null;
    hover(x);
    brushed();
  }
  function closer(factor) {
    const [low, high] = view.xs;
    const middle = (spot && where(spot)) ?? (low + high) / 2;
    const half = ((high - low) * factor) / 2;
    const range = [Math.max(view.all[0], middle - half), Math.min(view.all[1], middle + half)];
    if (range[0] <= view.all[0] && range[1] >= view.all[1]) shared.reset();
    else zoom(range);
  }
  const KEYS = {
    ArrowLeft: (event) => move(-1, false, event.shiftKey),
    ArrowRight: (event) => move(1, false, event.shiftKey),
    PageDown: (event) => move(-1, true, event.shiftKey),
    PageUp: (event) => move(1, true, event.shiftKey),
    Home: () => hover(view.xs[0]),
    End: () => hover(view.xs[1]),
    Enter: () => marked && zoom(marked),
    "+": () => closer(0.5),
    "=": () => closer(0.5),
    "-": () => closer(2),
    0: () => {
      marked = null;
      shared.reset();
    },
    Escape: () => {
      marked = null;
      brushed();
      shared.point(null);
    },
  };
  box.addEventListener("keydown", (event) => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? null : KEYS[event.key];
    if (!act || !view) return;
    event.preventDefault();
    act(event);
  });
  box.addEventListener("blur", () => {
    marked = null;
    brushed();
    shared.point(null);
  });

  // -- as a table ----------------------------------------------------------------------------

  function rowsOf() {
    const { inside, xs, kind: named } = view;
    const first = inside
      .reduce((a, b) => (b.points.length > a.points.length ? b : a))
      .points.filter((one) => one[0] >= xs[0] && one[0] <= xs[1]);
    const stride = Math.max(1, Math.ceil(first.length / ROWS_MAX));
    const rows = first
      .filter((_, at) => (first.length - 1 - at) % stride === 0)
      .toReversed()
      .map((one) => {
        const values = inside.map((line) => {
          const near = line.points[nearest(line.points, one[0])];
          return h("td", { class: "num", "data-name": line.name || title }, near ? short(near[1]) : "–");
        });
        return h(
          "tr",
          { "data-key": one[0] },
          h(
            "th",
            { scope: "row" },
            named === "step"
              ? whole(one[0])
              : times === "since"
                ? span(one[0])
                : times
                  ? clock(one[0])
                  : places(one[0]),
          ),
          values,
        );
      });
    return table(
      [
        named === "step" ? "Step" : named === "time" ? "Time" : "At",
        ...inside.map((one) => `num:${[one.name || title, unit].filter(Boolean).join(", ")}`),
      ],
      rows,
    );
  }

  const watcher = watchWidth(box, (now) => {
    width = now;
    draw();
  });
  const leave = shared.join({ draw, point });
  return {
    element,
    set(next) {
      series = next;
      draw();
    },
    stop() {
      watcher.disconnect();
      leave();
      own?.stop();
    },
  };
}
