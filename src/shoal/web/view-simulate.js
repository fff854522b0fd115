// Replays the cluster's own history under other policies.

import { get, post } from "./api.js";
import { empty, h, percent, replace, short, span, whole } from "./dom.js";
import { now } from "./live.js";

const ASK_MS = 700;
const seconds = (value) => (value === null || value === undefined ? "–" : span(value * 1000));
const share = (value) => percent(value, 1);
// Name, value in the answer, format, and which direction is better.
const FIGURES = [
  ["Jobs", (one) => one.jobs, whole, 0], ["Failed", (one) => one.failed, whole, -1],
  ["Wait, mean", (one) => one.wait.mean_s, seconds, -1], ["Wait, median", (one) => one.wait.median_s, seconds, -1], ["Wait, p99", (one) => one.wait.p99_s, seconds, -1],
  ["Completion, mean", (one) => one.completion.mean_s, seconds, -1], ["Completion, p99", (one) => one.completion.p99_s, seconds, -1], ["Makespan", (one) => one.makespan_s, seconds, -1],
  ["Utilization", (one) => one.utilization, share, 1], ["Utilization with work", (one) => one.utilization_with_work, share, 1], ["Fragmentation", (one) => one.fragmentation, share, -1], ["Goodput", (one) => one.goodput, share, 1],
  ["Preemptions", (one) => one.preemptions, whole, 0], ["Fairness (Jain)", (one) => one.fairness, (value) => value.toFixed(3), 1],
];

export function mount(root) {
  const answer = h("div", { class: "stack", "aria-live": "polite" });
  const go = h("button", { class: "primary", type: "submit" }, "Replay");
  const stopper = h("button", { type: "button", hidden: true, onclick: () => act(() => post("/v1/simulation/cancel")) }, "Stop");
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const asks = h("div", { class: "asks" });
  const days = h("select", { name: "days" }, [["1", "last day"], ["7", "last 7 days"], ["30", "last 30 days"], ["0", "everything"]].map(([value, label]) => h("option", { value, selected: value === "7" }, label)));
  const load = h("input", { name: "load", type: "number", min: "0.1", max: "100", step: "0.1", value: "1" });
  const form = h("form", { class: "card stack" }, h("fieldset", { class: "plain-set" }, h("legend", { class: "dim small" }, "Policies to compare"), asks),
    h("div", { class: "row" }, h("label", { class: "field" }, "History", days), h("label", { class: "field" }, "Load factor", load), h("span", { class: "push row" }, stopper, go)), problem);
  root.append(h("div", { class: "stack" }, h("h1", {}, "Simulate"), h("p", { class: "dim" }, "Replays this cluster's own jobs through its scheduler in virtual time. Running jobs are not affected."), form, answer));
  let alive = true, timer = 0, view = null, known = "";

  async function act(call) {
    problem.hidden = true;
    try { take(await call()); } catch (error) { problem.hidden = false; problem.textContent = error.message; }
  }

  function take(next) {
    if (!alive) return;
    view = next;
    if (known !== view.policies.join()) {
      known = view.policies.join();
      const chosen = view.asked?.policies ?? ["current", "fifo"];
      replace(asks, [["current", `current (${view.current})`], ...view.policies.map((name) => [name, name])].map(([value, label]) => h("label", {}, h("input", { type: "checkbox", name: "policy", value, checked: chosen.includes(value) }), label)));
    }
    const running = view.state === "running";
    go.disabled = running;
    stopper.hidden = !running;
    draw(view, answer);
    clearTimeout(timer);
    if (running) timer = setTimeout(() => act(() => get("/v1/simulation")), ASK_MS);
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const policies = [...form.querySelectorAll("input[name=policy]:checked")].map((input) => input.value);
    if (!policies.length) { problem.hidden = false; problem.textContent = "Choose at least one policy."; return; }
    act(() => post("/v1/simulation", { policies, days: Number(days.value), load: Number(load.value) }));
  });
  act(() => get("/v1/simulation"));
  return () => { alive = false; clearTimeout(timer); };
}

function draw(view, answer) {
  if (view.state === "idle") { replace(answer, empty("Choose policies and replay, or run the same in a terminal:", "shoal sim --history --days 7 --policy fifo --policy fair")); return; }
  if (view.state === "running") { replace(answer, h("p", { class: "note" }, `replaying for ${span(now() - view.started_ms)}; the limit is 5 minutes`)); return; }
  if (view.state !== "done") { replace(answer, h("p", { class: view.state === "failed" ? "problem" : "note" }, view.problem)); return; }
  const { policies, nodes, gpus, skipped } = view.result, names = [...new Set(view.asked.policies)];
  const rows = FIGURES.map(([name, value, write, better]) => {
    const values = policies.map(value), texts = values.map((one) => (one === null || one === undefined ? "–" : write(one)));
    const best = better ? values.reduce((a, b) => (b * better > a * better ? b : a)) : null;
    const differ = new Set(texts).size > 1;
    return h("tr", {}, h("th", { scope: "row" }, name), texts.map((text, at) => h("td", { class: `num ${better && differ && values[at] === best ? "best" : ""}` }, text)));
  });
  replace(answer, h("section", { class: "card" }, h("p", { class: "dim small" }, `${whole(policies[0]?.jobs ?? 0)} jobs on ${whole(nodes)} nodes with ${whole(gpus)} GPUs, replayed in ${span(view.ended_ms - view.started_ms)}${skipped ? `; ${short(skipped)} that never ran are left out` : ""}. The best value of each row is marked.`),
    h("div", { class: "scroll" }, h("table", { class: "compare" }, h("thead", {}, h("tr", {}, h("td", {}), names.map((name) => h("th", { scope: "col", class: "num" }, name === "current" ? `current (${view.current})` : name)))), h("tbody", {}, rows)))));
}
