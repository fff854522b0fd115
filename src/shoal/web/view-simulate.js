// Replays the cluster's history under other policies, including one that is being edited.

import { get, post } from "./api.js";
import { h } from "./dom.js";
import { replace } from "./patch.js";
import { ASK_MS, draft, outcome } from "./replay.js";

export function mount(root) {
  const answer = h("div", { class: "stack", "aria-live": "polite" });
  const go = h("button", { class: "primary", type: "submit" }, "Replay");
  const stopper = h(
    "button",
    { type: "button", hidden: true, onclick: () => act(() => post("/v1/simulation/cancel")) },
    "Stop",
  );
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const asks = h("div", { class: "asks" });
  const days = h(
    "select",
    { name: "days" },
    [
      ["1", "Last 24 hours"],
      ["7", "Last 7 days"],
      ["30", "Last 30 days"],
      ["0", "All"],
    ].map(([value, label]) => h("option", { value, selected: value === "7" }, label)),
  );
  const load = h("input", { name: "load", type: "number", min: "0.1", max: "100", step: "0.1", value: "1" });
  const form = h(
    "form",
    { class: "card stack" },
    h("fieldset", { class: "plain-set" }, h("legend", { class: "dim small" }, "Policies"), asks),
    h(
      "div",
      { class: "row" },
      h("label", { class: "field" }, "History", days),
      h("label", { class: "field" }, "Load factor", load),
      h("span", { class: "push row" }, stopper, go),
    ),
    problem,
  );
  root.append(
    h(
      "div",
      { class: "stack" },
      h("h1", {}, "Simulate"),
      h(
        "p",
        { class: "dim" },
        "Replays this cluster's jobs through its scheduler in virtual time. Running jobs are not affected.",
      ),
      form,
      answer,
    ),
  );
  let alive = true;
  let timer = 0;
  /** @type {Api.SimulationView} */
  let view = null;
  let known = "";

  async function act(call) {
    problem.hidden = true;
    try {
      take(await call());
    } catch (error) {
      problem.hidden = false;
      problem.textContent = error.message;
    }
  }

  function take(next) {
    if (!alive) return;
    view = next;
    if (known !== view.policies.join()) {
      known = view.policies.join();
      const chosen = draft.policy ? ["current", "edited"] : (view.asked?.policies ?? ["current", "fifo"]);
      replace(
        asks,
        [
          ["current", `current (${view.current})`],
          ...(draft.policy ? [["edited", `edited (${draft.name})`]] : []),
          ...view.policies.map((name) => [name, name]),
        ].map(([value, label]) =>
          h(
            "label",
            {},
            h("input", { type: "checkbox", name: "policy", value, checked: chosen.includes(value) }),
            label,
          ),
        ),
      );
    }
    const running = view.state === "running";
    go.disabled = running;
    stopper.hidden = !running;
    replace(answer, outcome(view));
    clearTimeout(timer);
    if (running) timer = setTimeout(() => act(() => get("/v1/simulation")), ASK_MS);
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const policies = [...form.querySelectorAll("input[name=policy]:checked")].map((input) => input.value);
    if (!policies.length) {
      problem.hidden = false;
      problem.textContent = "Choose at least one policy.";
      return;
    }
    act(() =>
      post("/v1/simulation", {
        policies,
        days: Number(days.value),
        load: Number(load.value),
        ...(policies.includes("edited") ? { policy: draft.policy } : {}),
      }),
    );
  });
  act(() => get("/v1/simulation"));
  return () => {
    alive = false;
    clearTimeout(timer);
  };
}
