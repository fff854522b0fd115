// What the waiting jobs wait for, as a strip of filters, and the queue: its order, predicted starts and remedies.

import { jobActions } from "./actions.js";
import { chosen } from "./address.js";
import { get } from "./api.js";
import { empty, h, plural, shape, span, throttled, whole } from "./dom.js";
import { listen } from "./live.js";
import { replace } from "./patch.js";
import { remedyButtons } from "./remedies.js";
import { table } from "./table.js";

const ASK_MS = 1500;
const SHOWN = 100;
const REASONS = {
  retry: "Waiting to retry",
  begin: "Scheduled for later",
  after: "Waiting for other jobs",
  claim: "Room is being made",
  budget: "Budget used up",
  cap: "Cap on GPUs reached",
  no_nodes: "No nodes",
  closed: "Nodes unavailable",
  labels: "No matching nodes",
  room: "No free capacity",
  supply: "Nodes on the way",
  turn: "Behind",
  spares: "Kept as spares",
  ends: "Nodes end too early",
  next: "Next in line",
};

/**
 * Keeps an answer about the queue current. Returns `again`, to ask now, and `stop`.
 * @param {() => string} query
 * @param {(queue: Api.QueueView | null, problem: string) => void} draw
 */
export function watchQueue(query, draw) {
  const stopped = new AbortController();
  const { signal } = stopped;
  /** @type {Api.QueueView} */
  let queue = null;
  let asking = false;
  let dirty = true;

  async function ask() {
    if (asking || !dirty) return;
    asking = true;
    dirty = false;
    let problem = "";
    try {
      queue = await get(`/v1/queue?${query()}`, { signal });
    } catch (error) {
      problem = error.message;
    }
    asking = false;
    if (!signal.aborted) draw(queue, problem);
    if (dirty && !signal.aborted) soon();
  }
  // The reason why a job waits changes with time, not only with events.
  const timer = setInterval(() => {
    dirty = dirty || queue?.waiting > 0;
    if (!document.hidden) ask();
  }, ASK_MS);
  const soon = throttled(300, ask);
  const leave = listen((change) => {
    if (change.jobs?.length || change.ended?.length || change.whole || change.nodes?.length) {
      dirty = true;
      soon();
    }
  });
  ask();
  return {
    again: () => {
      dirty = true;
      ask();
    },
    stop: () => {
      stopped.abort();
      leave();
      clearInterval(timer);
      soon.stop();
    },
  };
}

/**
 * One button for each reason; it filters the list by `group`.
 * @param {HTMLElement} strip
 * @param {Api.QueueView | null} queue
 */
export function drawStrip(strip, queue, pick) {
  const key = chosen("group");
  strip.hidden = !queue?.waiting && !key;
  if (strip.hidden) return;
  replace(
    strip,
    h("span", { class: "dim", "data-key": "" }, `${whole(queue?.waiting ?? 0)} waiting`),
    (queue?.groups ?? []).map((one) =>
      h(
        "button",
        {
          class: "reason",
          "data-key": one.key,
          "data-group": one.key,
          "aria-pressed": String(one.key === key),
          title:
            `${plural(one.count, "job")} ${one.count === 1 ? "waits" : "wait"} ${one.what}` +
            (one.like ? " (by the first job of each kind)" : ""),
          onclick: () => pick("group", one.key === key ? "" : one.key),
        },
        h("b", {}, whole(one.count)),
        h("span", {}, label(one)),
      ),
    ),
    key ? h("button", { class: "quiet", "data-key": "all", onclick: () => pick("group", "") }, "Clear") : null,
  );
}

/** @param {Api.GroupView} one */
const label = ({ kind, detail }) =>
  [REASONS[kind] ?? "Other reasons", detail].filter(Boolean).join(kind === "turn" ? " " : ": ");

export const queueQuery = () =>
  `limit=${SHOWN}${chosen("group") ? `&group=${encodeURIComponent(chosen("group"))}` : ""}`;

/**
 * @param {HTMLElement} card
 * @param {Api.QueueView | null} queue
 */
export function drawQueue(card, queue, problem) {
  if (!queue) {
    replace(card, problem ? h("p", { class: "problem" }, problem) : null);
    return;
  }
  const whole_ = chosen("group")
    ? (queue.groups.find((one) => one.key === chosen("group"))?.count ?? 0)
    : queue.waiting;
  const more = whole_ - queue.rows.length;
  replace(
    card,
    problem ? h("p", { class: "problem" }, problem) : null,
    h("p", { class: "dim small", "data-name": "caps" }, [
      "Policy: ",
      h("b", {}, queue.policy),
      (queue.caps ?? []).length ? `. Limits: ${queue.caps.join("; ")}` : "",
    ]),
    queue.rows.length
      ? line(queue)
      : empty(queue.waiting ? "No job is in line: all wait for other jobs or are on hold." : "No jobs are waiting."),
    more > 0 && queue.rows.length
      ? h("a", { href: "#/jobs?state=waiting", "data-key": "more" }, `${plural(more, "more job")}`)
      : null,
  );
}

/** @param {Api.QueueView} queue */
function line(queue) {
  const rows = queue.rows.map((row) =>
    h(
      "tr",
      { "data-key": row.id, "data-job": row.id },
      h("td", { class: "num", "data-name": "#" }, row.position ? String(row.position) : "–"),
      h(
        "td",
        { class: "long" },
        h("a", { href: `#/job/${row.id}` }, row.id),
        row.name ? ` ${row.name}` : "",
        h(
          "div",
          { class: "dim small" },
          `${shape(row)} · ${row.tenant}${row.priority ? ` · priority ${row.priority}` : ""}`,
        ),
      ),
      h("td", {}, h("div", {}, row.why), remedyButtons(row)),
      h(
        "td",
        { "data-name": "starts" },
        row.foreseen
          ? outlook(row, row.since_ms, queue.now_ms)
          : h("span", { class: "dim" }, row.position > 50 ? "After the jobs ahead" : "Not predicted yet"),
      ),
      h("td", { class: "num", "data-name": "waiting" }, span(queue.now_ms - row.since_ms)),
      h("td", {}, h("div", { class: "row" }, jobActions(row))),
    ),
  );
  return table(["num:#", "Job", "Reason and remedies", "Predicted start", "num:Waiting", ""], rows);
}

/**
 * When it will probably start: in words, and the wait so far beside the predicted range.
 * @param {{ early_ms: number | null, late_ms: number | null, start?: string }} seen
 */
export function outlook(seen, since, at) {
  if (seen.early_ms === null) return h("span", { class: "dim" }, seen.start || "Unknown");
  const early = Math.max(at, seen.early_ms);
  const late = Math.max(early, seen.late_ms);
  const words = late - early < 1000 ? `in about ${span(late - at)}` : `in ${span(early - at)} to ${span(late - at)}`;
  const part = (from, to) => `${(100 * (to - from)) / Math.max(1, late - since)}%`;
  return h(
    "div",
    {},
    words,
    h(
      "div",
      { class: "range", role: "presentation", title: `Waiting for ${span(at - since)}; starts ${words}` },
      h("i", { class: "waited", style: { left: "0%", width: part(since, at) } }),
      h("i", {
        style: { left: `min(${part(since, early)}, calc(100% - 3px))`, width: `max(3px, ${part(early, late)})` },
      }),
    ),
  );
}
