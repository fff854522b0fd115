// The services: their requests, latency and replicas, and how to use them.

import { serviceActions } from "./actions.js";
import { maybe, servicePath } from "./api.js";
import { lineChart } from "./chart-line.js";
import { hue } from "./colors.js";
import { chip, css, empty, fixed, h, jobName, number, plural, throttled, whole } from "./dom.js";
import { followButton } from "./follow.js";
import { cluster, jobOf, listen, now } from "./live.js";
import { replace } from "./patch.js";
import { Use } from "./service-use.js";
import { table } from "./table.js";

const ASK_MS = 3000;
const HEARD_MAX = 600;

export function mount(root) {
  const nothing = h("div", {});
  const list = h("div", { class: "stack" });
  root.append(h("div", { class: "stack" }, h("h1", {}, "Services"), nothing, list));
  const cards = new Map();
  let alive = true;

  const update = throttled(250, () => {
    replace(
      nothing,
      cluster.services.size
        ? null
        : empty(
            "No services yet. To serve a command behind one URL:",
            "shoal serve chat --replicas 1..8 -g 1 -- python server.py",
          ),
    );
    for (const service of cluster.services.values()) {
      if (!cards.has(service.name)) {
        const card = new Card(service.name);
        cards.set(service.name, card);
        list.append(card.element);
        card.ask();
      }
      cards.get(service.name).show(service);
    }
    for (const [name, card] of cards)
      if (!cluster.services.has(name)) {
        card.stop();
        card.element.remove();
        cards.delete(name);
      }
  });
  const stop = listen(update);
  const timer = setInterval(() => {
    if (!document.hidden && alive) for (const card of cards.values()) card.ask();
  }, ASK_MS);
  update();
  return () => {
    alive = false;
    stop();
    update.stop();
    clearInterval(timer);
    for (const card of cards.values()) card.stop();
  };
}

// A gang's members by rank; the first one answers.
function nodesOf(one) {
  if (!one.nodes?.length) return one.node ?? "–";
  const members = one.nodes.map((node, rank) => `Member ${rank} on ${node}${rank ? "" : " (serves requests)"}`);
  return h(
    "span",
    { title: members.join("\n") },
    one.nodes.join(", "),
    h("span", { class: "dim small" }, ` (${plural(one.nodes.length, "member")})`),
  );
}

class Card {
  constructor(name) {
    this.name = name;
    this.rps = lineChart({ title: "Requests", unit: "/s", height: 130 });
    this.latency = lineChart({ title: "Time to first byte", unit: "ms", height: 130 });
    this.work = lineChart({ title: "In flight and queued", height: 130 });
    this.size = lineChart({ title: "Replicas", height: 130 });
    this.top = h("div", { class: "stack" });
    this.below = h("div", {});
    this.more = h("div", {});
    this.sites = h("div", {});
    this.use = new Use(name);
    this.element = h(
      "section",
      { class: "card stack service", "data-service": name, "aria-label": `Service ${name}` },
      this.top,
      h("div", { class: "grid2" }, this.rps.element, this.latency.element, this.work.element, this.size.element),
      this.more,
      this.below,
      this.sites,
      this.use.element,
    );
    this.star = followButton("service", name);
    this.heard = [];
    this.kept = false;
    /** @type {import("./service-tokens.js").Tokens | null} */
    this.tokens = null;
  }

  show(service) {
    const last = this.heard.at(-1);
    if (!last || now() - last.at > 900)
      this.heard.push({
        at: now(),
        rps: service.rps ?? 0,
        ms: service.response_ms ?? 0,
        flight: service.in_flight ?? 0,
        queued: service.queued ?? 0,
        ready: service.ready ?? 0,
        wanted: service.wanted ?? 0,
      });
    if (this.heard.length > HEARD_MAX) this.heard.shift();
    const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
    replace(
      this.top,
      h(
        "div",
        { class: "row" },
        h("h2", {}, this.name),
        chip(service.state),
        h("span", { class: "dim small" }, `Version ${service.version ?? 1}`),
        this.star,
        h("span", { class: "push row" }, serviceActions(service)),
      ),
      service.why ? h("p", { class: "why dim" }, service.why) : null,
      h(
        "dl",
        { class: "facts" },
        fact("Requests", `${fixed(service.rps ?? 0)} /s`),
        fact("Errors", `${fixed(service.failed_per_s ?? 0)} /s`),
        fact("Latency", `${whole(service.response_ms ?? 0)} ms`),
        fact("In flight", whole(service.in_flight ?? 0)),
        fact("Queued", whole(service.queued ?? 0)),
        fact("Ready", `${whole(service.ready ?? 0)} of ${plural(service.wanted ?? 0, "replica")}`),
        fact("Limits", `${whole(service.least ?? 0)} to ${whole(service.most ?? 0)}`),
      ),
    );
    const rows = (service.replicas ?? []).map((one) =>
      h(
        "tr",
        { "data-key": one.job },
        h(
          "td",
          {},
          h("a", { href: `#/job/${one.job}`, "data-key": one.job }, jobName(jobOf(one.job) ?? { id: one.job })),
        ),
        h("td", {}, chip(one.state)),
        h("td", { "data-name": "Node" }, nodesOf(one)),
        number(whole(one.version ?? 1), undefined, { "data-name": "Version" }),
        number(whole(one.in_flight ?? 0), undefined, { "data-name": "In flight" }),
        number(fixed(one.rps ?? 0), one.rps ?? 0, { "data-name": "Requests/s" }),
        number(whole(one.response_ms ?? 0), undefined, { "data-name": "Latency (ms)" }),
      ),
    );
    const sites = (service.sites ?? []).map((one) =>
      h(
        "tr",
        { "data-key": one.name },
        h("td", {}, h("a", { href: "#/neighbors" }, one.name)),
        h("td", {}, chip(one.state || "unknown")),
        number(whole(one.version ?? 0), undefined, { "data-name": "Version" }),
        number(whole(one.replicas ?? 0), undefined, { "data-name": "Ready" }),
      ),
    );
    replace(this.sites, sites.length ? table(["Cluster", "State", "num:Version", "num:Ready"], sites) : null);
    replace(
      this.below,
      rows.length
        ? table(
            ["Replica", "State", "Node", "num:Version", "num:In flight", "num:Requests/s", "num:Latency (ms)"],
            rows,
          )
        : h("p", { class: "dim" }, "No replicas. The first request starts one."),
    );
    if (!this.kept) this.draw(null);
    this.use.show(service);
  }

  async ask() {
    try {
      if (!cluster.services.has(this.name)) return; // it has just gone
      const series = await maybe(`${servicePath(this.name)}/series`);
      this.kept = Boolean(series?.at_ms?.length);
      if (this.kept) this.draw(series);
      if (series?.prompt_per_s?.length) {
        if (!this.tokens) {
          const { Tokens } = await import("./service-tokens.js");
          this.tokens ??= new Tokens(this.name);
          replace(this.more, this.tokens.element);
        }
        await this.tokens.draw(series);
      }
    } catch {
      /* the stream's figures are drawn meanwhile */
    }
  }

  draw(series) {
    const accent = css("--accent");
    const second = hue(4);
    const third = hue(2);
    const kept = (name) =>
      (series?.[name] ?? []).map((value, at) => [series.at_ms[at], value]).filter(([, value]) => value !== null);
    const own = (name) => this.heard.map((one) => [one.at, one[name]]);
    const of = (name, other) => (series ? kept(name) : own(other));
    this.rps.set([
      { name: series ? "answered" : "", color: accent, points: of("requests_per_s", "rps") },
      ...(series ? [{ name: "failed", color: css("--bad"), points: kept("failed_per_s") }] : []),
    ]);
    const spread = series && kept("p50_ms").length;
    this.latency.set(
      spread
        ? [
            { name: "p50", color: accent, points: kept("p50_ms") },
            { name: "p95", color: second, points: kept("p95_ms"), dash: "5 2" },
            { name: "p99", color: third, points: kept("p99_ms"), dash: "2 2" },
          ]
        : [{ name: "mean", color: accent, points: of("response_ms", "ms") }],
    );
    this.work.set([
      { name: "in flight", color: accent, points: of("in_flight", "flight") },
      { name: "queued", color: third, points: of("queued", "queued"), dash: "2 2" },
    ]);
    this.size.set([
      { name: "ready", color: accent, points: of("ready", "ready") },
      { name: "wanted", color: css("--ink-3"), points: of("wanted", "wanted"), dash: "2 2" },
    ]);
  }

  stop() {
    this.star.stop();
    this.use.stop();
    this.tokens?.stop();
    for (const chart of [this.rps, this.latency, this.work, this.size]) chart.stop();
  }
}
