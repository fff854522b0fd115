// Parts of a job's view: its attempts on a time line, its members, its events and its cost.

import { accountColour, accountRank } from "./colours.js";
import { bytes, clock, css, h, percent, plural, s, short, span, whole } from "./dom.js";
import { now } from "./live.js";
import { replace } from "./patch.js";
import { table } from "./table.js";

export const fact = (name, ...value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
/** A moment that leads to the cluster as it was then. */
export const toTime = (ms, text) => h("a", { href: `#/time?at=${ms}`, title: "The cluster at this time" }, text);
export const gpuTime = (ms) => (ms < 360000 ? `${whole(ms / 1000)} GPU-seconds` : `${short(ms / 3600000)} GPU-hours`);

const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
/**
 * A long command opens to all of it.
 * @param {Api.JobView} job
 */
export const commandOf = (job) =>
  job.command.endsWith("...") && job.spec.command
    ? h(
        "details",
        {},
        h("summary", {}, job.command),
        h("div", { class: "whole-command" }, job.spec.command.map(quoted).join(" ")),
      )
    : job.command;

/** @param {Api.JobView} job */
export function napFact(job) {
  if (!job.nap && !job.slept_ms) return null;
  const words = [
    job.nap && `for ${span(now() - job.nap.since_ms)}`,
    job.nap?.host_mb && `${bytes(job.nap.host_mb * 2 ** 20)} of GPU memory kept on its nodes`,
    job.nap && (job.nap.wants ? "wakes when there is room" : job.state === "asleep" && "wakes when it is used"),
    job.slept_ms && `${job.nap ? "before" : plural(job.naps, "nap")}: ${span(job.slept_ms)}`,
  ];
  return fact(job.nap ? "Asleep" : "Slept", words.filter(Boolean).join(", "));
}

/**
 * @param {HTMLElement} card
 * @param {Api.WhyView} history
 */
export function drawEvents(card, history) {
  const list = history.events
    .toReversed()
    .map(({ seq, event, text }) =>
      h(
        "li",
        { "data-key": seq },
        h("time", { datetime: new Date(event.at_ms).toISOString() }, toTime(event.at_ms, clock(event.at_ms))),
        h("span", {}, text.replace(`${event.job} `, "")),
      ),
    );
  replace(
    card,
    h("h2", {}, "What happened and why"),
    h("ol", { class: "events", tabindex: "0", "aria-label": "Events, newest first" }, list),
  );
}

/**
 * @param {HTMLElement} card
 * @param {Api.CostView | null} spent
 */
export function drawCost(card, spent) {
  card.hidden = !spent?.gpu_us; // a job that never held a GPU has cost nothing
  if (card.hidden) return;
  const parts = [...(spent.accounts ?? [])]
    .filter((part) => part.gpu_us > 0)
    .sort((a, b) => accountRank(a.account) - accountRank(b.account));
  replace(
    card,
    h("h2", {}, "Cost so far"),
    h(
      "p",
      {},
      h(
        "b",
        {},
        spent.cost === null || spent.cost === undefined
          ? "no price list"
          : `${spent.cost.toFixed(2)} ${spent.currency}`,
      ),
      h(
        "span",
        { class: "dim" },
        ` for ${gpuTime(spent.gpu_ms)}${spent.energy_wh ? `, ${short(spent.energy_wh / 1000)} kWh` : ""}`,
      ),
    ),
    h(
      "div",
      {
        class: "share",
        role: "img",
        "aria-label": parts.map((part) => `${part.title} ${percent(part.gpu_us / spent.gpu_us, 1)}`).join(", "),
      },
      parts.map((part) =>
        h("i", {
          title: part.title,
          style: { width: `${(100 * part.gpu_us) / spent.gpu_us}%`, background: accountColour(part.account) },
        }),
      ),
    ),
    h(
      "div",
      { class: "legend row small" },
      parts.map((part) =>
        h(
          "span",
          { class: "key" },
          h("i", { class: "dot", style: { background: accountColour(part.account) } }),
          part.title,
          h("span", { class: "dim" }, ` ${percent(part.gpu_us / spent.gpu_us, 1)}`),
        ),
      ),
    ),
    spent.slept_ms
      ? h(
          "p",
          { class: "dim small" },
          `Slept ${span(spent.slept_ms)}, and lent out ${gpuTime(spent.lent_gpu_us / 1000)} by that, which are not ` +
            `part of the sum.`,
        )
      : null,
  );
}

/** @param {Api.JobView} job */
export function members(job) {
  if (!job.gang.length) return [h("h2", {}, "Members"), h("p", { class: "dim" }, "not placed yet")];
  const rows = job.gang
    .slice(0, 64)
    .map((one) =>
      h(
        "tr",
        { "data-key": one.member },
        h("td", { "data-name": "member" }, String(one.member)),
        h("td", {}, h("a", { href: `#/node/${encodeURIComponent(one.node)}` }, one.node)),
        h("td", { class: "dim", "data-name": "GPUs" }, one.gpus.join(", ") || "none"),
        h("td", {}, one.code === null ? one.status : `${one.status} ${one.code}`),
      ),
    );
  return [
    h("h2", {}, "Members"),
    table(["Member", "Node", "GPUs", "State"], rows),
    job.gang.length > 64 ? h("p", { class: "dim small" }, `and ${job.gang.length - 64} more`) : null,
  ];
}

const summary = (one) => `${one.nodes.join(", ")}${one.ended_ms || one.stopping_ms ? `: ${one.cause}` : ""}`;

const naps = (one, end) => [...(one.slept_at ?? []), ...(one.dozed_ms ? [[one.dozed_ms, end]] : [])];

/**
 * @param {HTMLElement} card
 * @param {any[]} found
 * @param {Api.JobView} job
 */
export function timeline(card, found, job) {
  const begin = job.submitted_ms;
  const finish = job.finished_ms ?? now();
  const width = Math.max(200, (card.clientWidth || card.parentElement.clientWidth || 700) - 34);
  const label = Math.min(90, width * 0.25);
  const row = 26;
  const shown = found.slice(-12);
  const X = (ms) => label + ((Math.min(ms, finish) - begin) / Math.max(1, finish - begin)) * (width - label - 4);
  const bar = (from, to, y, fill, words) =>
    s("rect", { x: X(from), y, width: Math.max(2, X(to) - X(from)), height: 14, rx: 3, fill }, s("title", {}, words));
  const parts = shown.map((one, at) => {
    const y = at * row + 4;
    const end = one.ended_ms || finish;
    const began = one.running_ms || Math.min(end, one.stopping_ms || end);
    const text = summary(one);
    const wide = text.length * 6 < X(end) - X(began) - 8;
    const ink = one.cause === "succeeded" || !one.ended_ms ? css("--accent") : css("--ink-3");
    return s(
      "g",
      {},
      s("text", { x: 0, y: y + 11 }, `attempt ${one.attempt}`),
      bar(one.placed_ms, began, y, css("--line-2"), "starting"),
      one.running_ms
        ? bar(
            one.running_ms,
            one.stopping_ms || end,
            y,
            ink,
            `ran ${span((one.stopping_ms || end) - one.running_ms)} on ${one.nodes.join(", ")}`,
          )
        : null,
      naps(one, end).map(([from, to]) => bar(from, to, y, css("--sleep"), `asleep for ${span(to - from)}`)),
      one.stopping_ms ? bar(one.stopping_ms, end, y, css("--warn"), `stopping: ${one.cause}`) : null,
      wide
        ? s("text", { x: X(began) + 6, y: y + 11, style: { fill: css("--surface") } }, text)
        : s(
            "text",
            {
              x: X(end) + 6 > width - 60 ? X(one.placed_ms) - 6 : X(end) + 6,
              y: y + 11,
              "text-anchor": X(end) + 6 > width - 60 ? "end" : "start",
            },
            text.slice(0, 60),
          ),
    );
  });
  const waited = s("rect", {
    x: X(begin),
    y: shown.length * row + 4,
    width: Math.max(1, X(found[0]?.placed_ms ?? finish) - X(begin)),
    height: 3,
    fill: css("--line-2"),
  });
  const height = shown.length * row + 26;
  const picture = s(
    "svg",
    {
      width,
      height,
      role: "img",
      "aria-label":
        `${plural(found.length, "attempt")} in ${span(finish - begin)}: ` +
        `${shown.map((one) => `attempt ${one.attempt} on ${summary(one)}`).join("; ")}`,
    },
    parts,
    waited,
    s("text", { x: label, y: height - 5 }, `${clock(begin)} submitted`),
    s(
      "text",
      { x: width - 4, y: height - 5, "text-anchor": "end" },
      job.finished_ms ? `${clock(finish)} ended` : "now",
    ),
  );
  replace(card, h("h2", {}, "Attempts"), h("div", { class: "timeline" }, picture));
}
