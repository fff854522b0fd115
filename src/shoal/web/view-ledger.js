// Where every GPU-second and its cost went.

import { maybe } from "./api.js";
import { stackedBars } from "./charts.js";
import { accountColour, accountRank } from "./colours.js";
import { empty, h, percent, replace, short, span, whole } from "./dom.js";
import { now } from "./live.js";
import { table } from "./table.js";

const DAY_MS = 86_400_000;
const ASK_MS = 10_000;
const SPANS = [["1", "Day"], ["7", "Week"], ["30", "Month"]];
const BYS = [["tenant", "Tenant"], ["user", "User"], ["job", "Job"], ["node", "Node"], ["account", "Account"]];
const ROWS_MAX = 100;

export function mount(root) {
  let days = "1", by = "tenant", unit = "time", alive = true, over = null, under = null, problem = "";
  const chart = stackedBars({ title: "" });
  const top = h("div", { class: "stack" });
  const below = h("section", { class: "card", "aria-label": "Table" });
  const card = h("section", { class: "card", "aria-label": "Over time" }, chart.element);
  const notice = h("div", {});
  const choice = (name, all, now_, act) => h("fieldset", { class: "choice" }, h("legend", { class: "unseen" }, name), all.map(([value, label]) => h("label", {}, h("input", { type: "radio", name, value, checked: value === now_, onchange: () => act(value) }), label)));
  const units = choice("unit", [["time", "GPU-hours"], ["cost", "Money"], ["energy", "Energy"]], unit, (value) => { unit = value; draw(); });
  root.append(h("div", { class: "stack" }, h("div", { class: "row" }, h("h1", {}, "Ledger"), choice("span", SPANS, days, (value) => { days = value; ask(); }), units), notice, top, card, h("div", { class: "row" }, h("span", { class: "dim small" }, "By"), choice("by", BYS, by, (value) => { by = value; ask(); })), below));

  async function ask() {
    const to = Math.ceil(now()), from = to - Number(days) * DAY_MS;
    const path = (key) => `/v1/ledger?from_ms=${from}&to_ms=${to}&by=${key}`;
    try { [over, under] = await Promise.all([maybe(path(days === "1" ? "hour" : "day")), maybe(path(by))]); problem = ""; } catch (error) { problem = error.message; }
    if (alive) draw();
  }

  const amount = (row) => (unit === "time" ? row.gpu_ms / 3_600_000 : unit === "cost" ? row.cost ?? 0 : (row.energy_wh ?? 0) / 1000);
  const words = (value, brief) => (unit === "time" ? `${short(value)}${brief ? "" : " GPU-h"}` : unit === "cost" ? `${short(value)}${brief ? "" : ` ${over?.currency ?? ""}`}` : `${short(value)}${brief ? "" : " kWh"}`);

  const lent = () => (over.slept_ms ? [`Not part of the sum: jobs slept ${span(over.slept_ms)} in all, and lent out ${short(over.lent_gpu_us / 3.6e9)} GPU-hours by that.`] : []);
  const notes = () => [...lent(), ...(over.notes ?? [])];

  function draw() {
    if (problem) { replace(notice, h("p", { class: "problem" }, problem)); return; }
    const bare = !over || !over.rows.length;
    card.hidden = below.hidden = bare;
    replace(notice, over === null ? empty("This controller has no ledger.", "shoal report") : bare ? empty("No GPU time was recorded in this period. To start a job:", "shoal run -g 1 -- python train.py") : notes().length ? h("ul", { class: "notes" }, notes().map((note) => h("li", {}, note))) : null);
    if (bare) { replace(top); return; }
    const accounts = [...over.accounts].filter((one) => one.gpu_us > 0).sort((a, b) => accountRank(a.account) - accountRank(b.account));
    const total = accounts.reduce((sum, one) => sum + one.gpu_us, 0) || 1;
    const wasted = accounts.filter((one) => one.group === "wasted").reduce((sum, one) => sum + one.gpu_us, 0);
    const used = accounts.filter((one) => one.group === "used").reduce((sum, one) => sum + one.gpu_us, 0);
    const figure = (name, value, more) => h("div", { class: "figure" }, h("span", { class: "dim small" }, name), h("strong", {}, value), h("span", { class: "dim small" }, more));
    replace(top,
      h("div", { class: "figures" }, figure("Capacity", short(over.capacity_gpu_ms / 3_600_000), "GPU-hours"), figure("Useful", percent(used / total, 1), "steps, requests"), figure("Wasted", percent(wasted / total, 1), "lost or held idle"), figure("Cost", over.cost === null || over.cost === undefined ? "–" : short(over.cost), over.cost === null || over.cost === undefined ? "no price list yet" : over.currency), figure("Energy", over.energy_wh === null || over.energy_wh === undefined ? "–" : short(over.energy_wh / 1000), over.energy_wh === null || over.energy_wh === undefined ? "not known" : `kWh${over.co2_g ? `, ${short(over.co2_g / 1000)} kg CO₂` : ""}`)),
      h("div", { class: "share", role: "img", "aria-label": accounts.map((one) => `${one.title} ${percent(one.gpu_us / total, 1)}`).join(", ") }, accounts.map((one) => h("i", { title: `${one.title} ${percent(one.gpu_us / total, 1)}`, style: { width: `${(100 * one.gpu_us) / total}%`, background: accountColour(one.account) } }))),
      h("div", { class: "legend row small", "data-sum": percent(accounts.reduce((sum, one) => sum + one.gpu_us, 0) / (over.capacity_gpu_us || 1), 3) }, accounts.map((one) => h("span", { class: "key" }, h("i", { class: "dot", style: { background: accountColour(one.account) } }), one.title, h("span", { class: "dim" }, ` ${percent(one.gpu_us / total, 1)}`))), h("span", { class: "key" }, h("b", {}, `= ${percent(total / (over.capacity_gpu_us || total), 1)} of the capacity`))));
    bars(accounts);
    rows(accounts);
  }

  function bars(accounts) {
    const slots = new Map();
    for (const row of over.rows) (slots.get(row.key) ?? slots.set(row.key, []).get(row.key)).push(row);
    // Empty hours get a place too, so that the distance between bars is right.
    const step = days === "1" ? 3_600_000 : DAY_MS, newest = Math.max(...[...slots.keys()].map(Number));
    for (let at = newest; at > newest - (days === "1" ? 24 : Number(days)) * step; at -= step) if (!slots.has(String(at))) slots.set(String(at), []);
    const ordered = [...slots].sort((a, b) => Number(a[0]) - Number(b[0]));
    const label = (key) => { const at = new Date(Number(key)); return days === "1" ? at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }) : at.toLocaleDateString("en-GB", { day: "numeric", month: "short" }); };
    const title = new Map(accounts.map((one) => [one.account, one.title]));
    const colour = new Map(accounts.map((one) => [one.title, accountColour(one.account)]));
    const list = ordered.map(([key, inside]) => ({ label: label(key), parts: [...inside].sort((a, b) => accountRank(a.account) - accountRank(b.account)).map((row) => ({ name: title.get(row.account) ?? row.account, value: amount(row) })) }));
    chart.element.querySelector("h3").textContent = { time: "GPU-hours", cost: `Money${over.currency ? `, ${over.currency}` : ""}`, energy: "Energy, kWh" }[unit] + (days === "1" ? " per hour" : " per day");
    chart.set(list, (name) => colour.get(name) ?? accountColour(name), words);
  }

  function rows(accounts) {
    if (!under) return;
    const sums = new Map();
    for (const row of under.rows) {
      const one = sums.get(row.key) ?? sums.set(row.key, { label: row.label || row.key, all: 0, us: 0, used: 0, wasted: 0, cost: 0, priced: true, parts: new Map() }).get(row.key);
      const group = accounts.find((account) => account.account === row.account)?.group;
      one.us += row.gpu_us; one.all += amount(row);
      if (group === "used") one.used += row.gpu_us;
      if (group === "wasted") one.wasted += row.gpu_us;
      if (row.cost === null || row.cost === undefined) one.priced = false; else one.cost += row.cost;
      one.parts.set(row.account, (one.parts.get(row.account) ?? 0) + row.gpu_us);
    }
    const total = [...sums.values()].reduce((sum, one) => sum + one.us, 0) || 1;
    const ordered = [...sums].sort((a, b) => b[1].us - a[1].us);
    const name = (key, one) => (by === "job" && key ? h("a", { href: `#/job/${key}`, "data-key": key }, one.label) : key ? one.label : "nobody's");
    const list = ordered.slice(0, ROWS_MAX).map(([key, one]) => h("tr", { "data-key": key }, h("td", {}, name(key, one)),
      h("td", { class: "num", "data-name": "GPU-hours" }, short(one.us / 3.6e9)), h("td", { class: "num", "data-name": "share" }, percent(one.us / total, 1)), h("td", { class: "num", "data-name": "of use" }, percent(one.used / (one.us || 1))), h("td", { class: "num", "data-name": "wasted" }, percent(one.wasted / (one.us || 1))), h("td", { class: "num", "data-name": "cost" }, one.priced ? short(one.cost) : "–"),
      h("td", {}, h("div", { class: "share", style: { height: "10px", "margin-top": "5px" }, role: "presentation" }, [...one.parts].sort((a, b) => accountRank(a[0]) - accountRank(b[0])).map(([account, us]) => h("i", { style: { width: `${(100 * us) / (one.us || 1)}%`, background: accountColour(account) } }))))));
    const sum = h("tr", {}, h("td", {}, h("b", {}, "Sum")), h("td", { class: "num", "data-name": "GPU-hours" }, h("b", {}, short(total / 3.6e9))), h("td", { class: "num", "data-name": "share" }, h("b", {}, percent(total / (under.capacity_gpu_us || total), 1))), h("td", {}), h("td", {}), h("td", {}), h("td", {}));
    replace(below, table([BYS.find(([key]) => key === by)[1], "num:GPU-hours", "num:Share", "num:Of use", "num:Wasted", `num:Cost${under.currency ? ` (${under.currency})` : ""}`, "Where it went"], [...list, sum]), ordered.length > ROWS_MAX ? h("p", { class: "dim small" }, `and ${whole(ordered.length - ROWS_MAX)} more; all of them: shoal report --by ${by} --csv`) : null);
  }

  const timer = setInterval(() => { if (!document.hidden) ask(); }, ASK_MS);
  window.addEventListener("shoal-theme", draw);
  ask();
  return () => { alive = false; clearInterval(timer); chart.stop(); window.removeEventListener("shoal-theme", draw); };
}
