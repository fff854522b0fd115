// Reports of the ledger as tables: what each key used, what of it was of use or wasted, and a file of it.

import { accountColour, accountRank } from "./colours.js";
import { h, percent, short, whole } from "./dom.js";
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
  h(
    "a",
    { class: "button", href: `/v1/ledger/csv?${words}`, download: "", title: "All rows, with exact amounts" },
    "CSV",
  );

const known = (value) => value !== null && value !== undefined;
const figure = (name, value, more) =>
  h(
    "div",
    { class: "figure" },
    h("span", { class: "dim small" }, name),
    h("strong", {}, value),
    h("span", { class: "dim small" }, more),
  );

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
          style: { width: `${(100 * one.gpu_us) / total}%`, background: accountColour(one.account) },
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
          h("i", { class: "dot", style: { background: accountColour(one.account) } }),
          one.title,
          h("span", { class: "dim" }, ` ${part(one)}`),
        ),
      ),
      h("span", { class: "key" }, h("b", {}, `= ${percent(total / (view.capacity_gpu_us || total), 1)} ${whole_}`)),
    ),
  ];
}

/**
 * Figures of a report: how much, of use, wasted, and what it cost.
 * @param {Api.LedgerView} view
 */
export function figures(view, first) {
  const total = view.accounts.reduce((sum, one) => sum + one.gpu_us, 0) || 1;
  const group = (name) =>
    view.accounts.filter((one) => one.group === name).reduce((sum, one) => sum + one.gpu_us, 0) / total;
  return h(
    "div",
    { class: "figures" },
    figure(first, short(view.capacity_gpu_ms / 3_600_000), "GPU-hours"),
    figure("Useful", percent(group("used"), 1), "steps, requests"),
    figure("Wasted", percent(group("wasted"), 1), "lost or held idle"),
    figure("Cost", known(view.cost) ? short(view.cost) : "–", known(view.cost) ? view.currency : "no price list yet"),
    figure(
      "Energy",
      known(view.energy_wh) ? short(view.energy_wh / 1000) : "–",
      known(view.energy_wh) ? `kWh${view.co2_g ? `, ${short(view.co2_g / 1000)} kg CO₂` : ""}` : "not known",
    ),
  );
}

/**
 * The largest rows of a report and their sum. `link` gives the address for a key, or nothing.
 * @param {Api.LedgerView} view
 */
export function ledgerTable(view, link) {
  const about = new Map(view.accounts.map((one) => [one.account, one]));
  const sums = new Map();
  for (const row of view.rows) {
    const one =
      sums.get(row.key) ??
      sums
        .set(row.key, { label: row.label, us: 0, used: 0, wasted: 0, cost: 0, priced: true, parts: new Map() })
        .get(row.key);
    const group = about.get(row.account)?.group;
    one.us += row.gpu_us;
    if (group === "used") one.used += row.gpu_us;
    if (group === "wasted") one.wasted += row.gpu_us;
    if (known(row.cost)) one.cost += row.cost;
    else one.priced = false;
    one.parts.set(row.account, (one.parts.get(row.account) ?? 0) + row.gpu_us);
  }
  const total = [...sums.values()].reduce((sum, one) => sum + one.us, 0) || 1;
  const ordered = [...sums].sort((a, b) => b[1].us - a[1].us);
  const words = (key, one) =>
    view.by === "account"
      ? (about.get(key)?.title ?? key)
      : view.by === "job" && key && one.label
        ? `${key} ${one.label}`
        : key || "nobody's";
  const name = (key, one) => {
    const href = key === "others" ? null : link?.(key);
    return href ? h("a", { href, "data-key": key }, words(key, one)) : words(key, one);
  };
  const bar = (one) =>
    h(
      "div",
      { class: "share thin", role: "presentation" },
      [...one.parts]
        .sort((a, b) => accountRank(a[0]) - accountRank(b[0]))
        .map(([account, us]) =>
          h("i", {
            title: about.get(account)?.title,
            style: { width: `${(100 * us) / (one.us || 1)}%`, background: accountColour(account) },
          }),
        ),
    );
  const number = (title, value, props) => h("td", { class: "num", "data-name": title, ...props }, value);
  const list = ordered
    .slice(0, ROWS_MAX)
    .map(([key, one]) =>
      h(
        "tr",
        { "data-key": key, "data-us": String(one.us) },
        h("td", { class: "long" }, name(key, one)),
        number("GPU-hours", short(one.us / 3.6e9)),
        number("share", percent(one.us / total, 1)),
        number("of use", percent(one.used / (one.us || 1))),
        number("wasted", percent(one.wasted / (one.us || 1))),
        number("cost", one.priced ? short(one.cost) : "–"),
        h("td", {}, bar(one)),
      ),
    );
  const sum = h(
    "tr",
    { "data-key": " sum" },
    h("td", {}, h("b", {}, "Sum")),
    number("GPU-hours", h("b", {}, short(total / 3.6e9))),
    number("share", h("b", {}, percent(total / (view.capacity_gpu_us || total), 1))),
    h("td", {}),
    h("td", {}),
    h("td", {}),
    h("td", {}),
  );
  const left = ordered.length - ROWS_MAX;
  return [
    table(
      [
        TITLES[view.by],
        "num:GPU-hours",
        "num:Share",
        "num:Of use",
        "num:Wasted",
        `num:Cost${view.currency ? ` (${view.currency})` : ""}`,
        "Where it went",
      ],
      [...list, sum],
    ),
    left > 0
      ? h("p", { class: "dim small" }, `and ${whole(left)} more, which are in the sum; the CSV file has up to 1,000`)
      : null,
  ];
}
