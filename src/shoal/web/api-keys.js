// API keys of services: who has one, for what and how much; adding one, whose secret is shown once, and revoking it.

import { call, get, me, post } from "./api.js";
import { confirm } from "./dialog.js";
import { chip, h, moment, plural, short, span, whole } from "./dom.js";
import { now } from "./live.js";
import { replace } from "./patch.js";
import { reveal } from "./reveal.js";
import { table } from "./table.js";

const ROWS_MAX = 200;
const SEARCHED_MIN = 10;
const DAY_MS = 86_400_000;
const HOUR_MS = 3_600_000;
const ALL = "*";

/** @param {Api.ApiKeyView} key */
const servicesOf = (key) => key.services.join(", ") || `all services of ${key.tenant}`;

/**
 * @param {AbortSignal} signal
 * @param {string[][]} lifetimes in hours, with their names
 */
export function apiKeys(signal, lifetimes) {
  /** @type {Api.ApiKeyView[]} */
  let keys = [];
  const search = h("input", {
    type: "search",
    placeholder: "User, service or key",
    "aria-label": "Find a key",
    oninput: () => show(),
  });
  const finds = h("div", { class: "row", hidden: true }, search);
  const list = h("div", {});
  const element = h("div", { class: "stack", "data-key": "keys" }, finds, list);
  const failed = (error) => {
    if (!signal.aborted) replace(list, h("p", { class: "problem", role: "alert" }, error.message));
  };

  async function ask() {
    try {
      keys = await get("/v1/api-keys", { signal });
      if (!signal.aborted) show();
    } catch (error) {
      failed(error);
    }
  }

  async function add() {
    try {
      form(await get("/v1/services", { signal, aside: true }));
    } catch (error) {
      failed(error);
    }
  }

  /** @param {Api.ServiceView[]} services */
  function form(services) {
    const tenants = [...new Set([...services.map((one) => one.spec.replica.tenant), "default"])];
    const some = h("div", { class: "asks left" });
    const offered = (tenant) =>
      services.filter((one) => !tenant || one.spec.replica.tenant === tenant).map((one) => one.name);
    const offer = (tenant) => some.replaceChildren(...offered(tenant).map(box));
    const choice = h(
      "select",
      { name: "tenant", onchange: (event) => offer(event.currentTarget.value) },
      tenants.map((one) => h("option", { value: one }, one)),
    );
    offer(me.tenant === ALL ? tenants[0] : "");
    confirm({
      title: "New API key",
      text: "For programs that call services. It opens nothing else. Limits of tokens need --route cache.",
      verb: "Create key",
      body: h(
        "fieldset",
        { class: "plain-set acts stack" },
        me.tenant === ALL ? h("label", { class: "field" }, "Tenant", choice) : null,
        h("fieldset", { class: "plain-set" }, h("legend", {}, "Services (none chosen: all of the tenant)"), some),
      ),
      fields: [
        { name: "user", label: "For", type: "text", value: me.user },
        { name: "tokens", label: "Tokens (empty: no limit)", min: 1, max: 1e15, optional: true },
        {
          name: "per",
          label: "Per",
          choices: [
            ["day", "Day (UTC)"],
            ["month", "Month (UTC)"],
          ],
          value: "day",
        },
        { name: "rpm", label: "Requests per minute (empty: no limit)", min: 1, max: 1e6, optional: true },
        { name: "hours", label: "Expires in", choices: lifetimes, value: "0" },
      ],
      act: async ({ tenant, user, tokens, per, rpm, hours }) => {
        const wanted = {
          services: [...some.querySelectorAll("input:checked")].map((one) => one.value),
          tenant,
          user,
          tokens: Number(tokens),
          per,
          rpm: Number(rpm),
          lifetime_ms: Number(hours) * HOUR_MS,
        };
        const made = await post("/v1/api-keys", wanted);
        setTimeout(() => reveal.apiKey(made, baseOf(made.key, services)));
        return { note: `Created a key for ${made.key.user}` };
      },
    }).then(ask);
  }

  /** @param {Api.ApiKeyView} key */
  async function revoke(key) {
    const from = Math.max(0, Math.floor(now() - DAY_MS));
    const used = await get(`/v1/ledger?by=service&from_ms=${from}`, { signal, aside: true }).catch(() => null);
    const requests = (used?.tokens ?? [])
      .filter((row) => row.caller === key.id)
      .reduce((sum, row) => sum + row.requests, 0);
    confirm({
      title: `Revoke key ${key.id}`,
      text:
        `Programs of ${key.user} that use it are refused within a second by ${servicesOf(key)}. Answers that have ` +
        `begun are finished.${requests ? ` It made ${plural(requests, "request")} in the last day.` : ""}`,
      verb: "Revoke key",
      danger: true,
      act: async () => {
        await call("DELETE", `/v1/api-keys/${key.id}`);
        return { note: `Revoked ${key.id}` };
      },
    }).then(ask);
  }

  function show() {
    finds.hidden = keys.length <= SEARCHED_MIN;
    if (!keys.length) {
      replace(
        list,
        h("div", { class: "empty" }, h("p", {}, "No API keys yet."), h("code", {}, "shoal key add SERVICE")),
      );
      return;
    }
    const word = finds.hidden ? "" : search.value.trim().toLowerCase();
    const found = keys.filter((key) => `${key.id} ${key.user} ${servicesOf(key)}`.toLowerCase().includes(word));
    const all = me.tenant === ALL;
    replace(
      list,
      found.length
        ? table(
            [
              "Key",
              "For",
              ...(all ? ["Tenant"] : []),
              "Services",
              "num:Tokens",
              "num:Requests",
              "num:Added",
              "num:Expires",
              "",
            ],
            found.slice(0, ROWS_MAX).map((key) => row(key, all)),
          )
        : h("p", { class: "dim" }, "No keys match."),
      found.length > ROWS_MAX ? h("p", { class: "dim small" }, `and ${whole(found.length - ROWS_MAX)} more`) : null,
    );
  }

  /** @param {Api.ApiKeyView} key */
  const row = (key, all) =>
    h(
      "tr",
      { "data-key": key.id, "data-api-key": key.id },
      h("td", { class: "mono" }, key.id),
      h("td", {}, key.user),
      all ? h("td", {}, key.tenant) : null,
      h("td", { class: "long" }, servicesOf(key)),
      h("td", { class: "num", "data-name": "Tokens" }, key.tokens ? `${short(key.tokens)}/${key.per}` : "–"),
      h("td", { class: "num", "data-name": "Requests" }, key.rpm ? `${whole(key.rpm)}/min` : "–"),
      h("td", { class: "num", "data-name": "Added", title: `by ${key.who}` }, moment(key.since_ms, now())),
      h(
        "td",
        { class: "num", "data-name": "Expires" },
        key.void
          ? chip(key.void === "expired" ? "failed" : "suspect", key.void)
          : key.until_ms
            ? `in ${span(key.until_ms - now())}`
            : h("span", { class: "dim" }, "never"),
      ),
      h("td", { class: "acts" }, h("button", { class: "danger", onclick: () => revoke(key) }, "Revoke")),
    );
  return { element, ask, add };
}

const box = (name) => h("label", {}, h("input", { type: "checkbox", value: name }), name);

/**
 * Where a client with this key asks. Services of language models share one address, where `model` chooses one.
 * @param {Api.ApiKeyView} key
 * @param {Api.ServiceView[]} services
 */
function baseOf(key, services) {
  const own = services.filter((one) =>
    key.services.length ? key.services.includes(one.name) : one.spec.replica.tenant === key.tenant,
  );
  const [first] = own;
  if (!first) return "";
  const shared = own.find(({ spec: { route } }) => route?.routing === "cache" && !route.port);
  return key.services.length !== 1 && shared ? new URL("/v1", shared.url).href : `${first.url}v1`;
}
