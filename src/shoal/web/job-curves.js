// A job's curves: what its script logs, its members, and the GPUs and nodes it ran on.

import { choose, chosen } from "./address.js";
import { Limits } from "./bound.js";
import { chartGroup } from "./chart-group.js";
import { lineChart } from "./chart-line.js";
import { look, strip } from "./charts.js";
import { css, h, short, span } from "./dom.js";
import { causeOf } from "./job-state.js";
import { replace } from "./patch.js";
import { NodeCurve } from "./series.js";

const BUCKETS_MAX = 160;
const LINES_MAX = 8; // of one chart; more are summed up
const NODES_AT_ONCE = 4;
const known = (value) => typeof value === "number";

/** How a metric's name reads as a title. */
const titleOf = (name) => ({ lr: "learning rate" })[name] ?? name.replaceAll("_", " ");

/** Where attempts began again and when the job slept. */
export function marksOf(attempts) {
  const again = attempts.slice(1).map((one, at) => ({
    at: one.running_ms ?? one.placed_ms,
    text: `attempt ${one.attempt}, after: ${causeOf(attempts[at].cause)}`,
  }));
  const naps = attempts.flatMap((one) =>
    (one.slept_at ?? []).map(([from, to]) => ({ at: from, sign: "☾", text: `suspended for ${span(to - from)}` })),
  );
  const now = attempts
    .filter((one) => one.dozed_ms)
    .map((one) => ({ at: one.dozed_ms, sign: "☾", text: "suspended since then" }));
  return [...again, ...naps, ...now];
}

/**
 * Everything that a job's series has, as { key, title, unit, zero, steep, points } in one order.
 * @param {Answer<"GET", `/v1/jobs/${string}/series`>} series
 */
export function linesOf(series) {
  const points = series?.points.filter((point) => point.step > 0) ?? [];
  const all = [
    {
      key: "loss",
      title: "loss",
      zero: false,
      steep: true,
      points: points.filter((one) => known(one.loss)).map((one) => [one.at_ms, one.loss, one.step]),
    },
    ...(series?.metrics ?? []).map((one) => ({
      key: `m/${one.name}`,
      title: titleOf(one.name),
      zero: false,
      steep: false,
      points: one.at_ms
        .map((at, index) => [at, one.values[index], one.steps?.[index]])
        .filter(([, value]) => known(value)),
    })),
    {
      key: "pace",
      title: "step time",
      unit: "ms",
      zero: true,
      steep: false,
      points: points.filter((one) => one.step_ms).map((one) => [one.at_ms, one.step_ms, one.step]),
    },
  ];
  return all.filter((one) => one.points.length);
}

/** Charts by key, made when first needed. `set` hides those that get no lines. */
export class Charts {
  /** @param {boolean | "since"} times */
  constructor(group, times = true) {
    this.group = group;
    this.times = times;
    this.known = new Map();
    this.element = h("div", { class: "grid2 charts" });
  }

  set(all) {
    const named = new Set(all.map((one) => one.key));
    for (const [key, chart] of this.known) chart.element.hidden = !named.has(key);
    for (const one of all) {
      let chart = this.known.get(one.key);
      if (!chart) {
        chart = lineChart({ ...one, group: this.group, times: this.times });
        chart.element.dataset.chart = one.key;
        this.known.set(one.key, chart);
        this.element.append(chart.element);
      }
      chart.set(one.lines);
    }
    this.element.hidden = !all.length;
  }

  stop() {
    for (const chart of this.known.values()) chart.stop();
  }
}

export class JobCurves {
  constructor() {
    this.group = chartGroup({ axes: ["step", "time"] });
    this.logged = new Charts(this.group);
    this.heat = strip({ title: "Members", note: "step time compared with the other members", color: slowness });
    this.limits = new Limits(this.group);
    this.each = new Charts(this.group);
    this.load = new Load(this.group);
    this.members = h(
      "section",
      { class: "card stack", "aria-label": "By member", hidden: true },
      h("h2", {}, "By member"),
      this.each.element,
    );
    this.progress = h(
      "section",
      { class: "card stack", "aria-label": "Progress", hidden: true },
      this.logged.element,
      this.load.beside.element,
      this.heat.element,
    );
    this.bar = h("div", { class: "card", hidden: true }, this.group.element);
    this.element = h("div", { class: "stack", hidden: true }, this.bar, this.progress, this.limits.element);
    // below the log, which people look at more often
    this.more = h("div", { class: "stack", hidden: true }, this.members, this.load.element);
  }

  /** `series` may be null; `slow`: numbers of the members that are slow now. */
  draw(job, history, series, slow) {
    const marks = marksOf(history.attempts);
    const accent = css("--accent");
    const lines = linesOf(series);
    this.logged.set(lines.map((one) => ({ ...one, lines: [{ name: "", color: accent, points: one.points, marks }] })));
    this.heat.set(
      rowsOf(series?.members ?? [], slow, job.attempt),
      `Step time by member; ${slow.length ? `slow: ${slow.join(", ")}` : "none slow"}`,
    );
    this.lines = lines.length;
    this.limits.draw(
      history.progress?.bound ?? (job.finished_ms ? history.attempts.at(-1)?.bound : null),
      series?.members ?? [],
      job.attempt,
    );
    const each = eachMember(series?.members ?? [], marks);
    this.each.set(each);
    this.members.hidden = !each.length;
    this.shown();
  }

  async drawLoad(job, history, options) {
    await this.load.draw(job, history, options);
    this.shown();
  }

  /** An empty part takes no room. */
  shown() {
    this.progress.hidden = !this.lines && Boolean(this.load.beside.element.hidden);
    this.bar.hidden = Boolean(this.progress.hidden && this.load.element.hidden);
    this.element.hidden = Boolean(this.bar.hidden && this.limits.element.hidden);
    this.more.hidden = Boolean(this.members.hidden && this.load.element.hidden);
  }

  stop() {
    for (const one of [this.logged, this.heat, this.limits, this.each, this.load, this.group]) one.stop();
  }
}

// -- members -----------------------------------------------------------------------------------

const SHARES = [
  ["step_ms", "Step time", "ms", 1],
  ["wait_share", "Waiting for peers", "%", 100],
  ["data_share", "Waiting for data", "%", 100],
  ["save_share", "Saving", "%", 100],
];

/** A line for each member of a gang; of a large one the least, the median and the most at each moment. */
function eachMember(members, marks) {
  const count = new Set(members.map((one) => one.member)).size;
  if (count < 2) return [];
  return SHARES.map(([field, title, unit, factor]) => {
    const lines = count <= LINES_MAX ? byMember(members, field, factor) : spread(members, field, factor);
    return { key: field, title, unit, lines: lines.map((one, at) => ({ ...one, marks: at ? [] : marks })) };
  }).filter((one) => one.lines.some((line) => line.points.some(([, value]) => value > 0)));
}
function byMember(members, field, factor) {
  const found = new Map();
  for (const one of members) {
    const line = found.get(one.member) ?? { name: String(one.member), ...look(one.member), points: [] };
    one.at_ms.forEach((at, index) => {
      if (known(one[field][index])) line.points.push([at, factor * one[field][index]]);
    });
    found.set(one.member, line);
  }
  return [...found.values()];
}
function spread(members, field, factor) {
  const at = new Map();
  for (const one of members)
    one.at_ms.forEach((ms, index) => {
      if (known(one[field][index])) at.set(ms, [...(at.get(ms) ?? []), factor * one[field][index]]);
    });
  const sorted = [...at].sort(([a], [b]) => a - b).map(([ms, values]) => [ms, values.sort((a, b) => a - b)]);
  return Object.entries({ min: 0, median: 0.5, max: 1 }).map(([name, part], number) => ({
    name,
    ...look(number),
    points: sorted.map(([ms, values]) => [ms, values[Math.round((values.length - 1) * part)]]),
  }));
}

/** 0 is as fast as the others, 1 is at most half as fast. */
function slowness(value) {
  const part = Math.max(0, Math.min(1, value));
  return `color-mix(in srgb, ${css("--bad")} ${Math.round(part * 100)}%, ${css("--accent-soft")})`;
}

function rowsOf(members, slow, attempt) {
  const mine = members.filter((one) => one.attempt === attempt || attempt === 0);
  if (!mine.length) return [];
  const own = mine.map((one) =>
    one.step_ms.map((ms, at) => (known(ms) ? ms * (1 - (one.wait_share?.[at] ?? 0)) : null)),
  );
  const length = Math.max(...own.map((values) => values.length));
  const from = Math.max(0, length - BUCKETS_MAX);
  const usual = Array.from({ length }, (_, at) => {
    const all = own
      .map((values) => values[at])
      .filter(known)
      .sort((a, b) => a - b);
    return all.length ? all[(all.length - 1) >> 1] : 0;
  });
  const each = (index, act) =>
    Array.from({ length: length - from }, (_, at) => {
      const ms = own[index][from + at];
      return known(ms) ? act(ms, usual[from + at]) : null;
    });
  return mine.map((one, index) => ({
    name: `${one.member} ${one.node}`,
    marked: slow.includes(one.member),
    values: each(index, (ms, middle) => (middle ? ms / middle - 1 : null)),
    notes: each(index, (ms, middle) => `${short(ms)} ms without waits; median ${short(middle)} ms`),
  }));
}

// -- GPUs and nodes ----------------------------------------------------------------------------

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
/** @type {["busy" | "memory" | "power_w" | "temperature_c", string, string, number, (values: number[]) => number][]} */
const OF_GPU = [
  ["busy", "GPU utilization", "%", 100, mean],
  ["memory", "GPU memory", "%", 100, mean],
  ["power_w", "GPU power", "W", 1, mean],
  ["temperature_c", "GPU temperature", "°C", 1, (values) => Math.max(...values)],
];
const BESIDE = new Set(["gpu/busy", "gpu/memory"]); // the rest is below the log
/** @type {["cpu" | "memory", string, string, number][]} */
const OF_NODE = [
  ["cpu", "Node CPU", "%", 100],
  ["memory", "Node memory", "%", 100],
];

/**
 * When the job held which GPUs: [{ node, gpus, from, to }], the newest attempt first.
 * @param {Api.JobView} job
 * @param {Api.WhyView} history
 */
function holdings(job, history) {
  const slices = new Map(
    history.events.filter(({ event }) => event.event === "JobPlaced").map(({ event }) => [event.attempt, event.slices]),
  );
  if (job.gang.length) slices.set(job.attempt, job.gang);
  return history.attempts.toReversed().flatMap((one) => {
    const to = one.ended_ms ?? Infinity;
    const naps = [...(one.slept_at ?? []), ...(one.dozed_ms ? [[one.dozed_ms, to]] : [])];
    const nodes = new Map();
    for (const { node, gpus } of slices.get(one.attempt) ?? [])
      nodes.set(node, [...(nodes.get(node) ?? []), ...(gpus ?? [])]);
    return [...nodes].map(([node, gpus]) => ({ node, gpus, from: one.placed_ms, to, naps }));
  });
}

/** What the GPUs and nodes of a job did while it held them; of other times and GPUs nothing is drawn. */
class Load {
  constructor(group) {
    this.charts = new Charts(group);
    this.beside = new Charts(group); // the curves of what the job logs
    this.which = h("select", {
      "aria-label": "Nodes",
      onchange: () => {
        choose("nodes", this.which.value);
        this.again?.();
      },
    });
    this.note = h("p", { class: "dim small" });
    this.element = h(
      "section",
      { class: "card stack", "aria-label": "GPUs and nodes", hidden: true },
      h("div", { class: "row" }, h("h2", {}, "GPUs and nodes"), this.which),
      this.charts.element,
      this.note,
    );
    this.curves = new Map();
  }

  async draw(job, history, options) {
    this.again = () => this.draw(job, history, options).catch(() => {});
    const held = holdings(job, history);
    const nodes = [...new Set(held.map((one) => one.node))];
    if (!nodes.length) return;
    const shown = this.choice(nodes);
    const since = Math.max(0, Math.min(...held.map((one) => one.from)) - 1);
    await Promise.all(
      shown.map(async (node) => {
        if (!this.curves.has(node)) this.curves.set(node, new NodeCurve(node, since));
        await this.curves.get(node).more(options);
      }),
    );
    const all = [...this.ofGpus(held, shown), ...this.ofNodes(held, shown)].filter((one) =>
      one.lines.some((line) => line.points.length),
    );
    const beside = all.filter((one) => BESIDE.has(one.key));
    const rest = all.filter((one) => !BESIDE.has(one.key));
    this.beside.set(beside);
    this.charts.set(rest);
    this.element.hidden = !rest.length;
    replace(
      this.note,
      "While the job held them. CPU and memory are for the whole node.",
      all.some((one) => one.key.startsWith("gpu")) ? "" : " The GPU driver reports no load.",
    );
  }

  /** Four nodes at a time, because a large job has hundreds. */
  choice(nodes) {
    const parts = Array.from({ length: Math.ceil(nodes.length / NODES_AT_ONCE) }, (_, at) =>
      nodes.slice(at * NODES_AT_ONCE, (at + 1) * NODES_AT_ONCE),
    );
    const mine = Math.max(
      0,
      parts.findIndex((part) => part[0] === chosen("nodes")),
    );
    this.which.hidden = parts.length < 2;
    replace(
      this.which,
      parts.map((part, at) =>
        h(
          "option",
          { value: at ? part[0] : "", selected: at === mine },
          part.length > 1 ? `${part[0]} to ${part.at(-1)}` : part[0],
        ),
      ),
    );
    return parts[mine];
  }

  /** `values(series, index, piece)`: of one sample; null if it is not known. */
  line(name, look, node, held, values) {
    const series = this.curves.get(node).held;
    const pieces = held.filter((one) => one.node === node);
    const points = [];
    (series?.at_ms ?? []).forEach((at, index) => {
      const piece = pieces.find(
        (one) => at >= one.from && at <= one.to && !one.naps.some(([from, to]) => at > from && at < to),
      );
      const value = piece ? values(series, index, piece) : null;
      if (known(value)) points.push([at, value]);
    });
    return { name, ...look, points };
  }

  ofGpus(held, nodes) {
    const gpus = nodes.flatMap((node) =>
      [...new Set(held.filter((one) => one.node === node).flatMap((one) => one.gpus))].map((gpu) => [node, gpu]),
    );
    return OF_GPU.map(([field, title, unit, factor, sum]) => {
      const one = (series, index, gpu) => {
        const value = series.gpus[gpu]?.[field][index];
        return known(value) ? factor * value : null;
      };
      const each = () =>
        gpus.map(([node, gpu], at) =>
          this.line(`${node}/${gpu}`, look(at), node, held, (series, index, piece) =>
            piece.gpus.includes(gpu) ? one(series, index, gpu) : null,
          ),
        );
      const all = () =>
        nodes.map((node, at) =>
          this.line(node, look(at), node, held, (series, index, piece) => {
            const values = piece.gpus.map((gpu) => one(series, index, gpu)).filter(known);
            return values.length ? sum(values) : null;
          }),
        );
      return { key: `gpu/${field}`, title, unit, lines: gpus.length <= LINES_MAX ? each() : all() };
    });
  }

  ofNodes(held, nodes) {
    return OF_NODE.map(([field, title, unit, factor]) => ({
      key: `node/${field}`,
      title,
      unit,
      lines: nodes.map((node, at) =>
        this.line(node, look(at), node, held, (series, index) =>
          known(series[field][index]) ? factor * series[field][index] : null,
        ),
      ),
    }));
  }

  stop() {
    this.charts.stop();
    this.beside.stop();
  }
}
