// Where every GPU-hour and its cost went.

import { choose, chosen } from "./address.js";
import { maybe } from "./api.js";
import { stackedBars } from "./charts.js";
import { accountColor, accountRank } from "./colors.js";
import { empty, fixed, h, money, short, span, verdict } from "./dom.js";
import {
  choice,
  csvLink,
  DAY_MS,
  division,
  figures,
  ledgerTable,
  owedTable,
  query,
  SPANS,
  tokensTable,
} from "./ledger-table.js";
import { now } from "./live.js";
import { replace } from "./patch.js";

const ASK_MS = 10_000;
const BYS = [
  ["tenant", "Tenant"],
  ["user", "User"],
  ["job", "Job"],
  ["node", "Node"],
  ["account", "Account"],
];
const UNITS = [
  ["time", "GPU-hours"],
  ["cost", "Cost"],
  ["energy", "Energy"],
];
const LINKS = { tenant: "tenant", user: "user", job: "job", node: "node" };

export function mount(root) {
  const among = (all, value, usual) => (all.some(([one]) => one === value) ? value : usual);
  let days = among(SPANS, chosen("days"), "1");
  let by = among(BYS, chosen("by"), "tenant");
  let unit = among(UNITS, chosen("unit"), "time");
  let to = 0;
  let alive = true;
  /** @type {Api.LedgerView} */
  let over = null;
  /** @type {Api.LedgerView} */
  let under = null;
  let problem = "";
  const chart = stackedBars({ title: "" });
  const top = h("div", { class: "stack" });
  const below = h("section", { class: "card", "aria-label": "Table" });
  const tokens = h("section", { class: "card", "aria-label": "Tokens", hidden: true });
  const owed = h("section", { class: "card", "aria-label": "Owed to neighbors", hidden: true });
  const card = h("section", { class: "card", "aria-label": "Over time" }, chart.element);
  const notice = h("div", {});
  const units = choice("unit", UNITS, unit, (value) => {
    unit = value;
    choose("unit", value === "time" ? "" : value);
    draw();
  });
  root.append(
    h(
      "div",
      { class: "stack" },
      h(
        "div",
        { class: "row" },
        h("h1", {}, "Ledger"),
        h("span", { class: "push" }),
        choice("span", SPANS, days, (value) => {
          days = value;
          choose("days", value === "1" ? "" : value);
          ask();
        }),
        units,
      ),
      notice,
      top,
      card,
      h(
        "div",
        { class: "row" },
        h("span", { class: "dim small" }, "Group by"),
        choice("by", BYS, by, (value) => {
          by = value;
          choose("by", value === "tenant" ? "" : value);
          ask();
        }),
      ),
      below,
      tokens,
      owed,
    ),
  );

  async function ask() {
    to = Math.ceil(now());
    const path = (key) => `/v1/ledger?${query(key, days, to)}`;
    try {
      [over, under] = await Promise.all([maybe(path(days === "1" ? "hour" : "day")), maybe(path(by))]);
      problem = "";
    } catch (error) {
      problem = error.message;
    }
    if (alive) draw();
  }

  const amount = (row) =>
    unit === "time" ? row.gpu_ms / 3_600_000 : unit === "cost" ? (row.cost ?? 0) : (row.energy_wh ?? 0) / 1000;
  const words = (value, brief) =>
    brief
      ? short(value)
      : unit === "time"
        ? `${fixed(value)} GPU-hours`
        : unit === "cost"
          ? money(value, over?.currency)
          : `${fixed(value)} kWh`;

  const lent = () =>
    over.slept_ms
      ? [
          `Not in the total: jobs were suspended for ${span(over.slept_ms)}, which freed ` +
            `${fixed(over.lent_gpu_us / 3.6e9)} GPU-hours for others.`,
        ]
      : [];
  const notes = () => [...lent(), ...(over.notes ?? [])];

  function draw() {
    if (problem) {
      replace(notice, h("p", { class: "problem" }, problem));
      return;
    }
    const bare = !over?.rows.length;
    card.hidden = below.hidden = bare;
    tokens.hidden = !under?.tokens.length; // a service may use no GPU
    owed.hidden = !under?.owed.length;
    if (!owed.hidden) replace(owed, h("h2", {}, "Owed to neighbors"), owedTable(under));
    if (!tokens.hidden) replace(tokens, h("h2", {}, "Tokens"), tokensTable(under));
    replace(
      notice,
      over === null
        ? empty("This controller has no ledger.", "shoal report")
        : bare
          ? empty("No GPU time in this period. To start a job:", "shoal run -g 1 -- python train.py")
          : notes().length
            ? h(
                "ul",
                { class: "notes" },
                notes().map((note) => h("li", {}, note)),
              )
            : null,
    );
    if (bare) {
      replace(top);
      return;
    }
    const accounts = [...over.accounts]
      .filter((one) => one.gpu_us > 0)
      .sort((a, b) => accountRank(a.account) - accountRank(b.account));
    replace(top, verdict(over.verdict), figures(over, "Capacity"), division(over));
    bars(accounts);
    rows();
  }

  function bars(accounts) {
    const slots = new Map();
    for (const row of over.rows) (slots.get(row.key) ?? slots.set(row.key, []).get(row.key)).push(row);
    // Empty hours get a place too, so that the distance between bars is right.
    const step = days === "1" ? 3_600_000 : DAY_MS;
    const newest = Math.max(...[...slots.keys()].map(Number));
    for (let at = newest; at > newest - (days === "1" ? 24 : Number(days)) * step; at -= step)
      if (!slots.has(String(at))) slots.set(String(at), []);
    const ordered = [...slots].sort((a, b) => Number(a[0]) - Number(b[0]));
    const label = (key) => {
      const at = new Date(Number(key));
      return days === "1"
        ? at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })
        : at.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
    };
    const title = new Map(accounts.map((one) => [one.account, one.title]));
    const color = new Map(accounts.map((one) => [one.title, accountColor(one.account)]));
    const list = ordered.map(([key, inside]) => ({
      label: label(key),
      parts: [...inside]
        .sort((a, b) => accountRank(a.account) - accountRank(b.account))
        .map((row) => ({ name: title.get(row.account) ?? row.account, value: amount(row) })),
    }));
    chart.element.querySelector("h3").textContent =
      { time: "GPU-hours", cost: `Cost${over.currency ? ` (${over.currency})` : ""}`, energy: "Energy (kWh)" }[unit] +
      (days === "1" ? " per hour" : " per day");
    chart.set(list, (name) => color.get(name) ?? accountColor(name), words);
  }

  function rows() {
    if (!under || under.by !== by) return;
    const link = (key) =>
      key && LINKS[by] && !(by === "job" && key === "older")
        ? `#/${LINKS[by]}/${encodeURIComponent(key)}${by === "tenant" || by === "user" ? `?days=${days}` : ""}`
        : null;
    replace(
      below,
      h("div", { class: "row" }, h("h2", {}, `By ${by}`), h("span", { class: "push" }, csvLink(query(by, days, to)))),
      ledgerTable(under, link),
    );
  }

  const timer = setInterval(() => {
    if (!document.hidden) ask();
  }, ASK_MS);
  window.addEventListener("shoal-theme", draw);
  ask();
  return () => {
    alive = false;
    clearInterval(timer);
    chart.stop();
    window.removeEventListener("shoal-theme", draw);
  };
}
