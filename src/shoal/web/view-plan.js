// Plans a training run: how long, how much money, where the time goes. Nothing of it touches the cluster.

import { get, post } from "./api.js";
import { bytes, empty, h, percent, short, span, whole } from "./dom.js";
import { replace } from "./patch.js";

const GIB = 2 ** 30;
const PARTS = {
  matmul: "matrix products",
  attention: "attention",
  moving: "kernels bound by memory",
  recompute: "recomputation",
  tensor: "tensor groups",
  context: "context groups",
  expert: "tokens to experts",
  pipeline: "between stages",
  bubble: "pipeline bubble",
  data: "gradients and weights",
  optimizer: "optimizer",
  other: "gaps",
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
      field("Tokens", "tokens", "2T"),
      h("label", { class: "field" }, "GPU", gpu),
      field("Nodes", "nodes", "", "Empty: the least that fits"),
      field("Deadline", "deadline", "", "Instead of nodes, e.g. 30d"),
      field("Budget", "budget", "", "Instead of nodes, e.g. 2M"),
      h("span", { class: "push row" }, go),
    ),
    problem,
  );
  root.append(
    h(
      "div",
      { class: "stack" },
      h("h1", {}, "Plan"),
      h("p", { class: "dim" }, "Estimates a training run from formulas. Nothing is started."),
      form,
      answer,
    ),
  );
  replace(
    answer,
    empty(
      "Choose a model, or run the same in a terminal, where services and your own history can be planned, too:",
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
      replace(model, options(known.models, "llama3-70b"));
      replace(gpu, options(known.gpus, "h100"));
    })
    .catch(fail);

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    problem.hidden = true;
    go.disabled = true;
    replace(answer, h("p", { class: "note" }, "comparing layouts"));
    try {
      const made = await post(
        "/v1/plan",
        Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value).trim()])),
      );
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

const table = (caption, heads, rows) =>
  h(
    "section",
    { class: "card" },
    h("h2", {}, caption),
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { class: "compare" },
        heads.length
          ? h(
              "thead",
              {},
              h(
                "tr",
                {},
                heads.map((head, at) => h("th", { scope: "col", class: at ? "num" : "" }, head)),
              ),
            )
          : null,
        h(
          "tbody",
          {},
          rows.map(([name, ...cells]) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, name),
              cells.map((cell) => h("td", { class: "num" }, cell)),
            ),
          ),
        ),
      ),
    ),
  );

function draw(plan, answer) {
  const { best, faults, cost } = plan;
  const money = (value) => (value === null ? "unknown" : `${whole(value)} ${cost.currency}`);
  const slowest = Math.max(...plan.sizes.map((one) => one.time_s));
  const dearest = Math.max(...plan.sizes.map((one) => one.money ?? 0), 1);
  const parts = Object.keys(PARTS)
    .map((name) => /** @type {[string, number]} */ ([name, plan.parts[name] / best.step_s]))
    .filter(([, share]) => share > 0.001)
    .sort((a, b) => b[1] - a[1]);
  replace(
    answer,
    table(
      `${plan.model}: ${count(plan.tokens)} tokens on ${whole(plan.nodes)} nodes with ${whole(plan.gpus)} x ` +
        `${plan.gpu}`,
      [],
      [
        ["Time to train", time(plan.time_s)],
        ["Cost", `${money(cost.money)} (${cost.price_source})`],
        ["Layout", plan.layout],
        ["MFU", percent(best.mfu, 1)],
        ["Step", `${short(best.step_s)} s`],
        [
          "Memory",
          `${whole(Object.values(best.memory).reduce((a, b) => a + b, 0) / GIB)} of ` +
            `${whole(plan.memory_room / GIB)} GiB`,
        ],
        ["Failures", `${short(faults.failures_per_day)} a day`],
        ["Checkpoint", `${bytes(faults.checkpoint_bytes)}, best every ${time(faults.interval_s)}`],
        ["Goodput", percent(faults.goodput, 1)],
        [
          "Energy",
          cost.energy_kwh === null
            ? "unknown"
            : `${whole(cost.energy_kwh / 1000)} MWh, ${whole((cost.co2_kg ?? 0) / 1000)} t CO2`,
        ],
      ],
    ),
    table(
      "Where the step goes",
      ["Part", "Share", ""],
      parts.map(([name, share]) => [PARTS[name], percent(share, 1), meter(share)]),
    ),
    table(
      "Time and cost against size",
      ["Nodes", "Time", "", "Cost", "", "MFU"],
      plan.sizes.map((one) => [
        whole(one.nodes),
        time(one.time_s),
        meter(one.time_s / slowest),
        money(one.money),
        meter((one.money ?? 0) / dearest),
        percent(one.mfu, 0),
      ]),
    ),
    table(
      "Layouts, best first",
      ["Layout", "MFU", "Time"],
      plan.layouts.map((one) => [one.layout, percent(one.mfu, 1), time(one.time_s)]),
    ),
    table(
      "10% more of one thing",
      ["What", "Speed", ""],
      plan.limits.map((one) => [one.words, `+${percent(Math.max(0, one.gain), 1)}`, meter(one.gain * 10)]),
    ),
  );
}
