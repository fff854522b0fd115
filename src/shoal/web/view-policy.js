// The policy in force: what its values mean, its tenants and budgets, earlier ones; admins edit it.

import { chosen } from "./address.js";
import { get, isAdmin, maybe, me } from "./api.js";
import { budgets, gauge, toTenant } from "./budgets.js";
import { offer } from "./commands.js";
import { h, moment, plural, whole } from "./dom.js";
import { now } from "./live.js";
import { replace } from "./patch.js";
import { editor } from "./policy-edit.js";
import { draft } from "./replay.js";
import { table } from "./table.js";

const ASK_MS = 10_000;
const TENANTS_MAX = 200;
const CHANGES_MAX = 4;
const seesAll = () => isAdmin() || me.tenant === "*";

export function mount(root) {
  const away = new AbortController();
  const signal = away.signal;
  /** @type {Api.PolicyForm} */
  let form = null;
  let edit = null;
  let opened = null;
  const about = h("span", { class: "dim" });
  const actions = h("span", { class: "push row" });
  const notice = h("div", {});
  const money = h("section", { class: "card stack", "aria-label": "Budgets", hidden: true });
  const place = h("div", {});
  const tenants = h("section", { class: "card", "aria-label": "Tenants" });
  const rules = h("section", { class: "card stack", "aria-label": "Rules" });
  const past = h("section", { class: "card stack", "aria-label": "Earlier policies", hidden: true });
  const look = h("div", {});
  root.append(
    h(
      "div",
      { class: "stack" },
      h("div", { class: "row" }, h("h1", {}, "Policy"), about, actions),
      notice,
      place,
      money,
      tenants,
      rules,
      past,
    ),
  );

  // One that is open stays open when the rest is drawn again.
  const fold = (key, title, ...inside) =>
    h(
      "details",
      { "data-key": key, open: root.querySelector(`details[data-key=${key}]`)?.open },
      h("summary", {}, title),
      inside,
    );

  async function ask() {
    try {
      const [found, own, records] = await Promise.all([
        get("/v1/policy/form", { signal }),
        budgets(),
        seesAll() ? maybe("/v1/policy/history", { signal }) : [],
      ]);
      if (signal.aborted) return;
      const before = form;
      form = found;
      replace(
        notice,
        edit && before && before.version !== form.version
          ? h(
              "p",
              { class: "note", role: "status" },
              "Somebody has changed the policy since you began to edit. Compare shows your edit beside the new one.",
            )
          : draftNote(),
      );
      show(own, records ?? []);
      if (!before && chosen("edit") && isAdmin()) begin();
    } catch (error) {
      if (!signal.aborted) replace(notice, h("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  const draftNote = () =>
    !edit && draft.policy && isAdmin()
      ? h(
          "div",
          { class: "note row" },
          "You have a draft that is not applied.",
          h("button", { onclick: () => begin(draft.text) }, "Go on editing"),
          h(
            "button",
            {
              onclick: () => {
                draft.policy = null;
                ask();
              },
            },
            "Discard it",
          ),
        )
      : null;

  function begin(text = null) {
    edit?.stop();
    edit = editor(form, { text, done: end });
    place.replaceChildren(edit.element);
    replace(notice);
    buttons();
    edit.element.scrollIntoView({ block: "start" });
    edit.element.querySelector("input, select, textarea").focus({ preventScroll: true });
  }
  function end() {
    edit?.stop();
    edit = null;
    place.replaceChildren();
    buttons();
    ask();
  }
  const buttons = () =>
    replace(
      actions,
      isAdmin() && !edit && form ? h("button", { class: "primary", onclick: () => begin() }, "Edit") : null,
    );

  function show(own, records) {
    const newest = records[0];
    const by = newest?.who ? ` by ${newest.who}` : "";
    const since = newest ? `, since ${moment(newest.at_ms, now())}${by}` : "";
    replace(about, `${form.policy.name}${since}`);
    buttons();
    money.hidden = !own.length;
    replace(money, h("h2", {}, "Budgets"), own.map(gauge));
    showTenants();
    const line = (field) =>
      h(
        "tr",
        { "data-key": field.name },
        h("td", {}, h("b", {}, field.name)),
        h(
          "td",
          { class: "mono" },
          field.value,
          field.value === field.usual ? null : h("div", { class: "dim small" }, `usually ${field.usual}`),
        ),
        h("td", { class: "dim" }, field.about),
      );
    const list = (all) => table(["Field", "Value", "What it means"], all.map(line));
    replace(
      rules,
      h("h2", {}, "Rules"),
      list(form.fields.filter((field) => field.common)),
      fold("more", "All other fields", list(form.fields.filter((field) => !field.common))),
      fold(
        "text",
        "As a file",
        h("pre", { class: "mono policy-text", tabindex: "0", "aria-label": "The policy as a file" }, form.text),
      ),
    );
    showPast(records);
  }

  function showTenants() {
    const all = form.policy.tenants;
    const budget = (one) =>
      [
        one.budget_gpu_hours ? plural(one.budget_gpu_hours, "GPU-hour") : "",
        one.budget_money ? `${whole(one.budget_money)} money` : "",
      ]
        .filter(Boolean)
        .join(", ");
    const rows = all
      .slice(0, TENANTS_MAX)
      .map((one) =>
        h(
          "tr",
          { "data-key": one.name, "data-tenant": one.name },
          h("td", {}, toTenant(one.name)),
          h("td", { "data-name": "part of" }, one.parent || "–"),
          h("td", { class: "num", "data-name": "weight" }, String(one.weight)),
          h("td", { class: "num", "data-name": "quota" }, one.quota_gpus ? plural(one.quota_gpus, "GPU") : "–"),
          h(
            "td",
            { "data-name": "budget" },
            budget(one) ? `${budget(one)} ${one.budget_period === "month" ? "a month" : "in all"}` : "–",
          ),
          h("td", { class: "num", "data-name": "jobs" }, one.jobs_max ? whole(one.jobs_max) : "–"),
          h("td", { class: "num", "data-name": "waiting" }, one.waiting_max ? whole(one.waiting_max) : "–"),
          h("td", { class: "num", "data-name": "priority" }, String(one.priority_max)),
        ),
      );
    replace(
      tenants,
      h("h2", {}, "Tenants"),
      rows.length
        ? h(
            "div",
            { class: "scroll" },
            table(
              [
                "Tenant",
                "Part of",
                "num:Weight",
                "num:Quota",
                "Budget",
                "num:Jobs at most",
                "num:Waiting at most",
                "num:Priority at most",
              ],
              rows,
            ),
          )
        : h("p", { class: "dim" }, "The policy names no tenants: all have the same weight, no quota and no budget."),
      all.length > TENANTS_MAX
        ? h("p", { class: "dim small" }, `and ${whole(all.length - TENANTS_MAX)} more: shoal policy show`)
        : null,
      rows.length
        ? fold(
            "means",
            "What these mean",
            h(
              "dl",
              {},
              form.tenant_fields.map((field) => [h("dt", {}, field.name), h("dd", {}, field.about)]),
            ),
          )
        : null,
    );
  }

  function showPast(records) {
    past.hidden = !records.length;
    const told = (one) =>
      one.changes === null
        ? "the oldest that is known"
        : [
            one.changes
              .slice(0, CHANGES_MAX)
              .map((change) =>
                h("div", {}, h("b", {}, change.field), ` ${change.before || "–"} → ${change.after || "–"}`),
              ),
            one.changes.length + one.left_out > CHANGES_MAX
              ? h("div", { class: "dim" }, `and ${whole(one.changes.length + one.left_out - CHANGES_MAX)} more`)
              : null,
          ];
    const rows = records.map((one, at) =>
      h(
        "tr",
        { "data-key": one.seq, "data-seq": String(one.seq) },
        h("td", {}, moment(one.at_ms, now())),
        h("td", { "data-name": "by" }, one.who || "at the start"),
        h("td", {}, one.name),
        h("td", { class: "small" }, told(one)),
        h(
          "td",
          {},
          at
            ? h(
                "div",
                { class: "row" },
                h("button", { onclick: () => open(one.seq) }, "Look at"),
                isAdmin() ? h("button", { onclick: () => open(one.seq, true) }, "Edit from this one") : null,
              )
            : h("span", { class: "dim" }, "in force"),
        ),
      ),
    );
    replace(past, h("h2", {}, "Earlier policies"), table(["Since", "By", "Name", "What changed", ""], rows), look);
  }

  async function open(seq, editing = false) {
    try {
      opened = await get(`/v1/policy/history/${seq}`, { signal });
    } catch (error) {
      if (!signal.aborted) replace(look, h("p", { class: "problem", role: "alert" }, error.message));
      return;
    }
    if (editing) {
      begin(opened.text);
      return;
    }
    replace(
      look,
      h(
        "div",
        { class: "row" },
        h("h3", {}, `As it was from ${moment(opened.at_ms, now())}`),
        h("button", { class: "push", onclick: () => replace(look) }, "Close"),
      ),
      h("pre", { class: "mono policy-text", tabindex: "0", "aria-label": "An earlier policy as a file" }, opened.text),
    );
  }

  const timer = setInterval(() => {
    if (!document.hidden) ask();
  }, ASK_MS);
  const over = offer(() =>
    isAdmin()
      ? [
          {
            title: "Edit the policy",
            hint: "policy",
            run: () => {
              if (form && !edit) begin();
            },
          },
        ]
      : [],
  );
  ask();
  return () => {
    away.abort();
    clearInterval(timer);
    over();
    edit?.stop();
  };
}
