// Parts of a job's view: its members, its events and its cost.

import { accountColor, accountRank } from "./colors.js";
import { bytes, clock, h, percent, plural, short, span, whole } from "./dom.js";
import { now } from "./live.js";
import { replace } from "./patch.js";
import { table } from "./table.js";

export const fact = (name, ...value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
/** A moment that leads to the cluster as it was then. */
export const toTime = (ms, text) => h("a", { href: `#/time?at=${ms}`, title: "Cluster at this time" }, text);
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
    job.nap && (job.nap.wants ? "resumes when there is room" : job.state === "asleep" && "resumes on use"),
    job.slept_ms && `${job.nap ? "before" : plural(job.naps, "time")}: ${span(job.slept_ms)}`,
  ];
  return fact("Suspended", words.filter(Boolean).join(", "));
}

/** @param {Api.JobView} job */
export function awayFact({ away }) {
  if (!away) return null;
  const price = away.price === null ? "" : `, ${away.price.toFixed(2)} per GPU-hour`;
  return fact("Neighbor", `${away.id ? `${away.neighbor}, as ${away.id}` : away.neighbor}${price}`);
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
    h("h2", {}, "History"),
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
    h("h2", {}, "Cost"),
    h(
      "p",
      {},
      h(
        "b",
        {},
        spent.cost === null || spent.cost === undefined
          ? "No price list"
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
          style: { width: `${(100 * part.gpu_us) / spent.gpu_us}%`, background: accountColor(part.account) },
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
          h("i", { class: "dot", style: { background: accountColor(part.account) } }),
          part.title,
          h("span", { class: "dim" }, ` ${percent(part.gpu_us / spent.gpu_us, 1)}`),
        ),
      ),
    ),
    spent.slept_ms
      ? h(
          "p",
          { class: "dim small" },
          `Suspended for ${span(spent.slept_ms)}: ${gpuTime(spent.lent_gpu_us / 1000)} freed for other jobs, not ` +
            "part of the cost.",
        )
      : null,
  );
}

/** @param {Api.JobView} job */
export function members(job) {
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
    job.gang.length > 64 ? h("p", { class: "dim small" }, `${whole(job.gang.length - 64)} more`) : null,
  ];
}
