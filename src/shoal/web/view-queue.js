// The waiting, running and ended jobs.

import { jobActions } from "./actions.js";
import { get } from "./api.js";
import { jobColour } from "./colours.js";
import { ago, chip, clock, empty, h, natural, plural, replace, shape, span, throttled, whole } from "./dom.js";
import { cluster, listen, now } from "./live.js";
import { progress } from "./progress.js";
import { watchSchedules } from "./schedules.js";
import { table } from "./table.js";

const ASK_MS = 1500;
const ENDED_SHOWN = 50;
const RUNNING_SHOWN = 200;

export function mount(root) {
  const waiting = h("section", { class: "card", "aria-label": "Waiting" });
  const running = h("section", { class: "card", "aria-label": "Running" });
  const ended = h("section", { class: "card", "aria-label": "Ended" });
  const schedules = h("section", { class: "card", "aria-label": "Schedules", hidden: true });
  root.append(h("div", { class: "stack" }, h("h1", {}, "Queue"), waiting, running, schedules, ended));
  let queue = null, problem = "", alive = true, asking = false, dirty = true;

  const drawWaiting = () => replace(waiting, ...waitingPart(queue, problem));
  const drawRest = throttled(300, () => { replace(running, ...runningPart()); replace(ended, ...endedPart()); });

  async function ask() {
    if (asking || !dirty) return;
    asking = true; dirty = false;
    try { queue = await get("/v1/queue?limit=100"); problem = ""; } catch (error) { problem = error.message; }
    asking = false;
    if (alive) drawWaiting();
  }
  // The reason why a job waits changes with time, not only with events.
  const timer = setInterval(() => { dirty = dirty || queue?.rows.length > 0; if (!document.hidden) ask(); }, ASK_MS);
  const soon = throttled(300, ask);
  const stop = listen((change) => { if (change.tick) { drawRest(); return; } if (change.jobs?.length || change.ended?.length || change.whole || change.nodes?.length) { dirty = true; soon(); } drawRest(); });
  ask();
  drawRest();
  const leave = watchSchedules(schedules);
  return () => { alive = false; stop(); leave(); clearInterval(timer); drawRest.stop(); soon.stop(); };
}

function waitingPart(queue, problem) {
  if (problem) return [h("h2", {}, "Waiting"), h("p", { class: "problem" }, problem)];
  if (!queue) return [h("h2", {}, "Waiting"), h("p", { class: "dim" }, "loading")];
  const head = h("div", { class: "row" }, h("h2", {}, "Waiting"), h("span", { class: "dim" }, queue.waiting ? `${plural(queue.waiting, "job")}, ordered by policy ` : "", queue.waiting ? h("b", {}, queue.policy) : null));
  const caps = (queue.caps ?? []).length ? h("p", { class: "dim small", "data-name": "caps" }, `Limits: ${queue.caps.join("; ")}`) : null;
  const more = queue.waiting - queue.rows.length;
  const rest = more > 0 ? h("p", { class: "dim small" }, queue.rows.length ? `and ${whole(more)} more: ` : "None is in line yet: they wait for other jobs or are on hold. See ", h("a", { href: "#/find/state%3Awaiting" }, "all waiting jobs")) : null;
  if (!queue.rows.length && rest) return [head, caps, rest];
  if (!queue.rows.length) return [head, caps, empty("No jobs are waiting. To submit one:", "shoal run -g 1 -- python train.py")];
  const latest = Math.max(...queue.rows.map((row) => (row.late_ms ?? 0) - queue.now_ms), 1);
  const rows = queue.rows.map((row) => h("tr", { "data-key": row.id, "data-job": row.id },
    h("td", { class: "num", "data-name": "place" }, String(row.position)),
    h("td", {}, name(row), h("div", { class: "dim small" }, `${shape(row)} · ${row.tenant}${row.priority ? ` · priority ${row.priority}` : ""}`)),
    h("td", {}, h("div", {}, row.why), row.help.length ? h("ul", { class: "help" }, row.help.map((text) => h("li", {}, text))) : null),
    h("td", { "data-name": "starts" }, starts(row, queue.now_ms, latest)),
    h("td", { class: "num", "data-name": "waits" }, span(queue.now_ms - row.submitted_ms)),
    h("td", {}, h("div", { class: "row" }, jobActions(row)))));
  return [head, caps, table(["num:#", "Job", "Why it waits and what would help", "Predicted start", "num:Waits", ""], rows), rest];
}

function starts(row, at, latest) {
  if (!row.foreseen) return h("span", { class: "dim" }, row.position > 50 ? "after the jobs ahead of it" : "not predicted yet");
  if (row.early_ms === null) return h("span", { class: "dim" }, row.start || "unknown");
  const early = Math.max(0, row.early_ms - at), late = Math.max(early, row.late_ms - at);
  const text = late - early < 1000 ? `in about ${span(late)}` : `in ${span(early)} to ${span(late)}`;
  return h("div", {}, text, h("div", { class: "range", role: "presentation" }, h("i", { style: { left: `${(100 * early) / latest}%`, width: `${Math.max(1, (100 * (late - early)) / latest)}%` } })));
}

function name(job) {
  return h("span", {}, h("a", { href: `#/job/${job.id}`, "data-key": `go-${job.id}` }, job.id), job.name ? ` ${job.name}` : "");
}

function runningPart() {
  const jobs = [...cluster.jobs.values()].filter((job) => (job.state !== "waiting" || job.elements) && !job.array).sort((a, b) => natural(b.id, a.id));
  const asleep = jobs.filter((job) => job.nap_ms).length;
  const head = h("div", { class: "row" }, h("h2", {}, "Running"), h("span", { class: "dim" }, jobs.length ? `${plural(jobs.length, "job")}${asleep ? `, ${whole(asleep)} asleep` : ""}` : ""));
  if (!jobs.length) return [head, h("p", { class: "dim" }, "No jobs are running.")];
  const rows = jobs.slice(0, RUNNING_SHOWN).map((job) => h("tr", { "data-key": job.id, "data-job": job.id },
    h("td", {}, h("i", { class: "dot", style: { background: jobColour(job.id) } }), " ", name(job)),
    h("td", {}, chip(job.state)),
    h("td", {}, shape(job), h("span", { class: "dim" }, ` · ${job.service ? `replica of ${job.service}` : job.tenant}`)),
    h("td", {}, progress(job), job.nap_ms ? h("span", { class: "dim" }, ` ${job.state} for ${span(now() - job.nap_ms)}: ${job.why ?? ""}`) : null),
    h("td", { class: "num", "data-name": "for" }, job.running_ms ? span((job.nap_ms || now()) - job.running_ms) : "–"),
    h("td", { class: "num", "data-name": "attempt" }, String(job.attempt || "–"))));
  return [head, table(["Job", "", "Requests", "Progress", "num:Running for", "num:Attempt"], rows)];
}

function endedPart() {
  const jobs = [...cluster.ended.values()].sort((a, b) => b.finished_ms - a.finished_ms).slice(0, ENDED_SHOWN);
  const head = h("div", { class: "row" }, h("h2", {}, "Ended"), h("span", { class: "dim" }, jobs.length ? "newest first" : ""));
  if (!jobs.length) return [head, h("p", { class: "dim" }, "No jobs have ended yet.")];
  const rows = jobs.map((job) => h("tr", { "data-key": job.id, "data-job": job.id }, h("td", {}, name(job)), h("td", {}, chip(job.state)), h("td", { class: "dim" }, job.why ?? ""),
    h("td", { class: "num", "data-name": "ran" }, job.running_ms ? span(job.finished_ms - job.running_ms) : "–"), h("td", { class: "num", title: clock(job.finished_ms), "data-name": "ended" }, ago(job.finished_ms, now()))));
  return [head, table(["Job", "", "Why", "num:Last ran", "num:Ended"], rows)];
}
