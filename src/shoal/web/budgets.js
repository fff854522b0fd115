// Budgets: how much of it is used, when it begins again, and how long the rest lasts at this rate.

import { maybe } from "./api.js";
import { chip, h, moment, percent, plural, short, span } from "./dom.js";
import { now } from "./live.js";
import { replace } from "./patch.js";

const ASK_MS = 60_000;
export const budgets = async () => (await maybe("/v1/budgets")) ?? [];
export const toTenant = (name) => h("a", { href: `#/tenant/${encodeURIComponent(name)}` }, name);

/** @param {Api.BudgetView} budget */
const level = (budget) =>
  budget.level === "held"
    ? ["failed", "exhausted: jobs wait"]
    : budget.share >= 1
      ? ["failed", "exhausted"]
      : budget.share >= budget.warns_at
        ? ["suspect", "nearly exhausted"]
        : [];

/** @param {Api.BudgetView} budget */
function lasts(budget, one) {
  if (one.used >= one.limit) return "";
  if (one.ends_ms === null) return "no usage now";
  const rate =
    `At this rate ` +
    `(${budget.gpus ? plural(Number(short(budget.gpus)), "GPU") : `${short(one.per_hour)} ${one.unit} per hour`})`;
  if (budget.resets_ms && one.ends_ms >= budget.resets_ms) return `${rate} it lasts until the reset`;
  return `${rate} it runs out in ${span(one.ends_ms - now())}, ${moment(one.ends_ms, now())}`;
}

/** @param {Api.BudgetView} budget */
export function gauge(budget) {
  const [state, word] = level(budget);
  const marks = (one) =>
    h(
      "div",
      {
        class: "meter",
        role: "meter",
        "aria-label": `Budget of ${budget.tenant} in ${one.unit}`,
        "aria-valuemin": "0",
        "aria-valuemax": String(one.limit),
        "aria-valuenow": String(Math.min(one.used, one.limit)),
        "aria-valuetext": `${short(one.used)} of ${short(one.limit)} ${one.unit}`,
      },
      h("i", {
        class: one.used >= one.limit ? "full" : one.used >= budget.warns_at * one.limit ? "near" : "",
        style: { width: `${Math.min(100, (100 * one.used) / one.limit)}%` },
      }),
      h("b", { style: { left: `${100 * budget.warns_at}%` }, title: `Warning at ${percent(budget.warns_at)}` }),
    );
  const when = budget.resets_ms
    ? `resets ${moment(budget.resets_ms, now())}, in ${span(budget.resets_ms - now())}`
    : "does not reset";
  return h(
    "div",
    { class: "gauge", "data-key": budget.tenant, "data-tenant": budget.tenant, "data-level": budget.level ?? "" },
    h(
      "div",
      { class: "row" },
      h("b", {}, toTenant(budget.tenant)),
      state ? chip(state, word) : null,
      budget.waiting ? h("span", { class: "small" }, `${plural(budget.waiting, "job")} on hold`) : null,
      h("span", { class: "push dim small" }, when),
    ),
    budget.gauges.map((one) =>
      h(
        "div",
        { "data-unit": one.unit },
        h(
          "div",
          { class: "row small" },
          h("span", {}, `${short(one.used)} of ${short(one.limit)} ${one.unit}`),
          h("span", { class: "dim" }, percent(one.used / one.limit)),
          h("span", { class: "push dim" }, lasts(budget, one)),
        ),
        marks(one),
      ),
    ),
    budget.text.includes("no price") ? h("p", { class: "dim small" }, budget.text) : null,
  );
}

/** A line about budgets that are nearly used up; empty otherwise. */
export function nearEnd() {
  const element = h("div", { class: "row near-end" });
  let alive = true;
  const ask = async () => {
    let found = [];
    try {
      found = (await budgets()).filter((one) => one.share >= one.warns_at);
    } catch {
      return;
    }
    if (alive)
      replace(
        element,
        found
          .slice(0, 4)
          .map((one) =>
            h(
              "a",
              { href: `#/tenant/${encodeURIComponent(one.tenant)}`, "data-key": one.tenant, title: one.text },
              chip(one.level === "held" ? "failed" : "suspect", `Budget of ${one.tenant}: ${percent(one.share)} used`),
            ),
          ),
        found.length > 4 ? h("a", { href: "#/policy" }, `and ${found.length - 4} more`) : null,
      );
  };
  const timer = setInterval(() => {
    if (!document.hidden) ask();
  }, ASK_MS);
  ask();
  return {
    element,
    stop: () => {
      alive = false;
      clearInterval(timer);
    },
  };
}
