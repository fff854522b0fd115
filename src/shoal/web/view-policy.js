// The policy in force: what its values mean, its tenants and budgets, earlier ones; admins edit it.

import { chosen } from "./address.js";
import { get, isAdmin, maybe, me, put } from "./api.js";
import { budgets, gauge, toTenant } from "./budgets.js";
import { offer } from "./commands.js";
import { confirm } from "./dialog.js";
import { h, moment, money, plural, whole } from "./dom.js";
import { now } from "./live.js";
import { replace } from "./patch.js";
import { editor } from "./policy-edit.js";
import { draft } from "./replay.js";
import { table } from "./table.js";

const ASK_MS = 10_000;
const TENANTS_MAX = 200;
const CHANGES_MAX = 4;
const COMPARED_MAX = 10;
const seesAll = () => isAdmin() || me.tenant === "*";

export function mount(root) {
  const away = new AbortController();
  const signal = away.signal;
  /** @type {Api.PolicyForm} */
  let form = null;
  let edit = null;
  let opened = null;
  /** @type {{ newest: number, element: HTMLElement }} */
  let picks = null;
  let compared = null;
  let currency = "";
  const about = h("span", { class: "dim" });
  const actions = h("span", { class: "push row" });
  const notice = h("div", {});
  const gauges = h("section", { class: "card stack", "aria-label": "Budgets", hidden: true });
  const place = h("div", {});
  const tenants = h("section", { class: "card", "aria-label": "Tenants" });
  const rules = h("section", { class: "card stack", "aria-label": "Rules" });
  const past = h("section", { class: "card stack", "aria-label": "History", hidden: true });
  const look = h("div", {});
  root.append(
    h(
      "div",
      { class: "stack" },
      h("div", { class: "row" }, h("h1", {}, "Policy"), about, actions),
      notice,
      place,
      gauges,
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
      const [found, own, records, prices] = await Promise.all([
        get("/v1/policy/form", { signal }),
        budgets(),
        seesAll() ? maybe("/v1/policy/history", { signal }) : [],
        maybe("/v1/prices", { signal }),
      ]);
      if (signal.aborted) return;
      const before = form;
      form = found;
      currency = prices?.currency ?? "";
      replace(
        notice,
        edit && before && before.version !== form.version
          ? h(
              "p",
              { class: "note", role: "status" },
              "The policy changed since you started editing. Compare shows your edit beside the current policy.",
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
          "You have an unapplied draft.",
          h("button", { onclick: () => begin(draft.text) }, "Continue editing"),
          h(
            "button",
            {
              onclick: () => {
                draft.policy = null;
                ask();
              },
            },
            "Discard draft",
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
    gauges.hidden = !own.length;
    replace(gauges, h("h2", {}, "Budgets"), own.map(gauge));
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
          field.value === field.usual ? null : h("div", { class: "dim small" }, `default ${field.usual}`),
        ),
        h("td", { class: "dim" }, field.about),
      );
    const list = (all) => table(["Field", "Value", "Description"], all.map(line));
    replace(
      rules,
      h("h2", {}, "Rules"),
      list(form.fields.filter((field) => field.common)),
      fold("more", "Other fields", list(form.fields.filter((field) => !field.common))),
      fold(
        "text",
        "Policy file",
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
        one.budget_money ? money(one.budget_money, currency) : "",
        one.budget_tokens ? plural(one.budget_tokens, "token") : "",
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
          h("td", { "data-name": "Parent" }, one.parent || "–"),
          h("td", { class: "num", "data-name": "Weight" }, String(one.weight)),
          h("td", { class: "num", "data-name": "Quota" }, one.quota_gpus ? plural(one.quota_gpus, "GPU") : "–"),
          h(
            "td",
            { "data-name": "Budget" },
            budget(one)
              ? `${budget(one)} ${one.budget_period === "total" ? "in total" : `per ${one.budget_period}`}`
              : "–",
          ),
          h("td", { class: "num", "data-name": "Max jobs" }, one.jobs_max ? whole(one.jobs_max) : "–"),
          h("td", { class: "num", "data-name": "Max waiting" }, one.waiting_max ? whole(one.waiting_max) : "–"),
          h("td", { class: "num", "data-name": "Max priority" }, String(one.priority_max)),
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
                "Parent",
                "num:Weight",
                "num:Quota",
                "Budget",
                "num:Max jobs",
                "num:Max waiting",
                "num:Max priority",
              ],
              rows,
            ),
          )
        : h("p", { class: "dim" }, "No tenants in the policy: all have equal weight, no quota and no budget."),
      all.length > TENANTS_MAX
        ? h("p", { class: "dim small" }, `and ${whole(all.length - TENANTS_MAX)} more: shoal policy show`)
        : null,
      rows.length
        ? fold(
            "means",
            "Field reference",
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
        ? "Oldest known version"
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
        h("td", { "data-name": "by" }, one.who || "initial"),
        h("td", {}, one.name),
        h("td", { class: "small" }, told(one)),
        h(
          "td",
          {},
          at
            ? h(
                "div",
                { class: "row" },
                h("button", { onclick: () => open(one.seq) }, "View"),
                isAdmin() ? h("button", { onclick: () => open(one.seq, true) }, "Edit from here") : null,
                isAdmin() ? h("button", { class: "danger", onclick: () => rollBack(one) }, "Roll back") : null,
              )
            : h("span", { class: "dim" }, "Current"),
        ),
      ),
    );
    replace(past, h("h2", {}, "History"), between(records), table(["Since", "By", "Name", "Changes", ""], rows), look);
  }

  /** Any two of the newest, side by side. */
  function between(records) {
    if (records.length < 2) return null;
    const pick = (name, label, at) =>
      h(
        "select",
        { name, "aria-label": label, "data-key": name, onchange: compare },
        records
          .slice(0, COMPARED_MAX)
          .map((one, index) =>
            h(
              "option",
              { value: String(one.seq), selected: index === at },
              `${moment(one.at_ms, now())}${one.who ? ` by ${one.who}` : ""}${index ? "" : " (current)"}`,
            ),
          ),
      );
    compared ??= h("div", {});
    if (picks?.newest === records[0].seq) return [picks.element, compared];
    const element = h(
      "div",
      { class: "row", "data-key": "between" },
      "Compare",
      pick("before", "Older version", 1),
      "with",
      pick("after", "Newer version", 0),
      h("button", { onclick: compare }, "Show diff"),
    );
    picks = { newest: records[0].seq, element };
    return [element, compared];
  }

  async function compare() {
    const seq = (name) => picks.element.querySelector(`[name=${name}]`).value;
    try {
      const diff = await get(`/v1/policy/diff?before=${seq("before")}&after=${seq("after")}`, { signal });
      replace(compared, differences(diff, "Older", "Newer"));
    } catch (error) {
      if (!signal.aborted) replace(compared, h("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  /** @param {Api.PolicyRecord} one */
  async function rollBack(one) {
    let diff;
    try {
      diff = await get(`/v1/policy/diff?after=${one.seq}`, { signal });
    } catch (error) {
      replace(look, h("p", { class: "problem", role: "alert" }, error.message));
      return;
    }
    if (
      await confirm({
        title: `Roll back to the policy of ${moment(one.at_ms, now())}`,
        text: "It applies at once. Running jobs continue. To see its effect first, use Edit from here and simulate.",
        verb: "Roll back to this version",
        danger: true,
        wide: true,
        body: h("div", { class: "left" }, differences(diff, "Now", "After")),
        act: async () => {
          await put(`/v1/policy?expected=${diff.expected}`, diff.policy);
          return { note: "Rolled back" };
        },
      })
    )
      ask();
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
        h("h3", {}, `Policy of ${moment(opened.at_ms, now())}`),
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
            title: "Edit policy",
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

/** @param {Api.PolicyDiff} diff */
const differences = (diff, before, after) =>
  diff.changes.length
    ? [
        table(
          ["Field", before, after],
          diff.changes.map((one) =>
            h(
              "tr",
              { "data-key": one.field, "data-changed": one.field },
              h("td", {}, h("b", {}, one.field)),
              h("td", { class: "mono old", "data-name": before }, one.before || "–"),
              h("td", { class: "mono new", "data-name": after }, one.after || "–"),
            ),
          ),
        ),
        diff.left_out ? h("p", { class: "dim small" }, `and ${whole(diff.left_out)} more`) : null,
      ]
    : h("p", { class: "note" }, "No differences.");
