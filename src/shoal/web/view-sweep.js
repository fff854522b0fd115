// A sweep: its trials by any column, all of them in one picture, the curves of the best, and the worst to be stopped.

import { choose, chosen } from "./address.js";
import { get, jobPath, mayChange, post } from "./api.js";
import { chartGroup } from "./chart-group.js";
import { look } from "./charts.js";
import { confirm } from "./dialog.js";
import { chip, empty, fixed, h, jobName, money, number, plural, short, verdict, whole } from "./dom.js";
import { Charts, linesOf } from "./job-curves.js";
import { replace } from "./patch.js";
import { save } from "./save.js";
import { JobCurve } from "./series.js";
import { sweepPlot } from "./sweep-plot.js";

const ASK_MS = 4000;
const PAGE = 100;
const PAGE_MAX = 1000;
const CURVES_MAX = 10;
const CURVES = 5; // of the best, if none is chosen
const HOUR_MS = 3_600_000;
const LIVE = new Set(["waiting", "starting", "running", "dozing", "asleep", "waking"]);
const RUNNING = new Set(["starting", "running", "stopping", "waiting", "pending"]);

export function mount(root, id) {
  const ending = new AbortController();
  const { signal } = ending;
  const head = h("div", { class: "stack" });
  const plot = sweepPlot();
  const group = chartGroup({ axes: ["step", "time"] });
  const charts = new Charts(group, "since");
  const picture = h("section", { class: "card", "aria-label": "All trials" }, plot.element);
  const note = h("span", { class: "dim small" });
  const curves = h(
    "section",
    { class: "card stack", "aria-label": "Curves", hidden: true },
    h("div", { class: "row" }, h("h2", {}, "Curves"), note),
    group.element,
    charts.element,
  );
  const list = h("section", { class: "card stack", "aria-label": "Trials" });
  root.append(h("div", { class: "stack" }, head, picture, list, curves));
  /** @type {Api.TrialsView} */
  let view = null;
  let busy = false;
  let changed = false;
  const known = new Map(); // curves by trial
  const picked = () => chosen("pick").split(",").filter(Boolean);
  const limit = () => Math.min(PAGE_MAX, Number(chosen("limit")) || PAGE);
  const path = (offset, count) => {
    const words = new URLSearchParams({ offset: String(offset), limit: String(count) });
    if (chosen("by")) words.set("by", chosen("by"));
    if (chosen("best") === "max") words.set("highest", "true");
    if (chosen("best") === "min") words.set("highest", "false");
    if (chosen("sort")) words.set("sort", chosen("sort"));
    return /** @type {const} */ (`${jobPath(id)}/trials?${words}`);
  };
  const best = (extent) => (extent ? (view.highest ? extent.high : extent.low) : null);
  const stepOf = (extent) => (view.highest ? extent.high_step : extent.low_step);
  const value = (trial) => best(trial.metrics[view.by]) ?? null;
  const set = (name, word) => {
    choose(name, word);
    ask();
  };

  async function ask() {
    if (busy) {
      changed = true; // meanwhile: it is asked once more
      return;
    }
    busy = true;
    changed = false;
    try {
      view = await get(path(0, limit()), { signal });
      if (signal.aborted) return;
      draw();
      await drawCurves();
    } catch (error) {
      if (signal.aborted) return;
      if (!view && [404, 422].includes(error.status))
        replace(
          head,
          h("h1", {}, `Sweep ${id}`),
          empty(`${id} is not a sweep, or is no longer kept.`, "shoal run --grid lr=0.1,0.01 -- python train.py"),
        );
      else if (error.field === "sort" && chosen("sort")) set("sort", "");
    } finally {
      busy = false;
      if (changed && !signal.aborted) ask();
    }
  }

  function draw() {
    drawHead();
    plot.set({
      trials: view.trials,
      variables: view.variables,
      value,
      best: view.best,
      by: view.by,
      highest: view.highest,
      open: (trial) => toggle(trial.id),
    });
    picture.hidden = plot.element.hidden;
    drawList();
  }

  const leader = () => view.trials.find((trial) => trial.id === view.best);
  const spent = (trial) =>
    [
      trial.gpu_ms ? `${fixed(trial.gpu_ms / HOUR_MS, 2)} GPU-hours` : "",
      typeof trial.cost === "number" ? money(trial.cost, view.currency) : "",
    ]
      .filter(Boolean)
      .join(", ");

  function drawHead() {
    const top = leader();
    const values = Object.entries(top?.values ?? {}).map((pair) => pair.join("="));
    const words = top
      ? `Best: ${top.id} with ${view.by} ${short(value(top))} at step ` +
        `${whole(stepOf(top.metrics[view.by]))} (${values.join(", ")})`
      : view.best
        ? `Best: ${view.best}`
        : "No trial has reported a metric yet.";
    const select = (name, label, choices, now) =>
      h(
        "label",
        { class: "row small" },
        label,
        h(
          "select",
          { name, onchange: (event) => set(name, event.target.value) },
          choices.map(([word, text]) => h("option", { value: word, selected: word === now }, text)),
        ),
      );
    const live = view.trials.filter((trial) => LIVE.has(trial.state));
    const ids = picked();
    replace(
      head,
      h("p", { class: "small" }, h("a", { href: `#/job/${id}`, "data-key": "back" }, `← ${id}`)),
      h(
        "div",
        { class: "row" },
        h("h1", {}, `Sweep ${jobName(view)}`),
        chip(view.state),
        h("span", { class: "dim small" }, plural(view.total + view.left_out, "trial"), ", ", spent(view) || "no GPUs"),
      ),
      verdict(words),
      h(
        "div",
        { class: "row" },
        view.metrics.length
          ? [
              select(
                "by",
                "Metric",
                view.metrics.map((name) => [name, name]),
                view.by,
              ),
              select(
                "best",
                "Best is",
                [
                  ["min", "lowest"],
                  ["max", "highest"],
                ],
                view.highest ? "max" : "min",
              ),
            ]
          : null,
        h(
          "span",
          { class: "push row" },
          h(
            "a",
            {
              class: `button ${ids.length > 1 ? "" : "dim"}`,
              "data-key": "compare",
              href: `#/compare/${(ids.length ? ids : view.trials.slice(0, CURVES).map((one) => one.id)).join(",")}`,
            },
            ids.length ? `Compare ${ids.length} selected` : `Compare top ${Math.min(CURVES, view.trials.length)}`,
          ),
          mayChange()
            ? h(
                "button",
                { "data-key": "stop", disabled: live.length < 2, onclick: () => stopWorst() },
                "Stop the worst…",
              )
            : null,
          h("button", { "data-key": "csv", onclick: toCsv }, "CSV"),
        ),
      ),
    );
  }

  function toggle(trial) {
    const ids = picked();
    const next = ids.includes(trial) ? ids.filter((one) => one !== trial) : [...ids, trial].slice(-CURVES_MAX);
    choose("pick", next.join(","));
    draw();
    drawCurves();
  }

  /**
   * What it is sorted by, its head, and the cell of a trial.
   * @returns {any[]}
   */
  function columns() {
    const others = view.metrics.filter((name) => name !== view.by);
    const reached = view.metrics.includes(view.by)
      ? [
          [view.by, `Best ${view.by}`, (trial) => number(shown(value(trial)), value(trial) ?? undefined)],
          ["", "At step", (trial) => number(value(trial) === null ? "–" : whole(stepOf(trial.metrics[view.by])))],
          [`last.${view.by}`, `Last ${view.by}`, (trial) => number(shown(trial.metrics[view.by]?.last))],
        ]
      : [];
    return [
      ...view.variables.map((name) => [name, name, (trial) => h("td", { class: "mono" }, trial.values[name])]),
      ...reached,
      ...others.map((name) => [`last.${name}`, name, (trial) => number(shown(trial.metrics[name]?.last))]),
      ["step", "Step", (trial) => number(trial.step ? whole(trial.step) : "–")],
      ...(view.gpu_ms ? [["gpu_time", "GPU-hours", (trial) => number(fixed(trial.gpu_ms / HOUR_MS, 2))]] : []),
      ...(view.currency ? [["cost", "Cost", (trial) => number(money(trial.cost, view.currency))]] : []),
    ];
  }
  const shown = (figure) => (typeof figure === "number" ? short(figure) : "–");

  function drawList() {
    const sort = chosen("sort") || (view.by ? `${view.highest ? "-" : ""}${view.by}` : "index");
    const ids = new Set(picked());
    const all = columns();
    /** @param {[string, string, ...any[]]} column */
    const headCell = ([key, text], at) => {
      const on = key && (sort === key || sort === `-${key}`);
      const down = sort === `-${key}`;
      return h(
        "th",
        {
          scope: "col",
          class: at >= view.variables.length ? "num" : "",
          "aria-sort": on ? (down ? "descending" : "ascending") : key ? "none" : null,
        },
        key
          ? h(
              "button",
              { class: "sorts", "data-key": key, onclick: () => set("sort", on && !down ? `-${key}` : key) },
              text,
              on ? (down ? " ↓" : " ↑") : "",
            )
          : text,
      );
    };
    const rows = view.trials.map((trial) =>
      h(
        "tr",
        { "data-key": trial.id, "data-trial": trial.id },
        h(
          "td",
          {},
          h("input", {
            type: "checkbox",
            style: { "min-height": "0" },
            checked: ids.has(trial.id),
            "aria-label": `Select ${trial.id}`,
            onchange: () => toggle(trial.id),
          }),
        ),
        h(
          "td",
          { class: trial.id === view.best ? "best" : "" },
          trial.state === "pending" ? trial.id : h("a", { href: `#/job/${trial.id}` }, trial.id),
        ),
        h("td", { title: trial.why || null }, chip(trial.state)),
        all.map(([, , cell]) => cell(trial)),
      ),
    );
    const more = view.trials.length < view.total && limit() < PAGE_MAX;
    const left = view.total + view.left_out - view.trials.length;
    replace(
      list,
      h(
        "div",
        { class: "row" },
        h("h2", {}, "Trials"),
        h(
          "span",
          { class: "dim small" },
          left ? `${whole(view.trials.length)} of ${whole(view.total + view.left_out)}` : "",
        ),
      ),
      h(
        "div",
        {
          class: "scroll",
          style: { "max-height": "520px", overflow: "auto" },
          tabindex: "0",
          role: "region",
          "aria-label": "Table of trials",
        },
        h(
          "table",
          {},
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              h("th", { scope: "col" }, h("span", { class: "unseen" }, "Select")),
              headCell(["index", "Trial"], -1),
              headCell(["state", "State"], -1),
              all.map(headCell),
            ),
          ),
          h("tbody", {}, rows),
        ),
      ),
      more
        ? h(
            "button",
            { class: "more", onclick: () => set("limit", String(Math.min(PAGE_MAX, limit() * 2))) },
            "Show more",
          )
        : left
          ? h("p", { class: "dim small" }, "The CSV has the first 10,000 trials.")
          : null,
    );
  }

  /** Curves over each other: of the chosen trials, or of the best. */
  async function drawCurves() {
    const ids = picked();
    const ranked = [...view.trials].filter((trial) => value(trial) !== null).sort((a, b) => value(a) - value(b));
    if (view.highest) ranked.reverse();
    const shownIds = ids.length ? ids : ranked.slice(0, CURVES).map((trial) => trial.id);
    const runs = await Promise.all(
      shownIds.map(async (one, at) => {
        if (!known.has(one)) known.set(one, new JobCurve(one, false));
        const series = await known.get(one).more({ signal });
        const lines = linesOf(series);
        const began = Math.min(...lines.flatMap((line) => line.points.slice(0, 1).map(([moment]) => moment)));
        return { id: one, at, lines, began };
      }),
    );
    if (signal.aborted) return;
    const keys = new Map(runs.flatMap((run) => run.lines.map((line) => [line.key, line])));
    const first = (key) => Number(key !== view.by && key !== `m/${view.by}`);
    charts.set(
      [...keys.values()]
        .sort((a, b) => first(a.key) - first(b.key))
        .map((line) => ({
          ...line,
          points: undefined,
          lines: runs.flatMap((run) => {
            const own = run.lines.find((one) => one.key === line.key);
            if (!own) return [];
            const points = own.points.map(([moment, figure, step]) => [moment - run.began, figure, step]);
            return [{ name: run.id, ...look(run.at), marks: [], points }];
          }),
        })),
    );
    curves.hidden = !keys.size;
    note.textContent = ids.length ? `${plural(ids.length, "selected trial")}` : `Top ${shownIds.length} by ${view.by}`;
  }

  /** Those that run or wait, the worst first: without a value they are not judged. */
  async function worst() {
    const all = (await get(path(0, PAGE_MAX), { signal })).trials;
    const live = all.filter((trial) => LIVE.has(trial.state) && value(trial) !== null);
    return live.sort((a, b) => (view.highest ? value(a) - value(b) : value(b) - value(a)));
  }

  async function stopWorst() {
    const candidates = await worst();
    if (candidates.length < 2) {
      await confirm({
        title: "No trial to stop",
        text: `Fewer than two running trials have reported ${view.by}.`,
        verb: "OK",
        act: () => ({ note: "Nothing was stopped" }),
      });
      return;
    }
    const body = h("div", { class: "stack" });
    const lines = (count) => {
      const doomed = candidates.slice(0, count);
      const sum = { gpu_ms: 0, cost: view.currency ? 0 : null };
      for (const one of doomed) {
        sum.gpu_ms += one.gpu_ms;
        if (sum.cost !== null) sum.cost += one.cost ?? 0;
      }
      replace(
        body,
        h(
          "ul",
          { class: "plain scroll" },
          doomed.map((trial) =>
            h(
              "li",
              {},
              `${trial.id}: ${view.by} ${short(value(trial))} at step ${whole(trial.step)}`,
              spent(trial) ? `, used ${spent(trial)}` : "",
            ),
          ),
        ),
        spent(sum) ? h("p", {}, `Together they have used ${spent(sum)}.`) : "",
        h("p", { class: "dim small" }, `They end as cancelled. Run them again with: shoal retry ${id}`),
      );
    };
    const half = Math.floor(candidates.length / 2);
    const asked = confirm({
      title: "Stop the worst trials",
      text:
        `${plural(candidates.length, "running trial")} ranked by ${view.by}, ` +
        `${view.highest ? "highest" : "lowest"} is best.`,
      verb: "Stop them",
      danger: true,
      fields: [{ name: "count", label: "How many", min: 1, max: candidates.length - 1, value: half }],
      body,
      act: async ({ count }) => {
        const doomed = candidates.slice(0, Number(count));
        for (const trial of doomed) await post(`${jobPath(trial.id)}/cancel`);
        return { note: `Stopped ${plural(doomed.length, "trial")}` };
      },
    });
    lines(half);
    body.closest("form")?.addEventListener("input", (event) => {
      if (event.target instanceof HTMLInputElement) lines(Number(event.target.value) || 0);
    });
    if (await asked) ask();
  }

  async function toCsv() {
    const rows = [];
    do rows.push(...(await get(path(rows.length, PAGE_MAX), { signal })).trials);
    while (rows.length < view.total && rows.length % PAGE_MAX === 0);
    const quoted = (cell) =>
      /[",\n]/.test(String(cell)) ? `"${String(cell).replaceAll('"', '""')}"` : String(cell ?? "");
    const names = view.metrics.flatMap((name) => [`best ${name}`, `step of best ${name}`, `last ${name}`]);
    const lines = [["trial", "state", ...view.variables, ...names, "step", "gpu_hours", "cost", "currency"]];
    for (const trial of rows)
      lines.push([
        trial.id,
        trial.state,
        ...view.variables.map((name) => trial.values[name]),
        ...view.metrics.flatMap((name) => {
          const extent = trial.metrics[name];
          return extent ? [best(extent) ?? "", stepOf(extent), extent.last ?? ""] : ["", "", ""];
        }),
        String(trial.step),
        String(trial.gpu_ms / HOUR_MS),
        trial.cost ?? "",
        view.currency,
      ]);
    save(`${id}-trials.csv`, [`${lines.map((line) => line.map(quoted).join(",")).join("\r\n")}\r\n`]);
  }

  const timer = setInterval(() => {
    const over = view && !RUNNING.has(view.state);
    if (!over && !document.hidden) ask();
  }, ASK_MS);
  window.addEventListener("shoal-theme", () => view && draw(), { signal });
  ask();
  return () => {
    ending.abort();
    clearInterval(timer);
    plot.stop();
    charts.stop();
    group.stop();
  };
}
