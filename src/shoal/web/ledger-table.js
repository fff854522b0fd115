// Reports of the ledger as tables: what each key used, how much of it was useful or wasted, a file of it, and tokens.

import { accountColor, accountRank } from "./colors.js";
import { fixed, h, money, number, percent, short, whole } from "./dom.js";
import { table } from "./table.js";

const ROWS_MAX = 100;
export const DAY_MS = 86_400_000;
export const SPANS = [
  ["1", "Day"],
  ["7", "Week"],
  ["30", "Month"],
];
const TITLES = { tenant: "Tenant", user: "User", job: "Job", node: "Node", account: "Account" };

export const choice = (name, all, chosen, act) =>
  h(
    "fieldset",
    { class: "choice" },
    h("legend", { class: "unseen" }, name),
    all.map(([value, label]) =>
      h(
        "label",
        {},
        h("input", { type: "radio", name, value, checked: value === chosen, onchange: () => act(value) }),
        label,
      ),
    ),
  );

/** The query of a report. `only`: { tenant, user }, each of them only if it is a string. */
export function query(by, days, to, only = {}) {
  const words = new URLSearchParams({
    by,
    from_ms: String(Math.max(0, to - Number(days) * DAY_MS)),
    to_ms: String(to),
  });
  for (const [name, value] of Object.entries(only)) if (typeof value === "string") words.set(name, value);
  return words.toString();
}

export const csvLink = (words) =>
  h("a", { class: "button", href: `/v1/ledger/csv?${words}`, download: "", title: "All rows, exact amounts" }, "CSV");

const known = (value) => value !== null && value !== undefined;
const HOUR_US = 3.6e9;
const figure = (name, value, more, exact) =>
  h(
    "div",
    { class: "figure" },
    h("span", { class: "dim small" }, name),
    h("strong", { title: exact }, value),
    h("span", { class: "dim small" }, more),
  );
/** Sums over accounts or rows: none if a part of it is not known. */
const summed = (parts, name) =>
  parts.every((one) => known(one[name])) ? parts.reduce((sum, one) => sum + one[name], 0) : null;

/**
 * How the sum of a report divides into accounts: a bar with its legend.
 * @param {Api.LedgerView} view
 */
export function division(view, whole_ = "of the capacity") {
  const accounts = view.accounts
    .filter((one) => one.gpu_us > 0)
    .sort((a, b) => accountRank(a.account) - accountRank(b.account));
  const total = accounts.reduce((sum, one) => sum + one.gpu_us, 0) || 1;
  const part = (one) => percent(one.gpu_us / total, 1);
  return [
    h(
      "div",
      { class: "share", role: "img", "aria-label": accounts.map((one) => `${one.title} ${part(one)}`).join(", ") },
      accounts.map((one) =>
        h("i", {
          title: `${one.title} ${part(one)}`,
          style: { width: `${(100 * one.gpu_us) / total}%`, background: accountColor(one.account) },
        }),
      ),
    ),
    h(
      "div",
      { class: "legend row small", "data-sum": percent(total / (view.capacity_gpu_us || total), 3) },
      accounts.map((one) =>
        h(
          "span",
          { class: "key" },
          h("i", { class: "dot", style: { background: accountColor(one.account) } }),
          one.title,
          h("span", { class: "dim" }, ` ${part(one)}`),
        ),
      ),
      h("span", { class: "key" }, h("b", {}, `= ${percent(total / (view.capacity_gpu_us || total), 1)} ${whole_}`)),
    ),
  ];
}

/**
 * Figures of a report: how much, how much of it was useful, what was wasted in money, and what it cost.
 * @param {Api.LedgerView} view
 */
export function figures(view, first) {
  const total = view.accounts.reduce((sum, one) => sum + one.gpu_us, 0) || 1;
  const group = (name) => view.accounts.filter((one) => one.group === name);
  const us = (name) => group(name).reduce((sum, one) => sum + one.gpu_us, 0);
  const waste = view.currency ? summed(group("wasted"), "cost") : null;
  const wasted = `${percent(us("wasted") / total, 1)} of GPU-hours`;
  return h(
    "div",
    { class: "figures" },
    figure(first, fixed(view.capacity_gpu_ms / 3_600_000), "GPU-hours", `${view.capacity_gpu_us} GPU-µs`),
    figure("Useful", percent(us("used") / total, 1), `${fixed(us("used") / HOUR_US)} GPU-hours`),
    known(waste)
      ? figure("Wasted", money(waste, view.currency), wasted, String(waste))
      : figure("Wasted", `${fixed(us("wasted") / HOUR_US)} h`, wasted),
    figure(
      "Cost",
      known(view.cost) ? money(view.cost, view.currency) : "–",
      known(view.cost) ? "by the price list" : view.currency ? "some prices are missing" : "no price list",
      known(view.cost) ? String(view.cost) : null,
    ),
    figure(
      "Energy",
      known(view.energy_wh) ? fixed(view.energy_wh / 1000) : "–",
      known(view.energy_wh) ? `kWh${view.co2_g ? `, ${fixed(view.co2_g / 1000)} kg CO₂` : ""}` : "not measured",
    ),
  );
}

/**
 * The largest rows of a report and their sum. `link` gives the address for a key, or nothing.
 * @param {Api.LedgerView} view
 */
export function ledgerTable(view, link) {
  const about = new Map(view.accounts.map((one) => [one.account, one]));
  const keys = new Map();
  for (const row of view.rows) (keys.get(row.key) ?? keys.set(row.key, []).get(row.key)).push(row);
  const time = (rows) => rows.reduce((sum, row) => sum + row.gpu_us, 0);
  const inGroup = (rows, name) => rows.filter((row) => about.get(row.account)?.group === name);
  const total = time(view.rows) || 1;
  const ordered = [...keys].map(([key, rows]) => ({ key, rows, us: time(rows) })).sort((a, b) => b.us - a.us);
  const words = ({ key, rows }) =>
    view.by === "account"
      ? (about.get(key)?.title ?? key)
      : view.by === "job" && key && rows[0].label
        ? `${key} ${rows[0].label}`
        : key === "others"
          ? "Others"
          : key || "Unallocated";
  const name = (one) => {
    const href = one.key === "others" ? null : link?.(one.key);
    return href ? h("a", { href, "data-key": one.key }, words(one)) : words(one);
  };
  const bar = ({ rows, us }) =>
    h(
      "div",
      { class: "share thin", role: "presentation" },
      [...rows]
        .sort((a, b) => accountRank(a.account) - accountRank(b.account))
        .map((row) =>
          h("i", {
            title: `${about.get(row.account)?.title} ${percent(row.gpu_us / (us || 1), 1)}`,
            style: { width: `${(100 * row.gpu_us) / (us || 1)}%`, background: accountColor(row.account) },
          }),
        ),
    );
  const priced = Boolean(view.currency);
  const cells = (rows, us, share, shown = (text) => text) => {
    const wasted = inGroup(rows, "wasted");
    const cost = summed(rows, "cost");
    const waste = summed(wasted, "cost");
    return [
      number(shown(fixed(us / HOUR_US)), `${us} GPU-µs`, { "data-name": "GPU-hours" }),
      number(shown(percent(share, 1)), undefined, { "data-name": "Share" }),
      number(shown(percent(time(inGroup(rows, "used")) / (us || 1))), undefined, { "data-name": "Useful" }),
      number(shown(percent(time(wasted) / (us || 1))), undefined, { "data-name": "Wasted" }),
      priced ? number(shown(money(waste, view.currency)), waste, { "data-name": "Waste" }) : null,
      priced ? number(shown(money(cost, view.currency)), cost, { "data-name": "Cost" }) : null,
    ];
  };
  const list = ordered
    .slice(0, ROWS_MAX)
    .map((one) =>
      h(
        "tr",
        { "data-key": one.key, "data-us": String(one.us) },
        h("td", { class: "long" }, name(one)),
        cells(one.rows, one.us, one.us / total),
        h("td", {}, bar(one)),
      ),
    );
  const bold = (text) => h("b", {}, text);
  const sum = h(
    "tr",
    { "data-key": " sum" },
    h("td", {}, bold("Total")),
    cells(view.rows, total, total / (view.capacity_gpu_us || total), bold),
    h("td", {}),
  );
  const left = ordered.length - ROWS_MAX;
  return [
    table(
      [
        TITLES[view.by],
        "num:GPU-hours",
        "num:Share",
        "num:Useful",
        "num:Wasted",
        ...(priced ? ["num:Waste", "num:Cost"] : []),
        "Breakdown",
      ],
      [...list, sum],
    ),
    left > 0 ? h("p", { class: "dim small" }, `${whole(left)} more rows are in the total. CSV has up to 1,000.`) : null,
  ];
}

/**
 * What neighbors ran for us, as each of them has counted it, in its own currency.
 * @param {Api.LedgerView} view
 */
export function owedTable(view) {
  const line = (one) =>
    h(
      "tr",
      { "data-key": `${one.neighbor} ${one.tenant}` },
      h("td", { class: "long" }, one.neighbor),
      h("td", {}, one.tenant),
      number(whole(one.jobs), undefined, { "data-name": "Jobs" }),
      number(fixed(one.gpu_ms / 3.6e6), `${whole(one.gpu_ms)} GPU-ms`, { "data-name": "GPU-hours" }),
      number(one.cost ? one.cost.toFixed(2) : "–", undefined, { "data-name": "Cost" }),
    );
  const left = view.owed.length - ROWS_MAX;
  return [
    table("Neighbor,Tenant,num:Jobs,num:GPU-hours,num:Cost".split(","), view.owed.slice(0, ROWS_MAX).map(line)),
    left > 0 ? h("p", { class: "dim small" }, `and ${whole(left)} more: shoal report --by neighbor`) : null,
  ];
}

/**
 * Tokens by service and caller, the largest first, with what a million of the service's tokens cost.
 * @param {Api.LedgerView} view
 */
export function tokensTable(view) {
  const costs = new Map(view.token_costs.map((one) => [one.service, one]));
  const priced = Boolean(view.currency);
  const each = (service, name) => {
    const value = costs.get(service)?.[name];
    return known(value) ? money(value, view.currency) : "–";
  };
  const line = (one) =>
    h(
      "tr",
      { "data-key": `${one.service} ${one.owner} ${one.caller} ${one.tenant}` },
      h("td", { class: "long" }, one.service || "Others"),
      h("td", { class: "mono" }, one.caller || "without a key"),
      h("td", {}, one.tenant || "–"),
      ["requests", "prompt", "cached", "generated"].map((name) =>
        number(short(one[name]), whole(one[name]), { "data-name": name[0].toUpperCase() + name.slice(1) }),
      ),
      priced ? number(each(one.service, "per_million_generated"), undefined, { "data-name": "1M generated" }) : null,
      priced ? number(each(one.service, "per_million_computed"), undefined, { "data-name": "1M computed" }) : null,
    );
  const left = view.tokens.length - ROWS_MAX;
  return [
    table(
      [
        ..."Service,Key,Tenant,num:Requests,num:Prompt,num:Cached,num:Generated".split(","),
        ...(priced ? ["num:1M generated", "num:1M computed"] : []),
      ],
      view.tokens.slice(0, ROWS_MAX).map(line),
    ),
    left > 0 ? h("p", { class: "dim small" }, `and ${whole(left)} more: shoal report --tokens`) : null,
  ];
}
