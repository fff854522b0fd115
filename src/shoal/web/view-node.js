// One node: what it is, what its GPUs do, its jobs, its checks and its history.

import { nodeActions } from "./actions.js";
import { get, isAdmin, maybe, nodePath, post } from "./api.js";
import { lineChart } from "./chart-line.js";
import { hue, jobColor } from "./colors.js";
import { offer } from "./commands.js";
import { confirm } from "./dialog.js";
import {
  bytes,
  chip,
  css,
  empty,
  fixed,
  h,
  jobName,
  moment,
  number,
  plural,
  shape,
  span,
  throttled,
  verdict,
  whole,
} from "./dom.js";
import { followButton } from "./follow.js";
import { cluster, jobOf, listen, now } from "./live.js";
import { replace } from "./patch.js";
import { table } from "./table.js";

const ASK_MS = 4000;
const HISTORY_MAX = 200;
const JOBS_MAX = 50;
const fact = (name, value) => (value ? h("div", {}, h("dt", {}, name), h("dd", {}, value)) : null);
const OF_NODE = /^Node/;

export function mount(root, id) {
  const head = h("div", { class: "stack" });
  const facts = h("section", { class: "card", "aria-label": "Facts" });
  const chart = (title, unit) => lineChart({ title, unit, height: 130 });
  const curves = {
    busy: chart("GPU utilization", "%"),
    memory: chart("GPU memory", "%"),
    power: chart("GPU power", "W"),
    heat: chart("GPU temperature", "°C"),
    host: chart("CPU and memory", "%"),
  };
  const load = h(
    "section",
    { class: "card grid2", "aria-label": "Load" },
    Object.values(curves).map((one) => one.element),
  );
  const jobs = h("section", { class: "card", "aria-label": "Jobs" });
  const checks = h("section", { class: "card stack", "aria-label": "Checks" });
  const links = h("section", { class: "card", "aria-label": "Links", hidden: true });
  const tree = h("section", { class: "card", "aria-label": "Tree", hidden: true });
  const history = h("section", { class: "card", "aria-label": "History" });
  const star = followButton("node", id);
  const path = nodePath(id);
  const stopper = new AbortController();
  const { signal } = stopper;
  root.append(
    h("div", { class: "stack" }, head, facts, load, h("div", { class: "grid2" }, jobs, checks), links, tree, history),
  );
  /** @type {Api.NodeView} */
  let view = null;
  let seq = -1;
  /** @type {{ text: string, bad?: boolean, over?: boolean, stands?: Api.Stand[] }} */
  let checking = null;

  async function ask() {
    try {
      const all = await get("/v1/nodes", { signal });
      view = all.find((one) => one.id === id) ?? null;
      if (signal.aborted) return;
      if (!view) {
        replace(head, h("h1", {}, id), empty(`There is no node ${id}.`, "shoal nodes"));
        for (const one of [facts, load, jobs, checks, history]) one.hidden = true;
        return;
      }
      drawHead();
      drawFacts();
      drawLinks();
      if (view.gpus) drawTree(await maybe(`${path}/tree`, { signal }));
      const series = await maybe(`${path}/series`, { signal });
      if (series && !signal.aborted) drawCurves(series);
      if (seq !== cluster.status?.last_seq) {
        seq = cluster.status?.last_seq;
        const name = encodeURIComponent(id);
        const [{ events }, past] = await Promise.all([
          get(`/v1/events?node=${name}&after=-${5 * HISTORY_MAX}&limit=${5 * HISTORY_MAX}`, { signal }),
          get(`/v1/jobs?on_node=${name}&finished=true&limit=${JOBS_MAX}`, { signal }),
        ]);
        if (!signal.aborted) {
          drawHistory(events);
          drawJobs(past);
          drawChecks(events);
        }
      }
    } catch (error) {
      if (!signal.aborted && !view) replace(head, h("h1", {}, id), h("p", { class: "problem" }, error.message));
    }
  }

  function drawHead() {
    const standing = view.standing === "ok" ? "" : view.standing;
    replace(
      head,
      h("p", { class: "small" }, h("a", { href: "#/cluster", "data-key": "back" }, "← Cluster")),
      h(
        "div",
        { class: "row" },
        h("h1", {}, id),
        chip(view.state),
        standing && standing !== view.state ? chip(standing) : null,
        star,
        h(
          "span",
          { class: "push row" },
          view.intent !== "open" && view.closed
            ? h("span", { class: "dim small reason" }, sentence(view.closed))
            : null,
          nodeActions({ ...view, standing }),
        ),
      ),
      verdict(...summary(view)),
      view.why && (view.state !== "ready" || standing) && view.health + view.standing !== "readyok"
        ? h(
            "p",
            { class: "why" },
            view.why,
            view.since_ms ? h("span", { class: "dim" }, ` (for ${span(now() - view.since_ms)})`) : null,
          )
        : null,
      view.ends_ms
        ? h(
            "p",
            { class: "note" },
            view.ends_ms > now() ? `Ends in ${span(view.ends_ms - now())}` : "Past its end",
            view.ends_why ? `: ${view.ends_why}` : "",
          )
        : null,
    );
  }

  function drawFacts() {
    const labels = Object.entries(view.labels).map(([key, value]) => (value ? `${key}=${value}` : key));
    replace(
      facts,
      h(
        "dl",
        { class: "facts" },
        fact("GPUs", `${whole(view.gpus - view.gpus_free)} of ${whole(view.gpus)} in use`),
        fact("GPU model", view.gpu_model),
        fact("GPU memory", view.gpu_memory_mb ? bytes(view.gpu_memory_mb * 2 ** 20) : ""),
        fact(
          "CPUs",
          `${whole((view.cpu_milli - view.cpu_milli_free) / 1000)} of ${whole(view.cpu_milli / 1000)} in use`,
        ),
        fact(
          "Memory",
          `${bytes((view.memory_mb - view.memory_mb_free) * 2 ** 20)} of ${bytes(view.memory_mb * 2 ** 20)} in use`,
        ),
        fact("Location", view.place),
        fact("Measured location", view.measured_place),
        fact("Address", view.address),
        fact("Source", view.origin ? `${view.origin}${view.order ? `, order ${view.order}` : ""}` : "Head"),
        fact("Shoal version", view.version),
        fact("Container runtime", view.containers),
        fact("Sleep", view.sleep || (view.gpus && view.sleep_why ? `Not available: ${view.sleep_why}` : "")),
        fact("Asleep", view.sleepers ? plural(view.sleepers, "member") : ""),
        fact("Labels", labels.join(", ")),
        fact("Taints", view.taints.join(", ")),
        fact("Limits not enforced", view.unenforced.join("; ")),
      ),
    );
  }

  /** @param {Api.NodeTree} found */
  function drawTree(found) {
    tree.hidden = !found?.lines.length;
    if (tree.hidden) return;
    const drawing = h("pre", { class: "code", tabindex: "0", "aria-label": "Tree" }, found.lines.join("\n"));
    replace(tree, h("h2", {}, "GPUs, CPUs and cards"), drawing);
  }

  function drawCurves(series) {
    const line = (values, factor = 100) =>
      values
        .map((value, at) => [series.at_ms[at], value])
        .filter(([, value]) => value !== null && value !== undefined)
        .map(([at, value]) => [at, value * factor]);
    const each = (name, factor) =>
      series.gpus
        .map((gpu) => ({
          name: series.gpus.length > 1 ? `GPU ${gpu.gpu}` : "",
          color: hue(gpu.gpu),
          points: line(gpu[name], factor),
        }))
        .filter((one) => one.points.length);
    const set = (one, lines) => {
      one.element.hidden = !lines.length;
      if (lines.length) one.set(lines);
    };
    set(curves.busy, each("busy", 100));
    set(curves.memory, each("memory", 100));
    set(curves.power, each("power_w", 1));
    set(curves.heat, each("temperature_c", 1));
    set(
      curves.host,
      [
        { name: "CPU", color: css("--accent"), points: line(series.cpu) },
        { name: "memory", color: hue(4), points: line(series.memory), dash: "5 2" },
      ].filter((one) => one.points.length),
    );
    load.hidden = Object.values(curves).every((one) => one.element.hidden);
  }

  function drawLinks() {
    links.hidden = !view.weak_links.length;
    replace(
      links,
      h("h2", {}, "Weak links"),
      h(
        "ul",
        { class: "weak" },
        view.weak_links.map((text) => h("li", { "data-key": text }, text)),
      ),
      h("p", { class: "small" }, h("a", { href: "#/network" }, "Open network")),
    );
  }

  /** Those that are there now, and those that were placed there lately. */
  function drawJobs(past) {
    const known = new Map(past.map((job) => [job.id, job]));
    const names = [...new Set([...view.jobs, ...known.keys()])].slice(0, JOBS_MAX);
    const rows = names.map((name) => {
      const job = jobOf(name) ?? known.get(name);
      const here = view.jobs.includes(name);
      return h(
        "tr",
        { "data-key": name, "data-job": name },
        h(
          "td",
          { class: "long" },
          h("i", { class: "dot", style: { background: jobColor(name) } }),
          " ",
          h("a", { href: `#/job/${name}` }, job ? jobName(job) : name),
        ),
        h("td", {}, job ? chip(job.state) : h("span", { class: "dim" }, "Ended")),
        h("td", { class: "dim" }, here ? "Current" : "Past"),
        h("td", { class: "dim" }, job ? shape(job) : ""),
      );
    });
    replace(
      jobs,
      h("h2", {}, "Jobs"),
      rows.length
        ? table(["Job", "State", "On this node", "Resources"], rows)
        : h("p", { class: "dim" }, "No jobs yet"),
    );
  }

  // -- checks ----------------------------------------------------------------------------------

  /** @type {Api.Recorded[]} */
  let drawn = [];
  function drawChecks(events) {
    const last = events
      .filter(({ event }) => event.event === "NodeChecked")
      .reverse()
      .slice(0, 8);
    const rows = last.map(({ seq: key, event }) =>
      h(
        "tr",
        { "data-key": key },
        h("td", {}, moment(event.at_ms, now())),
        h("td", {}, chip(event.passed ? "succeeded" : "failed", event.passed ? "Passed" : "Failed")),
        h("td", { class: "dim" }, event.why || figures(event.result)),
      ),
    );
    replace(
      checks,
      h(
        "div",
        { class: "row" },
        h("h2", {}, "Checks"),
        isAdmin()
          ? h(
              "span",
              { class: "push" },
              h("button", { "data-key": "check", disabled: Boolean(checking), onclick: begin }, "Check now"),
            )
          : null,
      ),
      checking ? h("p", { class: checking.bad ? "problem" : "note", role: "status" }, checking.text) : null,
      checking?.stands
        ? table(
            ["Measurement", "num:Value", "num:Typical", "Unit"],
            checking.stands.map((one) =>
              h(
                "tr",
                { "data-key": one.figure },
                h("td", {}, measured(one.figure).name, one.low ? h("b", {}, " low") : null),
                number(people(one.value), one.value, { "data-name": "Value" }),
                number(one.usual === null ? "–" : people(one.usual), one.usual ?? undefined, {
                  "data-name": "Typical",
                }),
                h("td", { class: "dim" }, measured(one.figure).unit),
              ),
            ),
          )
        : null,
      rows.length ? table(["Time", "Result", "Details"], rows) : h("p", { class: "dim" }, "No checks yet"),
    );
    drawn = events;
  }
  const redraw = () => drawChecks(drawn);

  function begin() {
    confirm({
      title: `Check ${id}`,
      verb: "Check node",
      text: "Measures the node for a few seconds. Its jobs keep running and share it meanwhile.",
      act: async () => {
        watch(await post(`${path}/check`));
        return { note: `Checking ${id}` };
      },
    });
  }

  async function watch(asked) {
    const begun = performance.now();
    const tell = (text, more = {}) => {
      checking = { text, ...more };
      if (!signal.aborted) redraw();
    };
    const timer = setInterval(() => {
      if (!checking?.over) tell(`Checking for ${span(performance.now() - begun)}`);
    }, 1000);
    tell("Checking");
    try {
      let found = asked;
      while (!found.verdict && performance.now() - begun < 600_000 && !signal.aborted)
        found = await get(`${path}/checks/${encodeURIComponent(asked.id)}?wait_s=20`, { signal });
      tell(
        found.verdict
          ? `${found.verdict.passed ? "Passed" : "Failed"}: ` +
              `${found.verdict.why || "all measurements are typical"}${found.busy ? " (jobs were running)" : ""}. ` +
              `${found.notes.join(" ")}`
          : "No result yet",
        { over: true, bad: found.verdict?.passed === false, stands: found.verdict?.stands },
      );
    } catch (error) {
      if (!signal.aborted) tell(error.message, { over: true, bad: true });
    } finally {
      clearInterval(timer);
      if (checking) {
        checking = { ...checking, over: true };
      }
    }
  }

  function drawHistory(events) {
    const changes = view.history.map((one) => ({
      key: `s${one.at_ms}`,
      at_ms: one.at_ms,
      text: `${id} is ${one.standing}`,
      why: one.why,
    }));
    const told = events
      .filter(({ event }) => OF_NODE.test(event.event) && event.event !== "NodeJudged")
      .map(({ seq: key, event, text }) => ({ key, at_ms: event.at_ms, text, why: "" }));
    const all = [...changes, ...told].sort((a, b) => b.at_ms - a.at_ms || b.key - a.key).slice(0, HISTORY_MAX);
    replace(
      history,
      h("h2", {}, "History"),
      all.length
        ? h(
            "ol",
            { class: "events", tabindex: "0", "aria-label": "History, newest first" },
            all.map((one) =>
              h(
                "li",
                { "data-key": one.key },
                h("time", { datetime: new Date(one.at_ms).toISOString() }, moment(one.at_ms, now())),
                h("span", {}, one.text, one.why ? h("span", { class: "dim" }, ` — ${one.why}`) : null),
              ),
            ),
          )
        : h("p", { class: "dim" }, "No events yet"),
    );
  }

  const soon = throttled(500, ask);
  const stop = listen((change) => {
    if (change.whole || change.nodes?.some((one) => one.id === id) || change.gone_nodes?.includes(id)) soon();
  });
  const timer = setInterval(() => {
    if (!document.hidden) ask();
  }, ASK_MS);
  const offered = offer(() => (view && isAdmin() ? [{ title: `Check ${id} now`, hint: "node", run: begin }] : []));
  ask();
  return () => {
    stopper.abort();
    stop();
    soon.stop();
    clearInterval(timer);
    offered();
    star.stop();
    for (const one of Object.values(curves)) one.stop();
  };
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const HEALTH = { ready: "Healthy", silent: "Not responding", lost: "Lost", joining: "Joining" };

/**
 * The node in one sentence, and its tone.
 * @param {Api.NodeView} view
 * @returns {[string, string]}
 */
function summary(view) {
  const ill = view.health !== "ready" || view.standing !== "ok";
  const health = view.standing !== "ok" ? sentence(view.standing) : (HEALTH[view.health] ?? sentence(view.health));
  const weak = view.weak_links.length ? plural(view.weak_links.length, "weak link") : "";
  const jobs = view.jobs.length ? plural(view.jobs.length, "job") : "no jobs";
  const gpus = view.gpus ? `${whole(view.gpus - view.gpus_free)} of ${plural(view.gpus, "GPU")} in use` : "";
  const closed = view.intent === "open" ? "" : view.closed;
  const text = [health, jobs, gpus, view.hangs, weak, closed].filter(Boolean).join("; ");
  return [`${text}.`, ill ? "bad" : closed || weak || view.hangs ? "warn" : "ok"];
}

// The unit is the end of a measurement's name.
const UNITS = [
  ["_gbs", "GB/s"],
  ["_mbs", "MB/s"],
  ["_mb", "MB"],
  ["_us", "µs"],
  ["_ms", "ms"],
  ["_s", "s"],
  ["_c", "°C"],
  ["_w", "W"],
  ["_mhz", "MHz"],
  ["_gflops", "GFLOP/s"],
  ["_tflops", "TFLOP/s"],
  ["_percent", "%"],
  ["_errors", "errors"],
  ["_count", ""],
];
function measured(figure) {
  const [end, unit] = UNITS.find(([ending]) => figure.endsWith(ending)) ?? ["", ""];
  const name = (end && unit !== "errors" ? figure.slice(0, -end.length) : figure).replaceAll("_", " ");
  return { name: sentence(name), unit };
}
const people = (value) => (Math.abs(value) >= 100 ? whole(value) : fixed(value, Number.isInteger(value) ? 0 : 1));
const figures = (result) =>
  Object.entries(result?.figures ?? {})
    .slice(0, 4)
    .map(([name, value]) => `${measured(name).name} ${people(value)} ${measured(name).unit}`.trim())
    .join(", ");
