// The public status page: switched on or off here, with the services that it names and what the operator tells.

import { get, put } from "./api.js";
import { confirm, toast } from "./dialog.js";
import { chip, h, moment } from "./dom.js";
import { cluster, now } from "./live.js";
import { replace } from "./patch.js";

/** @param {AbortSignal} signal */
export function statusPage(signal) {
  /** @type {Api.StatusPage} */
  let page = null;
  const body = h("div", { class: "stack" });
  const element = h("div", { class: "stack", "data-key": "status" }, body);

  async function save(changes) {
    page = await put("/v1/status-page", { ...page, ...changes });
    show();
  }
  const quietly = (changes) =>
    save(changes).catch((error) => {
      toast(error.message);
      ask();
    });

  async function ask() {
    try {
      page = await get("/v1/status-page", { signal });
      show();
    } catch (error) {
      if (!signal.aborted) replace(body, h("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  const turn = () =>
    confirm({
      title: page.on ? "Turn off the status page" : "Turn on the status page",
      text: page.on
        ? "Its address no longer answers."
        : "Anyone who reaches this address sees whether the cluster and the services below work, and your incidents. " +
          "It never names people, jobs, tenants or nodes.",
      verb: page.on ? "Turn off" : "Turn on",
      danger: !page.on,
      act: async () => {
        await save({ on: !page.on });
        return { note: page.on ? "The status page is public" : "The status page is off" };
      },
    });

  const report = () =>
    confirm({
      title: "Report incident",
      text: "Everyone who opens the status page can read it.",
      verb: "Report incident",
      fields: [{ name: "text", label: "Message", type: "text" }],
      act: async ({ text }) => {
        await save({ incidents: [{ at_ms: Math.round(now()), text }, ...page.incidents].slice(0, 20) });
        return { note: "Reported" };
      },
    });

  function show() {
    const names = [...new Set([...cluster.services.keys(), ...page.services])].sort();
    const listed = (name, on) =>
      quietly({ services: on ? [...page.services, name] : page.services.filter((one) => one !== name) });
    replace(
      body,
      h(
        "div",
        { class: "row" },
        page.on ? chip("ready", "Public") : chip("idle", "Off"),
        page.on ? h("a", { href: "/status" }, `${location.origin}/status`) : null,
        h(
          "button",
          { class: page.on ? "push" : "push primary", "data-key": "turn", onclick: turn },
          page.on ? "Turn off" : "Turn on",
        ),
      ),
      h("h3", {}, "Services to name"),
      names.length
        ? h(
            "div",
            { class: "row" },
            names.map((name) =>
              h(
                "label",
                { class: "row", "data-key": name },
                h("input", {
                  type: "checkbox",
                  checked: page.services.includes(name),
                  onchange: (event) => listed(name, event.currentTarget.checked),
                }),
                name,
              ),
            ),
          )
        : h("p", { class: "dim" }, "No services yet."),
      h(
        "div",
        { class: "row" },
        h("h3", {}, "Incidents"),
        h("button", { class: "push", "data-key": "report", onclick: report }, "Report incident"),
      ),
      page.incidents.length
        ? h(
            "ul",
            { class: "notes" },
            page.incidents.map((one) =>
              h(
                "li",
                { "data-key": `${one.at_ms} ${one.text}` },
                `${moment(one.at_ms, now())}: ${one.text} `,
                one.over
                  ? chip("succeeded", "resolved")
                  : h(
                      "button",
                      {
                        onclick: () =>
                          quietly({
                            incidents: page.incidents.map((other) => (other === one ? { ...one, over: true } : other)),
                          }),
                      },
                      "Resolve",
                    ),
              ),
            ),
          )
        : h("p", { class: "dim" }, "None reported."),
    );
  }
  return { element, ask };
}
