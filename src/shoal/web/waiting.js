// The waiting jobs: what they wait for, in groups, and the first in line with their predicted starts.

import { jobActions } from "./actions.js";
import { choose, chosen } from "./address.js";
import { get } from "./api.js";
import { empty, h, plural, shape, span, throttled, whole } from "./dom.js";
import { listen } from "./live.js";
import { replace } from "./patch.js";
import { remedyButtons } from "./remedies.js";
import { table } from "./table.js";

const ASK_MS = 1500;
const FIRST = 3;
const MOST = 100;
const OF_GROUP = 20;
const first = () => (matchMedia("(max-width: 760px)").matches ? 1 : FIRST);

/** Keeps a card up to date. Returns how to stop it. */
export function watchWaiting(card) {
  const stopped = new AbortController();
  const { signal } = stopped;
  /** @type {Api.QueueView} */
  let queue = null;
  let group = null;
  let problem = "";
  let asking = false;
  let dirty = true;
  const limit = () => (chosen("line") === "all" ? MOST : first());

  async function ask() {
    if (asking || !dirty) return;
    asking = true;
    dirty = false;
    try {
      queue = await get(`/v1/queue?limit=${limit()}`, { signal });
      const key = chosen("group");
      group = key
        ? { key, rows: (await get(`/v1/queue?limit=${OF_GROUP}&group=${encodeURIComponent(key)}`, { signal })).rows }
        : null;
      problem = "";
    } catch (error) {
      problem = error.message;
    }
    asking = false;
    if (!signal.aborted) draw();
  }
  const again = () => {
    dirty = true;
    ask();
  };
  const pick = (name, value) => {
    choose(name, value);
    draw();
    again();
  };
  const draw = () => {
    card.hidden = !problem && !queue?.waiting;
    replace(card, ...parts(queue, group, problem, pick));
  };
  // The reason why a job waits changes with time, not only with events.
  const timer = setInterval(() => {
    dirty = dirty || queue?.waiting > 0;
    if (!document.hidden) ask();
  }, ASK_MS);
  const soon = throttled(300, ask);
  const stop = listen((change) => {
    if (change.jobs?.length || change.ended?.length || change.whole || change.nodes?.length) {
      dirty = true;
      soon();
    }
  });
  ask();
  return () => {
    stopped.abort();
    stop();
    clearInterval(timer);
    soon.stop();
  };
}

function parts(queue, group, problem, pick) {
  if (problem) return [h("h2", {}, "Waiting"), h("p", { class: "problem" }, problem)];
  if (!queue?.waiting) return [];
  const head = h(
    "div",
    { class: "row" },
    h("h2", {}, "Waiting"),
    h("span", { class: "dim" }, `${plural(queue.waiting, "job")}, ordered by policy `, h("b", {}, queue.policy)),
  );
  const caps = (queue.caps ?? []).length
    ? h("p", { class: "dim small", "data-name": "caps" }, `Limits: ${queue.caps.join("; ")}`)
    : null;
  const all = chosen("line") === "all";
  const more = queue.waiting - queue.rows.length;
  const foot = !queue.rows.length
    ? empty("None is in line yet: they wait for other jobs or are on hold.")
    : all || more > 0
      ? h(
          "div",
          { class: "row" },
          more > 0 ? h("a", { href: "#/jobs?state=waiting" }, `and ${whole(more)} more`) : null,
          h(
            "button",
            { class: "quiet", onclick: () => pick("line", all ? "" : "all") },
            all ? "Only the first" : `The first ${MOST} in line`,
          ),
        )
      : null;
  return [head, caps, groups(queue.groups ?? [], group, pick), queue.rows.length ? line(queue) : null, foot];
}

/** @param {Api.GroupView[]} found */
function groups(found, open, pick) {
  const key = chosen("group");
  return h(
    "ul",
    { class: "groups" },
    found.map((one) =>
      h(
        "li",
        { "data-key": one.key, "data-group": one.key },
        h(
          "button",
          {
            class: "link",
            "aria-expanded": String(one.key === key),
            onclick: () => pick("group", one.key === key ? "" : one.key),
          },
          h("b", {}, whole(one.count)),
          ` ${one.count === 1 ? "waits" : "wait"} ${one.what}`,
        ),
        one.like && one.count > 1
          ? h(
              "span",
              {
                class: "dim small",
                title:
                  "The first of each kind of job was asked for its reason; the others ask for the same and stand " +
                  "behind it.",
              },
              " counted by the first of each kind",
            )
          : null,
        one.key === key && open?.key === key
          ? h(
              "ul",
              { class: "members" },
              open.rows.map((row) =>
                h(
                  "li",
                  { "data-key": row.id, "data-member": row.id },
                  h("a", { href: `#/job/${row.id}` }, row.id),
                  ` ${row.name} `,
                  h("span", { class: "dim small" }, `${shape(row)} · ${row.tenant}: ${row.why}`),
                ),
              ),
              one.count > open.rows.length
                ? h("li", { class: "dim small" }, `and ${whole(one.count - open.rows.length)} more like these`)
                : null,
            )
          : null,
      ),
    ),
  );
}

function line(queue) {
  const latest = Math.max(...queue.rows.map((row) => (row.late_ms ?? 0) - queue.now_ms), 1);
  const rows = queue.rows.map((row) =>
    h(
      "tr",
      { "data-key": row.id, "data-job": row.id },
      h("td", { class: "num", "data-name": "place" }, String(row.position)),
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
      h("td", { "data-name": "starts" }, starts(row, queue.now_ms, latest)),
      h("td", { class: "num", "data-name": "waits" }, span(queue.now_ms - row.submitted_ms)),
      h("td", {}, h("div", { class: "row" }, jobActions(row))),
    ),
  );
  return table(["num:#", "Next in line", "Why it waits and what would help", "Predicted start", "num:Waits", ""], rows);
}

/** @param {Api.QueueRow} row */
function starts(row, at, latest) {
  if (!row.foreseen)
    return h("span", { class: "dim" }, row.position > 50 ? "after the jobs ahead of it" : "not predicted yet");
  if (row.early_ms === null) return h("span", { class: "dim" }, row.start || "unknown");
  const early = Math.max(0, row.early_ms - at);
  const late = Math.max(early, row.late_ms - at);
  const text = late - early < 1000 ? `in about ${span(late)}` : `in ${span(early)} to ${span(late)}`;
  return h(
    "div",
    {},
    text,
    h(
      "div",
      { class: "range", role: "presentation" },
      h("i", {
        style: { left: `${(100 * early) / latest}%`, width: `${Math.max(1, (100 * (late - early)) / latest)}%` },
      }),
    ),
  );
}
