// Tenants with what they may use: quota, budget and caps, edited in place. They are part of the policy.

import { post, put } from "./api.js";
import { toTenant } from "./budgets.js";
import { confirm } from "./dialog.js";
import { h, moment, percent, plural, short, whole } from "./dom.js";
import { now } from "./live.js";
import { table } from "./table.js";

// What is edited here, by its name in the policy; the policy's editor has the rest.
const EDITED = [
  ["weight", "Weight (share beside other tenants)"],
  ["quota_gpus", "Guaranteed GPUs (quota)"],
  ["budget_gpu_hours", "Budget in GPU-hours (0: none)"],
  ["budget_money", "Budget in money (0: none)"],
  ["budget_tokens", "Budget in tokens (0: none)"],
  ["jobs_max", "Jobs at most (0: no limit)"],
  ["waiting_max", "Waiting jobs at most (0: no limit)"],
];

/** @param {{ tenants: Api.TenantView[], form?: Api.PolicyForm, budgets?: Api.BudgetView[] }} known */
export function tenantsTable(known, act) {
  if (!known.tenants.length)
    return h(
      "div",
      { class: "empty" },
      h("p", {}, "No tenants yet: the cluster is yours alone."),
      h("code", {}, "shoal tenant add lab"),
    );
  const rows = known.tenants.map((tenant) => {
    const rule = known.form?.policy.tenants.find((one) => one.name === tenant.name);
    const budget = known.budgets?.find((one) => one.tenant === tenant.name);
    return h(
      "tr",
      { "data-key": tenant.name, "data-tenant": tenant.name },
      h("td", { class: "long" }, toTenant(tenant.name)),
      h("td", { class: "num", "data-name": "Users" }, whole(tenant.users)),
      h("td", { class: "num", "data-name": "Jobs" }, whole(tenant.jobs)),
      h("td", { class: "num", "data-name": "Weight" }, String(rule?.weight ?? 1)),
      h("td", { class: "num", "data-name": "Quota" }, rule?.quota_gpus ? plural(rule.quota_gpus, "GPU") : "–"),
      h("td", { class: "num", "data-name": "Budget" }, budgetText(budget)),
      h("td", { class: "num", "data-name": "Unix user" }, String(tenant.uid)),
      h("td", { class: "num", "data-name": "Added" }, moment(tenant.since_ms, now())),
      h(
        "td",
        { class: "acts" },
        h("button", { "data-key": "limits", onclick: () => act.edit(tenant) }, "Edit limits"),
        h("button", { class: "danger", "data-key": "remove", onclick: () => act.remove(tenant) }, "Remove"),
      ),
    );
  });
  const heads = ["Tenant", "num:Users", "num:Jobs", "num:Weight", "num:Quota", "num:Budget used", "num:Unix user"];
  return h("div", { class: "scroll" }, table([...heads, "num:Added", ""], rows));
}

/** @param {Api.BudgetView} [budget] */
const budgetText = (budget) =>
  budget
    ? budget.gauges.map((one) => h("div", {}, `${percent(one.used / one.limit)} of ${short(one.limit)} ${one.unit}`))
    : "–";

/**
 * @param {Api.TenantView} tenant
 * @param {Api.PolicyForm} form As the admin saw it: a policy that was changed since is not overwritten.
 */
export function limitsOf(tenant, form) {
  const rule = form.policy.tenants.find((one) => one.name === tenant.name);
  const usual = Object.fromEntries(form.tenant_fields.map((field) => [field.name, field.usual]));
  const before = Object.fromEntries(EDITED.map(([name]) => [name, Number(rule?.[name] ?? usual[name])]));
  return confirm({
    title: `Limits of ${tenant.name}`,
    text: "They apply at once; running jobs continue. To see the effect first, edit the policy and simulate.",
    verb: "Save limits",
    fields: [
      ...EDITED.map(([name, label]) => ({ name, label, min: 0, value: String(before[name]) })),
      {
        name: "budget_period",
        label: "Budget period",
        choices: [
          ["day", "Each day"],
          ["month", "Each month"],
          ["total", "In total"],
        ],
        value: rule?.budget_period ?? usual.budget_period,
      },
    ],
    act: async (values) => {
      const changes = Object.fromEntries(
        EDITED.map(([name]) => [name, Number(values[name])]).filter(([name, value]) => value !== before[name]),
      );
      if (values.budget_period !== (rule?.budget_period ?? usual.budget_period))
        changes.budget_period = values.budget_period;
      if (!Object.keys(changes).length) return { note: "Nothing changed" };
      const draft = await post("/v1/policy/draft", { changes: { tenants: { [tenant.name]: changes } } });
      if (draft.expected !== form.version) throw new Error("Not saved: the policy was changed meanwhile. Try again.");
      await put(`/v1/policy?expected=${form.version}`, draft.policy);
      return { note: `Saved the limits of ${tenant.name}` };
    },
  });
}
