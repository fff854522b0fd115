// What limits a job's steps: a bar of shares with words, and the shares over time.

import { lineChart } from "./chart-line.js";
import { accountColor } from "./colors.js";
import { h, percent } from "./dom.js";
import { replace } from "./patch.js";

const PARTS = [
  ["compute", "Compute", "useful"],
  ["network", "Collectives", "checkpoint"],
  ["imbalance", "Waiting for slow members", "straggler"],
  ["input", "Waiting for data", "recompute"],
  ["storage", "Storage", "idle"],
];

export class Limits {
  /** `group`: of the charts that its curves belong to. */
  constructor(group) {
    this.words = h("div", { class: "stack" });
    this.chart = lineChart({ title: "Step time breakdown", unit: "%", group });
    this.element = h(
      "section",
      { class: "card stack", "aria-label": "Bottleneck", hidden: true },
      this.words,
      this.chart.element,
    );
  }

  /** `found`: the verdict of the running or the last attempt. */
  draw(found, members, attempt) {
    this.element.hidden = !found;
    if (!found) return;
    const parts = PARTS.map(([kind, name, account]) => ({
      name,
      color: accountColor(account),
      share: found.shares[`${kind}_milli`] / 1000,
    })).filter((part) => part.share > 0);
    replace(
      this.words,
      h("h2", {}, "Bottleneck"),
      h(
        "p",
        {},
        found.text,
        found.evidence.slice(1).map((text) => h("span", { class: "dim" }, `; ${text}`)),
      ),
      h(
        "div",
        {
          class: "share",
          role: "img",
          "aria-label": parts.map((part) => `${part.name} ${percent(part.share, 1)}`).join(", "),
        },
        parts.map((part) =>
          h("i", { title: part.name, style: { width: `${100 * part.share}%`, background: part.color } }),
        ),
      ),
      h(
        "div",
        { class: "legend row small" },
        parts.map((part) =>
          h(
            "span",
            { class: "key" },
            h("i", { class: "dot", style: { background: part.color } }),
            part.name,
            h("span", { class: "dim" }, ` ${percent(part.share, 1)}`),
          ),
        ),
      ),
    );
    this.chart.set(curves(members.filter((one) => one.attempt === attempt)));
  }

  stop() {
    this.chart.stop();
  }
}

/** Of the members' shares: the least wait of all is the collectives' part, the rest is waiting for late members. */
function curves(members) {
  const at = members[0]?.at_ms ?? [];
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const lines = { network: [], imbalance: [], input: [], storage: [] };
  at.forEach((ms, index) => {
    const known = members.filter((one) => typeof one.wait_share[index] === "number");
    if (!known.length) return;
    const waits = known.map((one) => one.wait_share[index]);
    const least = Math.min(...waits);
    lines.network.push([ms, 100 * least]);
    lines.imbalance.push([ms, 100 * (mean(waits) - least)]);
    lines.input.push([ms, 100 * mean(known.map((one) => one.data_share[index] ?? 0))]);
    lines.storage.push([ms, 100 * mean(known.map((one) => one.save_share[index] ?? 0))]);
  });
  return PARTS.filter(([kind]) => lines[kind]).map(([kind, name, account]) => ({
    name,
    color: accountColor(account),
    points: lines[kind],
  }));
}
