// One node: what it is, what its GPUs do, what runs and ran there, its checks, and what became of it.

import { nodeActions } from "./actions.js";
import { get, isAdmin, maybe, nodePath, post } from "./api.js";
import { lineChart } from "./chart-line.js";
import { hue, jobColour } from "./colours.js";
import { offer } from "./commands.js";
import { confirm } from "./dialog.js";
import { bytes, chip, css, empty, h, jobName, moment, plural, shape, span, throttled, whole } from "./dom.js";
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
    busy: chart("GPUs busy", "%"),
    memory: chart("GPU memory", "%"),
    power: chart("GPU power", "W"),
    heat: chart("GPU temperature", "°C"),
    host: chart("CPU and memory of the machine", "%"),
  };
  const load = h(
    "section",
    { class: "card grid2", "aria-label": "Load" },
    Object.values(curves).map((one) => one.element),
  );
  const jobs = h("section", { class: "card", "aria-label": "Jobs" });
  const checks = h("section", { class: "card stack", "aria-label": "Checks" });
  const links = h("section", { class: "card", "aria-label": "Links", hidden: true });
  const history = h("section", { class: "card", "aria-label": "History" });
  const star = followButton("node", id);
  const path = nodePath(id);
  const stopper = new AbortController();
  const { signal } = stopper;
  root.append(
    h("div", { class: "stack" }, head, facts, load, h("div", { class: "grid2" }, jobs, checks), links, history),
  );
  /** @type {Api.NodeView} */
  let view = null;
  let seq = -1;
  /** @type {{ text: string, bad?: boolean, over?: boolean, stands?: Api.Stand[] }} */
  let checking = null;
  let closed = "";

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
      h("p", { class: "small" }, h("a", { href: "#/cluster", "data-key": "back" }, "← all nodes")),
      h(
        "div",
        { class: "row" },
        h("h1", {}, id),
        chip(view.state),
        standing && standing !== view.state ? chip(standing) : null,
        star,
        h("span", { class: "push row" }, nodeActions({ ...view, standing })),
      ),
      view.intent !== "open" && closed ? h("p", { class: "why" }, closed) : null,
      view.why && (view.state !== "ready" || standing) && view.health + view.standing !== "readyok"
        ? h(
            "p",
            { class: "why" },
            view.why,
            view.since_ms ? h("span", { class: "dim" }, `, since ${span(now() - view.since_ms)}`) : null,
          )
        : null,
      view.ends_ms
        ? h(
            "p",
            { class: "note" },
            view.ends_ms > now() ? `Ends in ${span(view.ends_ms - now())}` : "Its end has come",
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
        fact("Model", view.gpu_model),
        fact("Memory of each GPU", view.gpu_memory_mb ? bytes(view.gpu_memory_mb * 2 ** 20) : ""),
        fact(
          "CPUs",
          `${whole((view.cpu_milli - view.cpu_milli_free) / 1000)} of ${whole(view.cpu_milli / 1000)} in use`,
        ),
        fact(
          "Memory",
          `${bytes((view.memory_mb - view.memory_mb_free) * 2 ** 20)} of ${bytes(view.memory_mb * 2 ** 20)} in use`,
        ),
        fact("Place", view.place),
        fact("Measured place", view.measured_place),
        fact("Address", view.address),
        fact(
          "Came from",
          view.origin ? `${view.origin}${view.order ? `, order ${view.order}` : ""}` : "the head's machine",
        ),
        fact("Shoal", view.version),
        fact("Images", view.containers),
        fact("Sleep", view.sleep || (view.gpus && view.sleep_why ? `no: ${view.sleep_why}` : "")),
        fact("Asleep there", view.sleepers ? plural(view.sleepers, "member") : ""),
        fact("Labels", labels.join(", ")),
        fact("Taints", view.taints.join(", ")),
        fact("Not enforced", view.unenforced.join("; ")),
      ),
    );
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
          colour: hue(gpu.gpu),
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
        { name: "CPU", colour: css("--accent"), points: line(series.cpu) },
        { name: "memory", colour: hue(4), points: line(series.memory), dash: "5 2" },
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
      h("p", { class: "small" }, h("a", { href: "#/network" }, "the network")),
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
          h("i", { class: "dot", style: { background: jobColour(name) } }),
          " ",
          h("a", { href: `#/job/${name}` }, job ? jobName(job) : name),
        ),
        h("td", {}, job ? chip(job.state) : h("span", { class: "dim" }, "ended")),
        h("td", { class: "dim" }, here ? "here now" : "was here"),
        h("td", { class: "dim" }, job ? shape(job) : ""),
      );
    });
    replace(
      jobs,
      h("h2", {}, "Jobs now and lately"),
      rows.length ? table(["Job", "State", "Here", "Requests"], rows) : h("p", { class: "dim" }, "none yet"),
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
        h("td", {}, chip(event.passed ? "succeeded" : "failed", event.passed ? "passed" : "failed")),
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
            ["Figure", "num:Value", "num:Usual"],
            checking.stands.map((one) =>
              h(
                "tr",
                { "data-key": one.figure },
                h("td", {}, one.figure.replaceAll("_", " "), one.low ? h("b", {}, " low") : null),
                h("td", { class: "num" }, whole(one.value)),
                h("td", { class: "num dim" }, one.usual === null ? "–" : whole(one.usual)),
              ),
            ),
          )
        : null,
      rows.length ? table(["When", "Verdict", "Why"], rows) : h("p", { class: "dim" }, "not checked yet"),
    );
    drawn = events;
  }
  const redraw = () => drawChecks(drawn);

  function begin() {
    confirm({
      title: `Check ${id}`,
      verb: "Check the node",
      text: "It is measured for some seconds. Jobs there go on and share it meanwhile.",
      act: async () => {
        watch(await post(`${path}/check`));
        return { note: `${id} is being checked` };
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
      if (!checking?.over) tell(`being checked for ${span(performance.now() - begun)}`);
    }, 1000);
    tell("being checked");
    try {
      let found = asked;
      while (!found.verdict && performance.now() - begun < 600_000 && !signal.aborted)
        found = await get(`${path}/checks/${encodeURIComponent(asked.id)}?wait_s=20`, { signal });
      tell(
        found.verdict
          ? `${found.verdict.passed ? "Passed" : "Failed"}: ` +
              `${found.verdict.why || "as usual"}${found.busy ? ", while jobs ran there" : ""}. ` +
              `${found.notes.join(" ")}`
          : "no verdict yet",
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
    const said = events.map(({ event }) => event).findLast((event) => event.event === "NodeIntended");
    closed = said ? `${said.why}, ${moment(said.at_ms, now())}` : "";
    drawHead();
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
      h("h2", {}, "What became of it, by whom and why"),
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
        : h("p", { class: "dim" }, "nothing yet"),
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

const figures = (result) =>
  Object.entries(result?.figures ?? {})
    .slice(0, 4)
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${whole(value)}`)
    .join(", ");
