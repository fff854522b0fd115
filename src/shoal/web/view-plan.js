// Estimates a training run: how long, how much it costs, where the time goes. The cluster is not touched.

import { choose, chosen } from "./address.js";
import { get, post } from "./api.js";
import { empty, fixed, h, money, number, percent, plural, short, span, verdict, whole } from "./dom.js";
import { replace } from "./patch.js";

const PARTS = {
  matmul: "Matrix multiplication",
  attention: "Attention",
  moving: "Memory-bound kernels",
  recompute: "Recomputation",
  tensor: "Tensor parallel communication",
  context: "Context parallel communication",
  expert: "Expert routing",
  pipeline: "Pipeline communication",
  bubble: "Pipeline bubble",
  data: "Gradient and weight communication",
  optimizer: "Optimizer",
  other: "Gaps",
};
const time = (seconds) => span(seconds * 1000);
const count = (value) =>
  value >= 1e12 ? `${short(value / 1e12)}T` : value >= 1e9 ? `${short(value / 1e9)}B` : short(value);
const meter = (share) =>
  h("meter", { min: "0", max: "1", value: String(Math.max(0, Math.min(1, share))), "aria-hidden": "true" });

export function mount(root) {
  const answer = h("div", { class: "stack", "aria-live": "polite" });
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const go = h("button", { class: "primary", type: "submit" }, "Plan");
  const model = h("select", { name: "model" });
  const gpu = h("select", { name: "gpu" });
  const field = (label, name, value, title) =>
    h(
      "label",
      { class: "field", title },
      label,
      h("input", { name, value, maxlength: "40", size: "8", autocomplete: "off" }),
    );
  const form = h(
    "form",
    { class: "card stack" },
    h(
      "div",
      { class: "row" },
      h("label", { class: "field" }, "Model", model),
      field("Tokens", "tokens", chosen("tokens") || "2T"),
      h("label", { class: "field" }, "GPU", gpu),
      field("Nodes", "nodes", chosen("nodes"), "Leave empty for the fewest that fit"),
      field("Deadline", "deadline", chosen("deadline"), "Instead of nodes, e.g. 30d"),
      field("Budget", "budget", chosen("budget"), "Instead of nodes, e.g. 2M"),
      h("span", { class: "push row" }, go),
    ),
    problem,
  );
  root.append(
    h(
      "div",
      { class: "stack" },
      h("h1", {}, "Plan"),
      h("p", { class: "dim" }, "Estimates a training run. Nothing is started."),
      form,
      answer,
    ),
  );
  replace(
    answer,
    empty(
      "Choose a model and a size. The terminal also plans services, and clusters for your own history:",
      "shoal plan --model llama3-70b --tokens 2T --nodes 128",
    ),
  );
  let alive = true;
  const fail = (error) => {
    if (alive) {
      problem.hidden = false;
      problem.textContent = error.message;
    }
  };
  const options = (names, chosen) => names.map((name) => h("option", { value: name, selected: name === chosen }, name));
  get("/v1/plan")
    .then((known) => {
      replace(model, options(known.models, chosen("model") || "llama3-70b"));
      replace(gpu, options(known.gpus, chosen("gpu") || "h100"));
      if (alive && chosen("model")) form.requestSubmit(); // a link shows the same plan
    })
    .catch(fail);

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    problem.hidden = true;
    go.disabled = true;
    replace(answer, h("p", { class: "note" }, "Comparing layouts…"));
    try {
      const asked = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value).trim()]));
      for (const [name, value] of Object.entries(asked)) choose(name, value);
      const made = await post("/v1/plan", asked);
      if (alive) draw(made, answer);
    } catch (error) {
      replace(answer);
      fail(error);
    }
    go.disabled = false;
  });
  return () => {
    alive = false;
  };
}

/** Heads that begin with "num:" are columns of numbers; the first column names the row. */
const card = (caption, heads, rows) =>
  h(
    "section",
    { class: "card", "aria-label": caption },
    h("h2", {}, caption),
    h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      h(
        "table",
        { class: "compare" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            heads.map((head) =>
              h("th", { scope: "col", class: head.startsWith("num:") ? "num" : "" }, head.replace("num:", "")),
            ),
          ),
        ),
        h("tbody", {}, rows),
      ),
    ),
  );
const row = (name, ...cells) => h("tr", {}, h("th", { scope: "row" }, name), cells);
const words = (text) => h("td", {}, text);
const GIB = 2 ** 30;
const DAY_S = 86_400;

function draw(plan, answer) {
  const { best, faults, cost } = plan;
  // an estimate: three digits of it mean something
  const price = (value) => (value === null ? "Unknown" : money(Number(value.toPrecision(3)), cost.currency));
  const inDays = Math.min(...plan.sizes.map((one) => one.time_s)) > DAY_S;
  const unit = inDays ? "days" : "h";
  const long = (seconds) => fixed(seconds / (inDays ? DAY_S : 3600));
  const slowest = Math.max(...plan.sizes.map((one) => one.time_s));
  const dearest = Math.max(...plan.sizes.map((one) => one.money ?? 0), 1);
  const parts = Object.keys(PARTS)
    .map((name) => /** @type {[string, number]} */ ([name, plan.parts[name] / best.step_s]))
    .filter(([, share]) => share > 0.001)
    .sort((a, b) => b[1] - a[1]);
  const figure = (name, value, more, exact) =>
    h(
      "div",
      { class: "figure" },
      h("span", { class: "dim small" }, name),
      h("strong", { title: exact }, value),
      h("span", { class: "dim small" }, more),
    );
  const used = Object.values(best.memory).reduce((a, b) => a + b, 0);
  replace(
    answer,
    verdict(plan.verdict),
    plan.warning ? h("p", { class: "note" }, plan.warning) : null,
    h(
      "div",
      { class: "figures tall" },
      figure("Time to train", time(plan.time_s), `${count(plan.tokens)} tokens`, `${plan.time_s} s`),
      figure("Cost", price(cost.money), cost.price_source, cost.money === null ? null : String(cost.money)),
      figure("GPUs", whole(plan.gpus), `${plan.gpu} on ${plural(plan.nodes, "node")}`),
      figure("MFU", percent(best.mfu, 1), `${short(best.step_s)} s per step`),
      figure("Goodput", percent(faults.goodput, 1), `${fixed(faults.failures_per_day, 2)} failures per day`),
      figure(
        "Energy",
        cost.energy_kwh === null ? "–" : `${fixed(cost.energy_kwh / 1000)} MWh`,
        cost.co2_kg === null ? "" : `${fixed(cost.co2_kg / 1000)} t CO₂`,
      ),
    ),
    h("p", { class: "dim" }, `${plan.model}, ${plan.layout}`),
    h(
      "div",
      { class: "grid2 wide" },
      card(
        "Cluster size",
        ["Nodes", "num:GPUs", `num:Time (${unit})`, "", `num:Cost (${cost.currency})`, "", "num:MFU"],
        plan.sizes.map((one) =>
          h(
            "tr",
            { class: one.nodes === plan.nodes ? "chosen" : "" },
            h("th", { scope: "row" }, whole(one.nodes)),
            number(whole(one.gpus)),
            number(long(one.time_s), `${one.time_s} s`),
            words(meter(one.time_s / slowest)),
            number(one.money === null ? "–" : whole(one.money), one.money ?? undefined),
            words(meter((one.money ?? 0) / dearest)),
            number(percent(one.mfu)),
          ),
        ),
      ),
      card(
        "What limits it: 10 % more of…",
        ["Resource", "num:Speedup", ""],
        plan.limits.map((one) =>
          row(
            one.words.charAt(0).toUpperCase() + one.words.slice(1),
            number(`+${percent(Math.max(0, one.gain), 1)}`, one.gain),
            words(meter(one.gain * 10)),
          ),
        ),
      ),
      card(
        "Time per step",
        ["Part", "num:Share", ""],
        parts.map(([name, share]) => row(PARTS[name], number(percent(share, 1), share), words(meter(share)))),
      ),
      card(
        "Layouts, best first",
        ["Layout", "num:MFU", `num:Time (${unit})`],
        plan.layouts.map((one) =>
          row(one.layout, number(percent(one.mfu, 1), one.mfu), number(long(one.time_s), `${one.time_s} s`)),
        ),
      ),
    ),
    card(
      "Memory and checkpoints",
      ["", "num:Amount", "Unit", "Details"],
      [
        row(
          "GPU memory",
          number(whole(used / GIB), `${used} bytes`),
          words("GiB"),
          words(`of ${whole(plan.memory_room / GIB)} GiB on the fullest GPU`),
        ),
        row(
          "Checkpoint",
          number(fixed(faults.checkpoint_bytes / 1e9), faults.checkpoint_bytes),
          words("GB"),
          words(`best every ${time(faults.interval_s)}; takes ${time(faults.save_s)}`),
        ),
        row(
          "Storage",
          number(fixed(faults.storage_needed_bytes_per_s / 1e9, 2), faults.storage_needed_bytes_per_s),
          words("GB/s"),
          words("so that checkpoints cost at most 3 %"),
        ),
        row(
          "Network",
          number(fixed(plan.network_bytes_per_s / 1e9, 2), plan.network_bytes_per_s),
          words("GB/s"),
          words("per GPU to other nodes"),
        ),
        row(
          "Failures",
          number(fixed(faults.failures_per_day, 2)),
          words("per day"),
          words(`goodput ${percent(faults.goodput, 1)}`),
        ),
      ],
    ),
  );
}
