// People: users, tokens, API keys, tenants and the audit log, managed by those who may. Others see themselves, their
// tokens and, as members, the keys of their tenant's services.

import { choose, chosen } from "./address.js";
import { call, get, isAdmin, mayChange, me, post, put } from "./api.js";
import { apiKeys } from "./api-keys.js";
import { auditLog } from "./audit-log.js";
import { budgets } from "./budgets.js";
import { offer } from "./commands.js";
import { confirm } from "./dialog.js";
import { chip, h, moment, plural, span, whole } from "./dom.js";
import { choice } from "./ledger-table.js";
import { now } from "./live.js";
import { replace } from "./patch.js";
import { reveal } from "./reveal.js";
import { statusPage } from "./status-page.js";
import { table } from "./table.js";
import { limitsOf, tenantsTable } from "./tenants.js";

const ASK_MS = 10_000;
const ALL = "*";
const ROLES = [
  ["viewer", "Viewer: can look"],
  ["member", "Member: can run jobs and services"],
];
const ADMIN = ["admin", "Admin: can do everything"];
const LIFETIMES = [
  ["8", "8 hours"],
  ["168", "7 days"],
  ["720", "30 days"],
  ["2160", "90 days"],
  ["8760", "1 year"],
  ["0", "Never"],
];
const HOUR_MS = 3_600_000;
const tenantName = (name) => (name === ALL ? "all tenants" : name);
const remove = (path) => call("DELETE", path);
/** @param {string} name */
const userPath = (name) => /** @type {const} */ (`/v1/users/${encodeURIComponent(name)}`);
const button = (label, onclick, tone = "") => h("button", { class: tone, "data-key": label, onclick }, label);
const TITLES = {
  users: "Users",
  tokens: "Tokens",
  keys: "API keys",
  tenants: "Tenants",
  audit: "Audit log",
  status: "Status page",
};
const tabs = () =>
  Object.entries(TITLES).filter(([name]) => isAdmin() || name === "tokens" || (name === "keys" && mayChange()));

export function mount(root) {
  const away = new AbortController();
  const signal = away.signal;
  const usual = isAdmin() ? "users" : "tokens";
  let tab = tabs().some(([name]) => name === chosen("tab")) ? chosen("tab") : usual;
  /** @type {{ users: Api.UserView[], tokens: Api.TokenView[], tenants: Api.TenantView[], form?: Api.PolicyForm,
   * budgets?: Api.BudgetView[] }} */
  let known = { users: [], tokens: [], tenants: [] };
  const keys = apiKeys(signal, LIFETIMES);
  const asides = { keys, audit: auditLog(signal), status: statusPage(signal) };
  const notice = h("div", {});
  const body = h("div", { class: "stack" });
  const actions = h("span", { class: "push row" });
  root.append(
    h(
      "div",
      { class: "stack" },
      h(
        "div",
        { class: "row" },
        h("h1", {}, "People"),
        tabs().length > 1
          ? choice("section", tabs(), tab, (value) => {
              tab = value;
              choose("tab", value === usual ? "" : value);
              show();
              ask();
            })
          : null,
        actions,
      ),
      isAdmin() ? null : whoami(),
      notice,
      body,
    ),
  );

  async function ask() {
    if (asides[tab]) {
      show();
      asides[tab].ask();
      return;
    }
    try {
      const [tokens, users, tenants, form, spent] = await Promise.all([
        get("/v1/tokens", { signal }),
        isAdmin() ? get("/v1/users", { signal }) : [],
        isAdmin() ? get("/v1/tenants", { signal }) : [],
        tab === "tenants" ? get("/v1/policy/form", { signal }) : known.form,
        tab === "tenants" ? budgets() : known.budgets,
      ]);
      if (signal.aborted) return;
      known = { users, tokens, tenants, form, budgets: spent };
      replace(notice);
      show();
    } catch (error) {
      if (!signal.aborted) replace(notice, h("p", { class: "problem", role: "alert" }, error.message));
    }
  }
  const done = async (asked) => {
    await asked;
    ask(); // also when it was refused: somebody else may have been quicker
  };

  // -- users ---------------------------------------------------------------------------------
  const tenantChoices = (none) => [
    ...(none ? [["", none]] : []),
    ...known.tenants.map((one) => [one.name, one.name]),
    [ALL, "All tenants"],
  ];

  function addUser() {
    done(
      confirm({
        title: "Add user",
        text: "The user can sign in once there is a token or an invite for them.",
        verb: "Add user",
        fields: [
          { name: "name", label: "Name", type: "text" },
          { name: "tenant", label: "Tenant", choices: tenantChoices(), value: known.tenants[0]?.name },
          { name: "role", label: "Role", choices: [...ROLES, ADMIN], value: "member" },
        ],
        act: async ({ name, tenant, role }) => {
          await post("/v1/users", { name, roles: { [role === "admin" ? ALL : tenant]: role } });
          return { note: `Added ${name}` };
        },
      }),
    );
  }

  /** @param {Api.UserView} [user] Without one: somebody new. */
  function invite(user) {
    confirm({
      title: user ? `Invite ${user.name}` : "Invite",
      text: user
        ? "They get access with the roles they have, on another browser or machine."
        : "They get a link that works once and signs them in.",
      verb: "Create invite",
      fields: user
        ? []
        : [
            { name: "name", label: "Name", type: "text" },
            { name: "tenant", label: "Tenant", choices: tenantChoices(), value: known.tenants[0]?.name },
            { name: "role", label: "Role", choices: [...ROLES, ADMIN], value: "member" },
          ],
      act: async ({ name, tenant, role }) => {
        const made = await post("/v1/invites", user ? { user: user.name } : { user: name, tenant, role });
        setTimeout(() => reveal.invite(made));
        return { note: `Invited ${made.token.user}` };
      },
    }).then(ask);
  }

  /** @param {Api.UserView} user */
  function editRoles(user) {
    const own = Object.entries(user.roles);
    done(
      confirm({
        title: `Roles of ${user.name}`,
        text: "Changes apply to open sessions and tokens at once.",
        verb: "Save roles",
        fields: [
          ...own.map(([tenant, role]) => ({
            name: `in ${tenant}`,
            label: `Role in ${tenantName(tenant)}`,
            choices: [...(tenant === ALL ? [ROLES[0], ADMIN] : ROLES), ["", "No role"]],
            value: role,
          })),
          { name: "tenant", label: "Add to tenant", choices: tenantChoices("–"), value: "" },
          { name: "role", label: "Role there", choices: [...ROLES, ADMIN], value: "member" },
        ],
        act: async (values) => {
          const roles = Object.fromEntries(
            own.map(([tenant]) => [tenant, values[`in ${tenant}`]]).filter(([, role]) => role),
          );
          if (values.tenant) roles[values.role === "admin" ? ALL : values.tenant] = values.role;
          await put(userPath(user.name), { roles });
          return { note: `Saved the roles of ${user.name}` };
        },
      }),
    );
  }

  /** @param {Api.UserView} user */
  async function removeUser(user) {
    const path = userPath(user.name);
    const query = ({ end, heir }) => `?${new URLSearchParams({ end: end || "false", heir: heir || "" })}`;
    const list = h("div", { class: "left" });
    const look = async (values) => {
      try {
        replace(list, leftTable(await get(`${path}/leaving${query(values)}`, { signal })));
      } catch (error) {
        replace(list, h("p", { class: "problem" }, error.message));
      }
    };
    await look({});
    done(
      confirm({
        title: `Remove ${user.name}`,
        text: "Tokens and open sessions end at once.",
        verb: "Remove user",
        danger: true,
        wide: true,
        body: list,
        changed: look,
        fields: [
          {
            name: "end",
            label: "Jobs and services",
            choices: [
              ["false", "Keep running"],
              ["true", "Cancel and stop"],
            ],
            value: "false",
          },
          {
            name: "heir",
            label: "Schedules",
            choices: [
              ["", "Pause"],
              ...known.users
                .filter((one) => one.name !== user.name)
                .map((one) => [one.name, `Hand over to ${one.name}`]),
            ],
            value: "",
          },
        ],
        act: async (values) => {
          const gone = await call("DELETE", `${path}${query(values)}`);
          return { note: `Removed ${user.name}: ${leftText(gone)}` };
        },
      }),
    );
  }

  const roleChips = (roles) =>
    Object.entries(roles).length
      ? Object.entries(roles).map(([tenant, role]) =>
          h(
            "span",
            { class: `chip ${role === "admin" ? "live" : ""}`, "data-glyph": role === "admin" ? "◆" : "•" },
            `${role} · ${tenantName(tenant)}`,
          ),
        )
      : h("span", { class: "dim" }, "No role");

  const invited = (user) => known.tokens.filter((one) => one.invite && !one.void && one.user === user.name).length;

  function usersTable() {
    if (!known.users.length)
      return h(
        "div",
        { class: "empty" },
        h("p", {}, known.tenants.length ? "No users yet." : "Add a tenant first, then users."),
        h("code", {}, known.tenants.length ? "shoal user add ann --tenant lab" : "shoal tenant add lab"),
      );
    const rows = known.users.map((user) =>
      h(
        "tr",
        { "data-key": user.name, "data-user": user.name },
        h("td", { class: "long" }, h("a", { href: `#/user/${encodeURIComponent(user.name)}` }, user.name)),
        h(
          "td",
          {},
          h("span", { class: "row" }, roleChips(user.roles), invited(user) ? chip("waiting", "invited") : null),
        ),
        h("td", { class: "num", "data-name": "Tokens" }, whole(user.tokens - invited(user))),
        h("td", { class: "num", "data-name": "Added" }, moment(user.since_ms, now())),
        h(
          "td",
          { class: "acts" },
          button("Edit roles", () => editRoles(user)),
          button("Invite", () => invite(user)),
          button("New token", () => newToken(user)),
          button("Remove", () => removeUser(user), "danger"),
        ),
      ),
    );
    return table(["User", "Roles", "num:Tokens", "num:Added", ""], rows);
  }

  // -- tokens --------------------------------------------------------------------------------
  /** @param {Api.UserView} [user] Without one: for oneself. */
  function newToken(user) {
    const tenants = Object.keys(user?.roles ?? {});
    confirm({
      title: user ? `New token for ${user.name}` : "New token",
      text: user
        ? "It acts for the user in one tenant."
        : "It can do no more, and lives no longer, than what you are signed in with.",
      verb: "Create token",
      fields: [
        ...(tenants.length > 1
          ? [{ name: "tenant", label: "Tenant", choices: tenants.map((one) => [one, tenantName(one)]) }]
          : []),
        { name: "hours", label: "Expires in", choices: LIFETIMES, value: "2160" },
        { name: "note", label: "Used for", type: "text", value: "", optional: true },
      ],
      act: async ({ hours, note, tenant }) => {
        const made = await post("/v1/tokens", {
          user: user?.name,
          lifetime_ms: Number(hours) * HOUR_MS,
          note,
          tenant,
        });
        setTimeout(() => reveal.token(made));
        return { note: `Created a token for ${made.token.user}` };
      },
    }).then((made) => {
      if (made) ask();
    });
  }

  /** @param {Api.TokenView} token */
  function revoke(token) {
    done(
      confirm({
        title: `Revoke token ${token.id}`,
        text:
          token.id === me.token
            ? "You are signed in with this token: you will be signed out."
            : `${token.user} can no longer use it. Sessions that began with it end at once.`,
        verb: "Revoke token",
        danger: true,
        act: async () => {
          await remove(`/v1/tokens/${token.id}`);
          return { note: `Revoked ${token.id}` };
        },
      }),
    );
  }

  function tokensTable() {
    if (!known.tokens.length)
      return h("div", { class: "empty" }, h("p", {}, "No tokens yet."), h("code", {}, "shoal token add"));
    const rows = known.tokens.map((token) =>
      h(
        "tr",
        { "data-key": token.id, "data-token": token.id },
        h("td", { class: "mono" }, token.id),
        h("td", {}, token.user),
        h("td", {}, `${token.role} · ${tenantName(token.tenant)}`),
        h("td", { class: "dim" }, token.invite ? chip("waiting", "invite, not accepted") : token.note || "–"),
        h("td", { class: "num", "data-name": "Created" }, moment(token.since_ms, now())),
        h(
          "td",
          { class: "num", "data-name": "Expires" },
          token.void
            ? chip("failed", token.void)
            : token.until_ms
              ? `in ${span(token.until_ms - now())}`
              : h("span", { class: "dim" }, "never"),
        ),
        h(
          "td",
          { class: "acts" },
          token.id === me.token ? h("span", { class: "dim small" }, "this session") : null,
          button("Revoke", () => revoke(token), "danger"),
        ),
      ),
    );
    return table(["Token", "User", "Access", "Used for", "num:Created", "num:Expires", ""], rows);
  }

  // -- tenants -------------------------------------------------------------------------------
  function addTenant() {
    done(
      confirm({
        title: "Add tenant",
        text: "A team, project or customer whose jobs, secrets and costs are kept apart.",
        verb: "Add tenant",
        fields: [{ name: "name", label: "Name", type: "text" }],
        act: async ({ name }) => {
          await post("/v1/tenants", { name });
          return { note: `Added ${name}` };
        },
      }),
    );
  }

  /** @param {Api.TenantView} tenant */
  function removeTenant(tenant) {
    done(
      confirm({
        title: `Remove tenant ${tenant.name}`,
        text:
          tenant.jobs > 0
            ? `It has ${plural(tenant.jobs, "job")}: cancel them first.`
            : "Its tokens, schedules and its users' roles in it are removed. Its files stay on the nodes.",
        verb: "Remove tenant",
        danger: true,
        act: async () => {
          await remove(`/v1/tenants/${encodeURIComponent(tenant.name)}`);
          return { note: `Removed ${tenant.name}` };
        },
      }),
    );
  }

  function show() {
    const heads = {
      users: () => [button("Add user", addUser), button("Invite", () => invite(), "primary")],
      tokens: () => (me.token ? [button("New token", () => newToken(), "primary")] : []),
      keys: () => [button("New API key", keys.add, "primary")],
      tenants: () => [button("Add tenant", addTenant, "primary")],
      audit: () => [],
      status: () => [],
    };
    const bodies = {
      users: usersTable,
      tokens: tokensTable,
      tenants: () =>
        tenantsTable(known, {
          edit: async (tenant) => done(limitsOf(tenant, await get("/v1/policy/form", { signal }))),
          remove: removeTenant,
        }),
      keys: () => keys.element,
      audit: () => asides.audit.element,
      status: () => asides.status.element,
    };
    replace(actions, heads[tab]());
    replace(body, h("section", { class: "card", "aria-label": TITLES[tab], "data-key": tab }, bodies[tab]()));
  }

  const timer = setInterval(() => {
    if (!document.hidden) ask();
  }, ASK_MS);
  const over = offer(() => [
    ...(mayChange() ? [{ title: "New API key", hint: "people", run: keys.add }] : []),
    ...(isAdmin()
      ? [
          { title: "Invite", hint: "people", run: () => invite() },
          { title: "Add user", hint: "people", run: addUser },
          { title: "Add tenant", hint: "people", run: addTenant },
        ]
      : []),
  ]);
  ask();
  return () => {
    away.abort();
    clearInterval(timer);
    over();
  };
}

const KINDS = {
  job: "Job",
  service: "Service",
  schedule: "Schedule",
  token: "Token",
  notice: "Notice",
  secret: "Secret",
};

/** @param {Api.LeavingView} view */
function leftTable(view) {
  if (!view.left.length) return h("p", { class: "dim" }, "They leave nothing behind.");
  const rows = view.left.map((one) =>
    h(
      "tr",
      { "data-key": `${one.kind} ${one.tenant} ${one.id}`, "data-kind": one.kind },
      h("td", {}, KINDS[one.kind]),
      h("td", { class: "long" }, one.name ? `${one.id} ${one.name}` : one.id),
      h("td", { class: "dim" }, one.tenant ? tenantName(one.tenant) : "–"),
      h("td", {}, one.then),
    ),
  );
  return [
    table(["", "Name", "Tenant", "On removal"], rows),
    view.more ? h("p", { class: "dim small" }, `and ${whole(view.more)} more`) : null,
  ];
}

/** @param {Api.LeavingView} view */
function leftText({ left, more }) {
  const counts = new Map();
  for (const { kind, then } of left) {
    const text = `${kind} ${then}`;
    counts.set(text, (counts.get(text) ?? 0) + 1);
  }
  return [...counts].map(([text, count]) => `${count} × ${text}`).join(", ") + (more ? `, ${whole(more)} more` : "");
}

const whoami = () =>
  h(
    "section",
    { class: "card row", "aria-label": "You" },
    h("b", {}, me.user),
    h("span", { class: "chip", "data-glyph": "•" }, `${me.role} · ${tenantName(me.tenant)}`),
    h("a", { class: "push", href: `#/user/${encodeURIComponent(me.user)}` }, "Your usage"),
  );
