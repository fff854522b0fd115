// The outcome of a replay under several policies, side by side. The policy view shares a draft with it.

import { empty, fixed, h, money, percent, plural, span, verdict, whole } from "./dom.js";
import { now } from "./live.js";

export const ASK_MS = 700;
/** A policy that was edited and not applied. */
export const draft = { policy: null, version: "", name: "", text: "" };

const seconds = (value) => (value === null || value === undefined ? "–" : value ? span(value * 1000) : "0 s");
const share = (value) => percent(value, 1);
// Name, value in the answer, format, and which direction is better.
/** @type {[string, (one: any) => number, (value: number) => string, number][]} */
const FIGURES = [
  ["Jobs", (one) => one.jobs, whole, 0],
  ["Failed", (one) => one.failed, whole, -1],
  ["Wait, mean", (one) => one.wait.mean_s, seconds, -1],
  ["Wait, median", (one) => one.wait.median_s, seconds, -1],
  ["Wait, p99", (one) => one.wait.p99_s, seconds, -1],
  ["Completion, mean", (one) => one.completion.mean_s, seconds, -1],
  ["Completion, p99", (one) => one.completion.p99_s, seconds, -1],
  ["Makespan", (one) => one.makespan_s, seconds, -1],
  ["Utilization", (one) => one.utilization, share, 1],
  ["Utilization while busy", (one) => one.utilization_with_work, share, 1],
  ["Fragmentation", (one) => one.fragmentation, share, -1],
  ["Goodput", (one) => one.goodput, share, 1],
  ["Preemptions", (one) => one.preemptions, whole, 0],
  ["GPU-hours wasted", (one) => wasted(one, "gpu_ms") / 3_600_000, fixed, -1],
  ["Fairness (Jain)", (one) => one.fairness, (value) => value.toFixed(3), 1],
];

const wasted = (one, name) =>
  one.accounts.filter((part) => part.group === "wasted").reduce((sum, part) => sum + (part[name] ?? 0), 0);
/** @returns {[string, (one: any) => number, (value: number) => string, number][]} */
const paid = (currency) => [
  ["Waste", (one) => wasted(one, "cost"), (value) => money(value, currency), -1],
  ["Cost", (one) => one.cost, (value) => money(value, currency), -1],
];

/**
 * What to show of a replay, whatever its state.
 * @param {Api.SimulationView} view
 */
export function outcome(view) {
  if (view.state === "idle")
    return empty(
      "Choose policies and replay. The same in a terminal:",
      "shoal sim --history --days 7 --policy fifo --policy fair",
    );
  if (view.state === "running")
    return h(
      "p",
      { class: "note", role: "status" },
      `Replaying for ${span(now() - view.started_ms)}; the limit is 5 min`,
    );
  if (view.state !== "done") return h("p", { class: view.state === "failed" ? "problem" : "note" }, view.problem);
  const { policies, nodes, gpus, skipped } = view.result;
  const currency = policies[0]?.currency ?? "";
  const figures = currency ? [...FIGURES, ...paid(currency)] : FIGURES;
  const names = [...new Set(view.asked.policies)];
  const rows = figures.map(([name, value, write, better]) => {
    const values = policies.map(value);
    const texts = values.map((one) => (one === null || one === undefined ? "–" : write(one)));
    const best = better ? values.reduce((a, b) => (b * better > a * better ? b : a)) : null;
    const differ = new Set(texts).size > 1;
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, name),
      texts.map((text, at) => h("td", { class: `num ${better && differ && values[at] === best ? "best" : ""}` }, text)),
    );
  });
  const rest = skipped ? ` ${plural(skipped, "job")} that never ran ${skipped === 1 ? "is" : "are"} left out.` : "";
  return h(
    "section",
    { class: "card stack" },
    verdict(view.result.verdict),
    h(
      "p",
      { class: "dim small" },
      `${plural(policies[0]?.jobs ?? 0, "job")} on ${plural(nodes, "node")} with ${plural(gpus, "GPU")}, replayed in ` +
        `${span(view.ended_ms - view.started_ms)}.${rest} ● marks the best value of a row.`,
    ),
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Comparison" },
      h(
        "table",
        { class: "compare" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, "Metric"),
            names.map((name) =>
              h("th", { scope: "col", class: "num" }, name === "current" ? `current (${view.current})` : name),
            ),
          ),
        ),
        h("tbody", {}, rows),
      ),
    ),
  );
}
