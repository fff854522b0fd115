// The elements of an array: how many are in which state, and a list of those of one state.

import { choose, chosen } from "./address.js";
import { get } from "./api.js";
import { ago, chip, h, plural, span, whole } from "./dom.js";
import { now } from "./live.js";
import { replace } from "./patch.js";
import { table } from "./table.js";

const PAGE = 50;
const LIMIT_MAX = 10_000;
// What is shown of the counts, the states that they stand for, and the chip's look.
const KINDS = [
  ["failed", "failed", "failed"],
  ["timed_out", "timed-out", "timed-out"],
  ["running", "running,starting,stopping,dozing,asleep,waking", "running"],
  ["waiting", "waiting", "waiting"],
  ["cancelled", "cancelled", "cancelled"],
  ["succeeded", "succeeded", "succeeded"],
];

export class Elements {
  constructor(id) {
    this.id = id;
    this.limit = PAGE;
    this.asked = 0;
    this.counts = h("div", { class: "row" });
    this.list = h("div", {});
    this.element = h(
      "section",
      { class: "card stack", "aria-label": "Elements", hidden: true },
      this.counts,
      this.list,
    );
  }

  /** Which of the kinds the address names; all of them if none. */
  kind() {
    return KINDS.find(([name]) => name === chosen("elements"));
  }

  pick(name) {
    choose("elements", name);
    this.limit = PAGE;
    this.draw(this.job);
  }

  async draw(job) {
    this.job = job;
    this.element.hidden = !job.array;
    if (!job.array) return;
    const counts = job.array;
    const asked = ++this.asked;
    const kind = this.kind();
    const button = (name, count, label, look) =>
      h(
        "button",
        {
          class: "filter",
          "data-key": name || "all",
          "aria-pressed": String((kind?.[0] ?? "") === name),
          onclick: () => this.pick(name),
        },
        look ? chip(look, `${whole(count)} ${label}`) : `all ${whole(count)}`,
      );
    replace(
      this.counts,
      h("h2", {}, "Elements"),
      button("", counts.elements),
      KINDS.filter(([name]) => counts[name] || name === kind?.[0]).map(([name, , look]) =>
        button(name, counts[name], look, look),
      ),
      counts.pending
        ? h(
            "span",
            { class: "dim small" },
            `${whole(counts.pending)} to come${counts.at_most ? `, at most ${counts.at_most} at a time` : ""}`,
          )
        : null,
    );
    const states = kind ? `&state=${kind[1]}` : "";
    let parts;
    try {
      parts = this.rows(
        await get(`/v1/jobs?array=${encodeURIComponent(this.id)}&finished=true&limit=${this.limit}${states}`),
      );
    } catch (error) {
      parts = [h("p", { class: "problem" }, error.message)];
    }
    if (asked === this.asked) replace(this.list, ...parts);
  }

  rows(found) {
    if (!found.length)
      return [h("p", { class: "dim" }, this.kind() ? "No elements are in this state." : "No element has begun.")];
    const lines = found.map((row) =>
      h(
        "tr",
        { "data-key": row.id, "data-job": row.id },
        h("td", {}, h("a", { href: `#/job/${row.id}` }, row.id)),
        h("td", {}, chip(row.state)),
        h("td", { class: "dim" }, row.why),
        h("td", { class: "dim small" }, row.nodes.slice(0, 4).join(", ")),
        h(
          "td",
          { class: "num", "data-name": "ran" },
          row.running_ms ? span((row.finished_ms ?? now()) - row.running_ms) : "–",
        ),
        h("td", { class: "num", "data-name": "ended" }, row.finished_ms ? ago(row.finished_ms, now()) : "–"),
      ),
    );
    const full = found.length === this.limit && this.limit < LIMIT_MAX;
    return [
      table(["Element", "", "Why", "Nodes", "num:Ran", "num:Ended"], lines),
      full
        ? h(
            "button",
            {
              class: "more",
              onclick: () => {
                this.limit = Math.min(LIMIT_MAX, this.limit * 2);
                this.draw(this.job);
              },
            },
            `Show ${plural(this.limit, "more element")}`,
          )
        : null,
    ];
  }
}
