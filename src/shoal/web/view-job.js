// One job: its history, progress, output, files and cost.

import { about, notes } from "./about.js";
import { jobActions } from "./actions.js";
import { get, maybe } from "./api.js";
import { Limits } from "./bound.js";
import { lineChart, strip } from "./charts.js";
import { accountColour, accountRank, jobColour } from "./colours.js";
import { bytes, chip, clock, css, empty, h, moment, percent, plural, replace, s, shape, short, span, throttled, whole } from "./dom.js";
import { Elements } from "./elements.js";
import { KeptFiles } from "./kept.js";
import { jobOf, listen, now } from "./live.js";
import { LogView } from "./logs.js";
import { progress } from "./progress.js";
import { table } from "./table.js";
import { say } from "./words.js";
import { drawWorkflow } from "./workflow.js";

const ASK_MS = 2000;
const BUCKETS_MAX = 160;

export function mount(root, id) {
  const head = h("div", { class: "stack" });
  const line = h("section", { class: "card", "aria-label": "Timeline" });
  const loss = lineChart({ title: "Loss", times: false, zero: false, steep: true });
  const pace = lineChart({ title: "Step time", unit: "ms" });
  const heat = strip({ title: "Members", note: "step time of each, compared with the others", colour: slowness });
  const curves = h("section", { class: "card stack", "aria-label": "Progress", hidden: true }, h("div", { class: "grid2" }, loss.element, pace.element), heat.element);
  const flow = h("section", { class: "card", "aria-label": "Workflow", hidden: true });
  const cost = h("section", { class: "card", "aria-label": "Cost", hidden: true });
  const gang = h("section", { class: "card", "aria-label": "Members" });
  const events = h("section", { class: "card", "aria-label": "Events" });
  const left = h("div", { class: "stack" }, gang, cost);
  const limits = new Limits(), logs = new LogView(id), elements = new Elements(id), files = new KeptFiles(id);
  root.append(h("div", { class: "stack" }, head, flow, elements.element, line, curves, limits.element, logs.element, files.element, h("div", { class: "grid2" }, left, events)));
  let alive = true, job = null, history = null, busy = false, again = false, over = false;
  const heard = []; // points from the stream, for a controller without stored curves

  async function ask() {
    if (busy) { again = true; return; }
    busy = true;
    const path = `/v1/jobs/${encodeURIComponent(id)}`;
    try {
      [job, history] = await Promise.all([get(path), get(`${path}/why`)]);
      if (!alive) return;
      drawHead();
      timeline(line, history.attempts, job);
      drawEvents();
      line.hidden = gang.hidden = Boolean(job.array);
      replace(gang, ...members(job));
      logs.know(job);
      await Promise.all([drawWorkflow(flow, job), elements.draw(job), files.draw(job)]);
      const [series, spent] = await Promise.all([job.progress || job.finished_ms || curves.dataset.full ? maybe(`${path}/series`) : null, job.gpus ? maybe(`${path}/cost`) : null]);
      if (!alive) return;
      drawCurves(series);
      limits.draw(history.progress?.bound ?? (job.finished_ms ? history.attempts.at(-1)?.bound : null), series?.members ?? [], job.attempt);
      drawCost(spent);
      over = Boolean(job.finished_ms);
    } catch (error) {
      if (alive && !job) replace(head, h("h1", {}, id), error.status === 404 ? empty(`There is no job ${id}.`, "shoal ps -a") : h("p", { class: "problem" }, error.message));
    } finally {
      busy = false;
      if (again && alive) { again = false; soon(); }
    }
  }

  function drawHead() {
    const wait = history.state === "waiting" && history.early_ms !== null ? `Predicted to start in ${span(history.early_ms - now())} to ${span(history.late_ms - now())}.` : "";
    replace(head,
      h("p", { class: "small" }, h("a", { href: "#/jobs", "data-key": "back" }, "← all jobs")),
      h("div", { class: "row" }, h("i", { class: "dot", style: { background: jobColour(id) } }), h("h1", {}, job.name ? `${job.id} ${job.name}` : job.id), chip(job.state), h("span", { class: "push row" }, jobActions(jobForActions()))),
      h("p", { class: "why" }, history.why || job.why || "", wait ? h("span", { class: "dim" }, ` ${wait}`) : null),
      h("div", {}, progress(jobOf(id) ?? {})),
      h("dl", { class: "facts" },
        fact("Requests", shape(job)), fact("Tenant", job.tenant), job.spec.user ? fact("User", job.spec.user) : null, job.array ? null : fact("Attempt", String(job.attempt)),
        fact("Submitted", moment(job.submitted_ms, now())), fact(job.finished_ms ? "Ran for" : "Running for", job.running_ms ? span((job.finished_ms ?? job.nap?.since_ms ?? now()) - job.running_ms) : "–"),
        napFact(job),
        job.losses || job.failures || job.hangs ? fact("Setbacks", [job.losses && plural(job.losses, "lost node"), job.failures && plural(job.failures, "failure"), job.hangs && plural(job.hangs, "hang")].filter(Boolean).join(", ")) : null,
        about(job),
        job.progress?.saved_step ? fact("Saved up to", `step ${whole(job.progress.saved_step)}`) : null,
        h("div", { class: "wide" }, h("dt", {}, "Command"), h("dd", { class: "mono" }, job.command))), notes(job));
  }
  const jobForActions = () => ({ ...job, service: job.spec?.service ?? "", finished_ms: job.finished_ms ?? 0 });

  function drawEvents() {
    const list = history.events.toReversed().map(({ seq, event }) => h("li", { "data-key": seq }, h("time", { datetime: new Date(event.at_ms).toISOString() }, clock(event.at_ms)), h("span", {}, say(event), event.why ? h("span", { class: "dim" }, ` — ${event.why}`) : null)));
    replace(events, h("h2", {}, "What happened and why"), h("ol", { class: "events", tabindex: "0", "aria-label": "Events, newest first" }, list));
  }

  function drawCurves(series) {
    const points = series?.points ?? heard;
    const steps = points.filter((point) => point.step > 0);
    if (!steps.length) { curves.hidden = !curves.dataset.full; return; }
    curves.hidden = false;
    curves.dataset.full = "1";
    const accent = css("--accent");
    loss.set([{ name: "", colour: accent, points: rising(steps.filter((point) => point.loss !== null && point.loss !== undefined).map((point) => [point.step, point.loss])) }]);
    pace.set([{ name: "", colour: accent, points: steps.filter((point) => point.step_ms).map((point) => [point.at_ms, point.step_ms]) }]);
    const live = jobOf(id);
    heat.set(rowsOf(series?.members ?? [], live?.slow ?? job.progress?.slow ?? [], job.attempt), `Step time of each member; ${live?.slow?.length ? `slow: ${live.slow.join(", ")}` : "none is slow"}`);
  }

  function drawCost(spent) {
    cost.hidden = !spent?.gpu_us; // a job that never held a GPU has cost nothing
    left.hidden = gang.hidden && cost.hidden;
    if (cost.hidden) return;
    const parts = [...(spent.accounts ?? [])].filter((part) => part.gpu_us > 0).sort((a, b) => accountRank(a.account) - accountRank(b.account));
    replace(cost, h("h2", {}, "Cost so far"),
      h("p", {}, h("b", {}, spent.cost === null || spent.cost === undefined ? "no price list" : `${spent.cost.toFixed(2)} ${spent.currency}`), h("span", { class: "dim" }, ` for ${gpuTime(spent.gpu_ms)}${spent.energy_wh ? `, ${short(spent.energy_wh / 1000)} kWh` : ""}`)),
      h("div", { class: "share", role: "img", "aria-label": parts.map((part) => `${part.title} ${percent(part.gpu_us / spent.gpu_us, 1)}`).join(", ") }, parts.map((part) => h("i", { title: part.title, style: { width: `${(100 * part.gpu_us) / spent.gpu_us}%`, background: accountColour(part.account) } }))),
      h("div", { class: "legend row small" }, parts.map((part) => h("span", { class: "key" }, h("i", { class: "dot", style: { background: accountColour(part.account) } }), part.title, h("span", { class: "dim" }, ` ${percent(part.gpu_us / spent.gpu_us, 1)}`)))),
      spent.slept_ms ? h("p", { class: "dim small" }, `Slept ${span(spent.slept_ms)}, and lent out ${gpuTime(spent.lent_gpu_us / 1000)} by that, which are not part of the sum.`) : null);
  }

  const soon = throttled(400, ask);
  const stop = listen((change) => {
    const mine = change.jobs?.find((one) => one.id === id) ?? change.ended?.find((one) => one.id === id);
    if (!mine) return;
    if (mine.step) heard.push({ at_ms: now(), step: mine.step, loss: mine.loss ?? null, step_ms: mine.step_us ? mine.step_us / 1000 : null });
    if (heard.length > 2000) heard.splice(0, 1000);
    over = false;
    soon();
  });
  // Predicting the start of a waiting job is costly in a large cluster, so it is fetched less often.
  let turn = 0;
  const timer = setInterval(() => { turn += 1; if (!over && !document.hidden && (job?.state !== "waiting" || turn % 4 === 0)) ask(); }, ASK_MS);
  ask();
  return () => { alive = false; stop(); soon.stop(); clearInterval(timer); logs.stop(); loss.stop(); pace.stop(); heat.stop(); limits.stop(); };
}

const gpuTime = (ms) => (ms < 360000 ? `${whole(ms / 1000)} GPU-seconds` : `${short(ms / 3600000)} GPU-hours`);

function napFact(job) {
  if (!job.nap && !job.slept_ms) return null;
  const words = [job.nap && `for ${span(now() - job.nap.since_ms)}`, job.nap?.host_mb && `${bytes(job.nap.host_mb * 2 ** 20)} of GPU memory kept on its nodes`, job.nap && (job.nap.wants ? "wakes when there is room" : job.state === "asleep" && "wakes when it is used"), job.slept_ms && `${job.nap ? "before" : plural(job.naps, "nap")}: ${span(job.slept_ms)}`];
  return fact(job.nap ? "Asleep" : "Slept", words.filter(Boolean).join(", "));
}

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

/** After a failure steps are repeated. The newest value of a step replaces the earlier ones. */
function rising(points) {
  const found = [];
  for (const point of points) {
    while (found.length && found.at(-1)[0] >= point[0]) found.pop();
    found.push(point);
  }
  return found;
}

/** 0 is as fast as the others, 1 is at most half as fast. */
function slowness(value) {
  const part = Math.max(0, Math.min(1, value));
  return `color-mix(in srgb, ${css("--bad")} ${Math.round(part * 100)}%, ${css("--accent-soft")})`;
}

function rowsOf(members, slow, attempt) {
  const mine = members.filter((one) => one.attempt === attempt || attempt === 0);
  if (!mine.length) return [];
  const own = mine.map((one) => one.step_ms.map((ms, at) => (ms === null || ms === undefined ? null : ms * (1 - (one.wait_share?.[at] ?? 0)))));
  const length = Math.max(...own.map((values) => values.length)), from = Math.max(0, length - BUCKETS_MAX);
  const usual = Array.from({ length }, (_, at) => { const all = own.map((values) => values[at]).filter((ms) => ms !== null && ms !== undefined).sort((a, b) => a - b); return all.length ? all[(all.length - 1) >> 1] : 0; });
  return mine.map((one, index) => ({
    name: `${one.member} ${one.node}`, marked: slow.includes(one.member),
    values: Array.from({ length: length - from }, (_, at) => { const ms = own[index][from + at]; return ms === null || ms === undefined || !usual[from + at] ? null : ms / usual[from + at] - 1; }),
    notes: Array.from({ length: length - from }, (_, at) => { const ms = own[index][from + at]; return ms === null || ms === undefined ? null : `${short(ms)} ms without waits; usual: ${short(usual[from + at])} ms`; }),
  }));
}

function members(job) {
  if (!job.gang.length) return [h("h2", {}, "Members"), h("p", { class: "dim" }, "not placed yet")];
  const rows = job.gang.slice(0, 64).map((one) => h("tr", { "data-key": one.member }, h("td", { "data-name": "member" }, String(one.member)), h("td", {}, one.node), h("td", { class: "dim", "data-name": "GPUs" }, one.gpus.join(", ") || "none"), h("td", {}, one.code === null ? one.status : `${one.status} ${one.code}`)));
  return [h("h2", {}, "Members"), table(["Member", "Node", "GPUs", "State"], rows), job.gang.length > 64 ? h("p", { class: "dim small" }, `and ${job.gang.length - 64} more`) : null];
}

const summary = (one) => `${one.nodes.join(", ")}${one.ended_ms || one.stopping_ms ? `: ${one.cause}` : ""}`;

const naps = (one, end) => [...(one.slept_at ?? []), ...(one.dozed_ms ? [[one.dozed_ms, end]] : [])];

function timeline(card, found, job) {
  const begin = job.submitted_ms, finish = job.finished_ms ?? now();
  const width = Math.max(200, (card.clientWidth || card.parentElement.clientWidth || 700) - 34), label = Math.min(90, width * 0.25), row = 26;
  const shown = found.slice(-12);
  const X = (ms) => label + ((Math.min(ms, finish) - begin) / Math.max(1, finish - begin)) * (width - label - 4);
  const bar = (from, to, y, fill, words) => s("rect", { x: X(from), y, width: Math.max(2, X(to) - X(from)), height: 14, rx: 3, fill }, s("title", {}, words));
  const parts = shown.map((one, at) => {
    const y = at * row + 4, end = one.ended_ms || finish;
    const began = one.running_ms || Math.min(end, one.stopping_ms || end);
    const text = summary(one);
    const wide = text.length * 6 < X(end) - X(began) - 8;
    const ink = one.cause === "succeeded" || !one.ended_ms ? css("--accent") : css("--ink-3");
    return s("g", {}, s("text", { x: 0, y: y + 11 }, `attempt ${one.attempt}`),
      bar(one.placed_ms, began, y, css("--line-2"), "starting"), one.running_ms ? bar(one.running_ms, one.stopping_ms || end, y, ink, `ran ${span((one.stopping_ms || end) - one.running_ms)} on ${one.nodes.join(", ")}`) : null,
      naps(one, end).map(([from, to]) => bar(from, to, y, css("--sleep"), `asleep for ${span(to - from)}`)),
      one.stopping_ms ? bar(one.stopping_ms, end, y, css("--warn"), `stopping: ${one.cause}`) : null,
      wide ? s("text", { x: X(began) + 6, y: y + 11, style: { fill: css("--surface") } }, text) : s("text", { x: X(end) + 6 > width - 60 ? X(one.placed_ms) - 6 : X(end) + 6, y: y + 11, "text-anchor": X(end) + 6 > width - 60 ? "end" : "start" }, text.slice(0, 60)));
  });
  const waited = s("rect", { x: X(begin), y: shown.length * row + 4, width: Math.max(1, X(found[0]?.placed_ms ?? finish) - X(begin)), height: 3, fill: css("--line-2") });
  const height = shown.length * row + 26;
  const picture = s("svg", { width, height, role: "img", "aria-label": `${plural(found.length, "attempt")} in ${span(finish - begin)}: ${shown.map((one) => `attempt ${one.attempt} on ${summary(one)}`).join("; ")}` },
    parts, waited, s("text", { x: label, y: height - 5 }, `${clock(begin)} submitted`), s("text", { x: width - 4, y: height - 5, "text-anchor": "end" }, job.finished_ms ? `${clock(finish)} ended` : "now"));
  replace(card, h("h2", {}, "Attempts"), h("div", { class: "timeline" }, picture));
}
