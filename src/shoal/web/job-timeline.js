// A job's life on one line: queued, starting, running, suspended and stopping, with its saves and retries.

import { clock, h, plural, span, whole } from "./dom.js";
import { causeOf } from "./job-state.js";
import { now } from "./live.js";
import { replace } from "./patch.js";
import { table } from "./table.js";

const KINDS = {
  queued: "Queued",
  starting: "Starting",
  running: "Running",
  suspended: "Suspended",
  away: "At a neighbor",
  stopping: "Stopping",
};
const ATTEMPTS_SHOWN = 12;

/** @param {Api.AttemptRecord} one */
const napsOf = (one, end) => [...(one.slept_at ?? []), ...(one.dozed_ms ? [[one.dozed_ms, end]] : [])];

/** @param {Api.AttemptRecord} one */
const placeOf = (one) => (one.cluster ? `at ${one.cluster}` : `on ${one.nodes.join(", ")}`);

/** How long its attempts ran in all: not the waits between them, nor its naps. */
export const runTime = (attempts, finish) => attempts.reduce((sum, one) => sum + ranFor(one, finish), 0);

/** @param {Api.AttemptRecord} one */
function ranFor(one, finish) {
  if (!one.running_ms) return 0;
  const end = one.stopping_ms ?? one.ended_ms ?? finish;
  return Math.max(0, end - one.running_ms - (one.slept_ms ?? 0) - (one.dozed_ms ? end - one.dozed_ms : 0));
}

/** [{ kind, from, to, words }] without gaps. */
function segments(attempts, begin, finish) {
  const found = [];
  let at = begin;
  const add = (kind, to, words = "") => {
    if (to > at) found.push({ kind, from: at, to, words });
    at = Math.max(at, to);
  };
  for (const one of attempts) {
    add("queued", one.placed_ms);
    const end = one.ended_ms ?? finish;
    const stops = one.stopping_ms ?? end;
    const nodes = `attempt ${one.attempt} ${placeOf(one)}`;
    add(one.cluster ? "away" : "starting", Math.min(stops, (one.running_ms ?? stops) + (one.startup_ms ?? 0)), nodes);
    for (const [from, to] of napsOf(one, stops)) {
      add("running", from, nodes);
      add("suspended", Math.min(to, stops), nodes);
    }
    add("running", stops, nodes);
    add("stopping", end, causeOf(one.cause));
  }
  add("queued", finish);
  return found;
}

/**
 * @param {HTMLElement} card
 * @param {Api.WhyView} history
 * @param {Api.JobView} job
 */
export function drawTimeline(card, history, job) {
  const { attempts } = history;
  const begin = job.submitted_ms;
  const finish = job.finished_ms ?? now();
  const all = segments(attempts, begin, finish);
  const place = (ms) => `${(100 * (Math.min(ms, finish) - begin)) / Math.max(1, finish - begin)}%`;
  const sums = Object.keys(KINDS)
    .map((kind) => [kind, all.filter((one) => one.kind === kind).reduce((sum, one) => sum + one.to - one.from, 0)])
    .filter(([, sum]) => sum);
  const saves = history.events
    .filter(({ event }) => event.event === "JobCheckpointed")
    .map(({ event }) =>
      mark("save", place(event.at_ms), `Checkpoint at step ${whole(event.step)}, ${clock(event.at_ms)}`),
    );
  const ends = attempts
    .filter((one) => one.ended_ms && one.cause !== "succeeded")
    .map((one) =>
      mark("end", place(one.ended_ms), `Attempt ${one.attempt}: ${causeOf(one.cause)}, ${clock(one.ended_ms)}`),
    );
  replace(
    card,
    h(
      "div",
      { class: "row" },
      h("h2", {}, "Timeline"),
      sums.map(([kind, sum]) =>
        h(
          "span",
          { class: "key small", "data-key": kind },
          h("i", { class: `dot ${kind}` }),
          `${KINDS[kind]} ${span(sum)}`,
        ),
      ),
      saves.length
        ? h("span", { class: "key small", "data-key": "save" }, h("i", { class: "save" }), "Checkpoint")
        : null,
    ),
    h(
      "div",
      {
        class: "timeline life",
        role: "img",
        "aria-label": [
          plural(attempts.length, "attempt"),
          ...sums.map(([kind, sum]) => `${KINDS[kind].toLowerCase()} ${span(sum)}`),
        ].join(", "),
      },
      all.map((one) =>
        h("i", {
          class: one.kind,
          title: `${KINDS[one.kind]} for ${span(one.to - one.from)}${one.words ? `: ${one.words}` : ""}`,
          style: { left: place(one.from), width: `calc(${place(begin + one.to - one.from)} + 1px)` },
        }),
      ),
      saves,
      ends,
    ),
    h(
      "div",
      { class: "row dim small" },
      `Submitted ${clock(begin)}`,
      h("span", { class: "push" }, job.finished_ms ? `Ended ${clock(finish)}` : "Now"),
    ),
    attempts.length > 1 ? attemptTable(attempts, finish) : null,
  );
}

const mark = (kind, left, title) => h("b", { class: kind, title, style: { left } });

/** @param {Api.AttemptRecord[]} attempts */
function attemptTable(attempts, finish) {
  const rows = attempts
    .slice(-ATTEMPTS_SHOWN)
    .toReversed()
    .map((one) =>
      h(
        "tr",
        { "data-key": one.attempt },
        h("td", { class: "num", "data-name": "attempt" }, String(one.attempt)),
        h(
          "td",
          {},
          one.cluster ? placeOf(one) : one.nodes.slice(0, 4).join(", "),
          one.nodes.length > 4 ? ` +${one.nodes.length - 4}` : "",
        ),
        h("td", { class: "num", "data-name": "started" }, one.running_ms ? clock(one.running_ms) : "–"),
        h("td", { class: "num", "data-name": "run time" }, one.running_ms ? span(ranFor(one, finish)) : "–"),
        h(
          "td",
          { class: "num", "data-name": "steps" },
          one.to_step ? `${whole(one.from_step ?? 0)} to ${whole(one.to_step)}` : "–",
        ),
        h("td", {}, one.ended_ms || one.stopping_ms ? causeOf(one.cause) : "Running"),
      ),
    );
  return table(["num:Attempt", "Nodes", "num:Started", "num:Run time", "num:Steps", "Result"], rows);
}
