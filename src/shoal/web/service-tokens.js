// What a service of a language model shows besides: tokens, times to and between them with their goals, and cost.

import { maybe, servicePath } from "./api.js";
import { lineChart } from "./chart-line.js";
import { hue } from "./colors.js";
import { css, fixed, h, money, percent, whole } from "./dom.js";
import { now } from "./live.js";
import { replace } from "./patch.js";

const COST_ASK_MS = 60_000;
const COST_OF_MS = 86_400_000;

export class Tokens {
  constructor(name) {
    this.name = name;
    this.rate = lineChart({ title: "Tokens", unit: "/s", height: 130 });
    this.first = lineChart({ title: "Time to first token", unit: "ms", height: 130 });
    this.between = lineChart({ title: "Time between tokens", unit: "ms", height: 130 });
    this.cached = lineChart({ title: "Cached prompts and goodput", unit: "%", height: 130 });
    this.charts = [this.rate, this.first, this.between, this.cached];
    this.facts = h("dl", { class: "facts" });
    this.help = h("div", {});
    this.element = h(
      "div",
      { class: "stack", "data-tokens": name },
      this.help,
      this.facts,
      h(
        "div",
        { class: "grid2" },
        this.charts.map((chart) => chart.element),
      ),
    );
    this.asked = 0;
  }

  /** @param {Api.ServiceSeries} series */
  async draw(series) {
    const path = servicePath(this.name);
    const [view, costs] = await Promise.all([maybe(path), this.costs()]);
    if (!view) return;
    const { goals } = view.spec;
    const accent = css("--accent");
    const third = hue(2);
    const kept = (name, times = 1) =>
      series[name]
        .map((value, at) => [series.at_ms[at], value === null ? null : value * times])
        .filter(([, value]) => value !== null);
    const ends = [series.at_ms[0], series.at_ms.at(-1)];
    const goal = (value) =>
      value ? [{ name: "goal", color: css("--bad"), dash: "2 4", points: ends.map((at) => [at, value]) }] : [];
    this.rate.set([
      { name: "prompt", color: accent, points: kept("prompt_per_s") },
      { name: "generated", color: third, points: kept("generated_per_s"), dash: "5 2" },
    ]);
    const times = (chart, what, wanted) =>
      chart.set([
        { name: "p50", color: accent, points: kept(`${what}_p50_ms`) },
        { name: "p99", color: third, points: kept(`${what}_p99_ms`), dash: "2 2" },
        ...goal(wanted),
      ]);
    times(this.first, "ttft", goals.ttft_ms);
    times(this.between, "itl", goals.itl_ms);
    const judged = goals.ttft_ms || goals.itl_ms;
    this.cached.set([
      { name: "cached", color: accent, points: kept("cached", 100) },
      ...(judged ? [{ name: "met the goals", color: third, points: kept("good", 100), dash: "5 2" }] : []),
      ...goal(judged ? goals.share_milli / 10 : 0),
    ]);
    this.show(view, costs);
  }

  /** @param {Api.ServiceView} view */
  show(view, costs) {
    const fact = (name, value, title = "") => h("div", { title }, h("dt", {}, name), h("dd", {}, value));
    const seen = view.tokens;
    const own = costs?.token_costs?.find((one) => one.service === this.name);
    const time = (ms) => (ms ? `${whole(ms)} ms` : "–");
    const each = (value) => (value === null || value === undefined ? "–" : money(value, costs.currency));
    replace(
      this.facts,
      seen ? fact("Prompts", `${whole(seen.prompt_per_s)} tokens/s`) : null,
      seen ? fact("Generated", `${whole(seen.generated_per_s)} tokens/s`) : null,
      seen ? fact("Cached", percent(seen.hit_milli / 1000)) : null,
      seen ? fact("First token (p99)", time(seen.ttft_p99_ms)) : null,
      seen ? fact("Between (p99)", time(seen.itl_p99_ms)) : null,
      own
        ? fact(
            "1M generated",
            each(own.per_million_generated),
            `The cost of its replicas over a day (${fixed(own.gpu_us / 3.6e9)} GPU-hours), by tokens generated`,
          )
        : null,
      own
        ? fact("1M computed", each(own.per_million_computed), "By tokens generated, and those of prompts not cached")
        : null,
    );
    replace(
      this.help,
      view.help?.length
        ? h(
            "div",
            { class: "problem" },
            h("p", {}, "What would help:"),
            h(
              "ul",
              {},
              view.help.map((text) => h("li", {}, text)),
            ),
          )
        : null,
    );
  }

  async costs() {
    if (now() - this.asked > COST_ASK_MS) {
      this.asked = now();
      const from = Math.max(0, Math.floor(now() - COST_OF_MS));
      this.ledger = await maybe(`/v1/ledger?by=service&from_ms=${from}`);
    }
    return this.ledger;
  }

  stop() {
    for (const chart of this.charts) chart.stop();
  }
}
