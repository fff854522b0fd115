// A policy being edited: as a form or as text, compared with the one in force, replayed, applied.

import { choose } from "./address.js";
import { get, post, put } from "./api.js";
import { confirm } from "./dialog.js";
import { h, plural, whole } from "./dom.js";
import { choice } from "./ledger-table.js";
import { replace } from "./patch.js";
import { ASK_MS, draft, outcome } from "./replay.js";
import { table } from "./table.js";

const TENANTS_MAX = 50; // with inputs; the others are edited as text
const asWritten = (field, text) =>
  field.kind === "count" && /^-?\d+(\.\d+)?$/.test(text.trim())
    ? Number(text)
    : field.kind === "flag"
      ? text === "true"
      : text.trim();

function input(field, value, name, label) {
  const props = { name, value, "aria-label": label, "data-was": value };
  if (field.kind === "choice" || field.kind === "flag") {
    const all = field.kind === "flag" ? ["true", "false"] : field.choices;
    return h(
      "select",
      { name, "aria-label": label, "data-was": value },
      all.map((one) => h("option", { value: one, selected: one === value }, one)),
    );
  }
  if (field.kind === "count") return h("input", { ...props, type: "number", step: "any" });
  return field.choices.length
    ? [
        h("input", { ...props, list: `list-${name}` }),
        h(
          "datalist",
          { id: `list-${name}` },
          field.choices.map((one) => h("option", { value: one })),
        ),
      ]
    : h("input", { ...props });
}

/**
 * `form`: the policy in force as the server describes it; `text`: instead of it, another one to begin with.
 * @param {Api.PolicyForm} form
 */
export function editor(form, { text = null, done }) {
  let mode = text === null ? "form" : "text";
  /** @type {Api.PolicyDiff & { edited?: any }} */
  let diff = null;
  /** @type {Api.SimulationView} */
  let replayed = null;
  let timer = 0;
  let alive = true;
  const away = new AbortController();
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const body = h("div", { class: "stack" });
  const below = h("div", { class: "stack" });
  const days = h(
    "select",
    { name: "days", "aria-label": "History to replay" },
    [
      ["1", "last day"],
      ["7", "last 7 days"],
      ["30", "last 30 days"],
      ["0", "everything"],
    ].map(([value, label]) => h("option", { value, selected: value === "7" }, label)),
  );
  const fail = (error) => {
    if (alive) {
      problem.hidden = !error;
      problem.textContent = error?.message ?? "";
    }
  };
  const element = h(
    "form",
    {
      class: "card stack policy-edit",
      "aria-label": "Edit policy",
      onsubmit: (event) => {
        event.preventDefault();
        compare();
      },
      oninput: (event) => {
        if (!below.contains(event.target) && diff) {
          diff = replayed = null;
          show();
        }
      },
    },
    h(
      "div",
      { class: "row" },
      h("h2", {}, "Edit"),
      choice(
        "as",
        [
          ["form", "Form"],
          ["text", "Text"],
        ],
        mode,
        swap,
      ),
      h(
        "span",
        { class: "push row" },
        h("button", { type: "button", onclick: () => leave() }, "Cancel editing"),
        h("button", { class: "primary", type: "submit" }, "Compare"),
      ),
    ),
    body,
    problem,
    below,
  );

  function leave(applied = false) {
    Object.assign(draft, { policy: null, version: "", name: "", text: "" });
    done(applied);
  }

  // -- the two ways to edit ------------------------------------------------------------------
  function fields(all) {
    return h(
      "div",
      { class: "policy-fields" },
      all.map((field) =>
        h(
          "label",
          { class: "field" },
          h("b", {}, field.name),
          input(field, field.value, field.name, field.name),
          h("span", {}, `${field.about}${field.usual !== field.value ? ` (default ${field.usual})` : ""}`),
        ),
      ),
    );
  }

  function tenantRow(tenant, fresh = false) {
    const cell = (field) =>
      h(
        "td",
        { "data-name": field.name },
        input(
          field,
          String(fresh ? field.usual : tenant[field.name]),
          field.name,
          `${field.name} of ${tenant.name || "the new tenant"}`,
        ),
      );
    const gone = h("input", {
      type: "checkbox",
      name: "gone",
      "aria-label": `Remove ${tenant.name || "the new tenant"}`,
    });
    return h(
      "tr",
      { "data-tenant": tenant.name, "data-fresh": fresh },
      h(
        "td",
        {},
        fresh
          ? h("input", { name: "tenant", required: true, maxlength: "63", "aria-label": "Name of the new tenant" })
          : h("b", {}, tenant.name),
      ),
      form.tenant_fields.map(cell),
      h("td", { "data-name": "remove" }, gone),
    );
  }

  function asForm() {
    const tenants = form.policy.tenants;
    const left = tenants.length - TENANTS_MAX;
    const list = table(
      ["Tenant", ...form.tenant_fields.map((field) => field.name), "Remove"],
      tenants.slice(0, TENANTS_MAX).map((one) => tenantRow(one)),
    );
    list.classList.add("tenants");
    for (const [at, field] of form.tenant_fields.entries()) list.querySelectorAll("th")[at + 1].title = field.about;
    return [
      fields(form.fields.filter((field) => field.common)),
      h("details", {}, h("summary", {}, "All other fields"), fields(form.fields.filter((field) => !field.common))),
      h("h3", {}, "Tenants: quotas, weights, budgets and caps"),
      h("div", { class: "scroll" }, list),
      h(
        "details",
        { class: "small dim" },
        h("summary", {}, "Field reference"),
        h(
          "dl",
          {},
          form.tenant_fields.map((field) => [h("dt", {}, field.name), h("dd", {}, field.about)]),
        ),
      ),
      left > 0 ? h("p", { class: "dim small" }, `${whole(left)} more tenants: edit as text`) : null,
      h(
        "div",
        {},
        h(
          "button",
          {
            type: "button",
            onclick: () => {
              list.tBodies[0].append(tenantRow({ name: "" }, true));
              list.querySelector("tr:last-child input").focus();
            },
          },
          "Add tenant",
        ),
      ),
    ];
  }

  function asText(written) {
    return [
      h(
        "label",
        { class: "field" },
        "Format",
        h(
          "select",
          { name: "ending" },
          ["yaml", "json", "toml"].map((one) => h("option", { value: one }, one.toUpperCase())),
        ),
      ),
      h("textarea", {
        name: "text",
        class: "mono",
        rows: "24",
        spellcheck: "false",
        "aria-label": "The policy as text",
        value: written,
      }),
      h(
        "p",
        { class: "dim small" },
        "As for ",
        h("code", {}, "shoal policy set FILE"),
        ": omitted fields have the values of its base (default: fair).",
      ),
    ];
  }

  function swap(value) {
    const before = body.querySelector("[name=text]")?.value ?? diff?.text ?? text ?? form.text;
    mode = value;
    diff = replayed = null;
    body.replaceChildren(...(mode === "form" ? asForm() : asText(before)).filter(Boolean));
    show();
  }

  function changed(root, known) {
    const found = {};
    for (const one of root.querySelectorAll("[data-was]")) {
      const field = known.find((all) => all.name === one.name);
      if (field && one.value !== one.dataset.was) found[one.name] = asWritten(field, one.value);
    }
    return found;
  }

  function written() {
    if (mode === "text")
      return { text: body.querySelector("[name=text]").value, ending: body.querySelector("[name=ending]").value };
    const changes = {};
    const tenants = {};
    for (const part of body.querySelectorAll(".policy-fields")) Object.assign(changes, changed(part, form.fields));
    for (const row of body.querySelectorAll("tr[data-tenant]")) {
      const fresh = row.dataset.fresh !== undefined;
      const name = fresh ? row.querySelector("[name=tenant]").value.trim() : row.dataset.tenant;
      const about = changed(row, form.tenant_fields);
      if (row.querySelector("[name=gone]").checked) {
        if (!fresh) tenants[name] = null;
      } else if (fresh || Object.keys(about).length) tenants[name] = about;
    }
    return { changes: Object.keys(tenants).length ? { ...changes, tenants } : changes };
  }

  // -- compare, replay, apply ----------------------------------------------------------------
  async function compare() {
    fail(null);
    diff = replayed = null; // what was compared before must not be applied meanwhile
    show();
    try {
      diff = await post("/v1/policy/draft", written());
    } catch (error) {
      fail(error);
    }
    if (!alive) return;
    if (diff?.changes.length)
      Object.assign(draft, { policy: diff.policy, version: diff.version, name: diff.policy.name, text: diff.text });
    show();
    if (diff) below.querySelector("h3")?.scrollIntoView({ block: "nearest" });
  }

  async function replay(call) {
    fail(null);
    try {
      replayed = await call();
    } catch (error) {
      fail(error);
    }
    if (!alive) return;
    clearTimeout(timer);
    if (replayed?.state === "running")
      timer = setTimeout(() => replay(() => get("/v1/simulation", { signal: away.signal })), ASK_MS);
    show();
  }

  function apply() {
    const wanted = diff;
    confirm({
      title: "Apply policy",
      text:
        `${plural(wanted.changes.length + wanted.left_out, "value")} will change for everyone at once. ` +
        `Running jobs continue.`,
      verb: "Apply",
      act: async () => {
        try {
          await put(`/v1/policy?expected=${wanted.expected}`, wanted.policy);
        } catch (error) {
          if (error.status === 409) {
            fail(new Error("Not applied: someone else changed the policy. Compare again to see both."));
            diff = null;
            show();
          }
          throw error;
        }
        return { note: "Policy applied" };
      },
    }).then((applied) => {
      if (applied && alive) leave(true);
    });
  }

  function show() {
    if (!diff) {
      replace(below);
      return;
    }
    if (!diff.changes.length) {
      replace(below, h("p", { class: "note" }, "No differences from the current policy."));
      return;
    }
    const mine = replayed?.edited === diff.version;
    const over = mine && replayed.state === "done";
    const rows = diff.changes.map((one) =>
      h(
        "tr",
        { "data-key": one.field, "data-field": one.field },
        h("td", {}, h("b", {}, one.field), one.about ? h("div", { class: "dim small" }, one.about) : null),
        h("td", { class: "mono old", "data-name": "now" }, one.before || "–"),
        h("td", { class: "mono new", "data-name": "edited" }, one.after || "–"),
      ),
    );
    replace(
      below,
      h("h3", {}, `Changes: ${plural(diff.changes.length + diff.left_out, "value")}`),
      table(["Field", "Now", "Edited"], rows),
      diff.left_out ? h("p", { class: "dim small" }, `and ${whole(diff.left_out)} more`) : null,
      h(
        "div",
        { class: "row" },
        days,
        h(
          "button",
          {
            type: "button",
            class: over ? "" : "primary",
            disabled: mine && replayed.state === "running",
            onclick: () =>
              replay(() =>
                post("/v1/simulation", {
                  policies: ["current", "edited"],
                  days: Number(days.value),
                  policy: diff.policy,
                }),
              ),
          },
          over ? "Simulate again" : "Simulate first",
        ),
        over
          ? h("button", { type: "button", class: "primary", onclick: apply }, "Apply")
          : h("button", { type: "button", class: "danger", onclick: apply }, "Apply without simulating"),
      ),
      mine
        ? outcome(replayed)
        : replayed?.state === "running"
          ? h("p", { class: "note" }, "Another simulation is running. Try again when it has finished.")
          : null,
    );
  }

  swap(mode);
  choose("edit", "yes");
  return {
    element,
    stop: () => {
      alive = false;
      clearTimeout(timer);
      away.abort();
      choose("edit", "");
    },
  };
}
