// How to use a service: its URL, snippets to copy, and a request or a chat from the page. Those go through the
// controller, because a page may only ask its own origin.

import { get, mayChange, post, servicePath } from "./api.js";
import { copyable } from "./copy.js";
import { h } from "./dom.js";
import { replace } from "./patch.js";

const SHOWN_MAX = 200_000; // characters of an answer

// Line by line: the indentation of this file does not travel.
const python = (url) =>
  [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${url}v1", api_key="none")`,
    "model = client.models.list().data[0].id",
    'said = [{"role": "user", "content": "Hello"}]',
    "for part in client.chat.completions.create(model=model, messages=said, stream=True):",
    '    print(part.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n");

export class Use {
  constructor(name) {
    this.path = servicePath(name);
    this.name = name;
    this.where = h("div", { class: "stack" });
    this.tried = h("div", { class: "stack" });
    this.stops = new Set();
    this.element = h(
      "div",
      { class: "stack" },
      this.where,
      mayChange()
        ? h(
            "details",
            { ontoggle: (event) => event.target.open && !this.tried.firstChild && this.open() },
            h("summary", {}, "Try it"),
            this.tried,
          )
        : null,
    );
  }

  /** The URL may be another one when the service was changed. */
  async show({ version, least, most }) {
    const now = `${version} ${least} ${most}`;
    if (now === this.shown) return;
    this.shown = now;
    try {
      const { url, browser_url } = await get(this.path);
      replace(
        this.where,
        browser_url
          ? h("a", { href: browser_url, target: "_blank", rel: "noopener noreferrer" }, "Open in browser")
          : null,
        copyable(url, `URL of ${this.name}`),
        h(
          "details",
          {},
          h("summary", {}, "Use from code"),
          h(
            "div",
            { class: "stack" },
            copyable(`curl ${url}v1/models`, `curl for ${this.name}`),
            copyable(python(url), `OpenAI client for ${this.name}`),
          ),
        ),
      );
    } catch {
      this.shown = "";
    }
  }

  /** One request; `heard` gets the text as it comes. Returns the status, and what went wrong. */
  async send(path, body, signal, heard) {
    const end = { status: 0, type: "", problem: "", text: "" };
    try {
      await post(
        `${this.path}/try`,
        { path, body },
        {
          signal,
          line: (one) => {
            if (one.text === undefined) {
              Object.assign(end, one);
              return;
            }
            end.text += one.text;
            heard?.(one.text);
          },
        },
      );
    } catch (error) {
      end.problem = signal.aborted
        ? "Stopped"
        : (error.plain ?? "The controller stopped before the response was complete");
    }
    return end;
  }

  async open() {
    const leave = new AbortController();
    this.stops.add(leave);
    replace(this.tried, h("p", { class: "dim", role: "status" }, "Detecting the API…"));
    const { status, text } = await this.send("/v1/models", undefined, leave.signal);
    this.stops.delete(leave);
    let models = [];
    try {
      models = status === 200 ? JSON.parse(text).data.map((one) => one.id) : [];
    } catch {
      /* it speaks something else */
    }
    replace(this.tried, models.length ? this.chat(models[0]) : null, this.request());
  }

  /** A form that sends and can be stopped; `act` gets a signal and returns the one line that is told. */
  form(label, fields, act, below = null) {
    const said = h("p", { class: "dim small", role: "status" });
    const send = h("button", { class: "primary", type: "submit" }, "Send");
    let leave = null;
    const stop = h("button", { type: "button", hidden: true, onclick: () => leave?.abort() }, "Stop");
    const form = h(
      "form",
      { class: "stack", "aria-label": label },
      h("h3", {}, label),
      fields,
      h("div", { class: "row" }, send, stop, said),
      below,
    );
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (leave) return;
      leave = new AbortController();
      this.stops.add(leave);
      stop.hidden = false;
      send.disabled = true;
      said.textContent = "…";
      said.textContent = await act(leave.signal);
      this.stops.delete(leave);
      leave = null;
      stop.hidden = true;
      send.disabled = false;
    });
    return form;
  }

  request() {
    const path = h("input", { name: "path", value: "/", maxlength: 2048, required: true, pattern: "/.*" });
    const body = h("textarea", { name: "body", rows: 3, spellcheck: "false" });
    const out = h("pre", { class: "code", tabindex: "0", "aria-label": `Response of ${this.name}`, hidden: true });
    return this.form(
      `Request to ${this.name}`,
      [h("label", { class: "field" }, "Path", path), h("label", { class: "field" }, "JSON body (empty: GET)", body)],
      async (signal) => {
        out.textContent = "";
        out.hidden = false;
        const began = performance.now();
        const { status, problem, location } = await this.send(
          path.value,
          body.value.trim() ? body.value : undefined,
          signal,
          (text) => {
            if (out.textContent.length < SHOWN_MAX) out.append(text);
          },
        );
        return [
          status ? `Status ${status} in ${Math.round(performance.now() - began)} ms` : "",
          location ? `redirect to ${location}, not followed` : "",
          problem,
        ]
          .filter(Boolean)
          .join(": ");
      },
      out,
    );
  }

  chat(model) {
    const said = [];
    const log = h("div", { class: "stack", role: "log", "aria-label": `Chat with ${this.name}`, tabindex: "0" });
    const input = h("input", { name: "message", required: true, autocomplete: "off", maxlength: 20000 });
    const line = (role, text) => {
      const words = h("span", {}, text);
      log.append(
        h("p", { class: "why", "data-role": role }, h("b", {}, role === "user" ? "You: " : `${model}: `), words),
      );
      return words;
    };
    return this.form(
      `Chat with ${this.name}`,
      [log, h("label", { class: "field" }, "Message", input)],
      async (signal) => {
        said.push({ role: "user", content: input.value });
        line("user", input.value);
        input.value = "";
        const words = line("assistant", "");
        let wrong = "";
        let rest = "";
        let first = 0;
        const began = performance.now();
        const end = await this.send(
          "/v1/chat/completions",
          JSON.stringify({ model, messages: said, stream: true }),
          signal,
          (text) => {
            const lines = (rest + text).split("\n");
            rest = lines.pop();
            for (const one of lines)
              if (one.startsWith("data: {"))
                try {
                  const { choices, error } = JSON.parse(one.slice(6));
                  const piece = choices?.[0]?.delta?.content ?? "";
                  if (piece && !first) first = performance.now() - began;
                  words.append(piece);
                  if (error) wrong = error.message ?? String(error);
                } catch {
                  wrong = "The response is not JSON";
                }
          },
        );
        if (words.textContent) said.push({ role: "assistant", content: words.textContent });
        else said.pop();
        if (wrong || end.problem) return wrong || end.problem;
        if (end.status !== 200) return `Status ${end.status}: ${end.text.slice(0, 300)}`;
        return first
          ? `First token after ${Math.round(first)} ms, all after ${Math.round(performance.now() - began)} ms`
          : "";
      },
    );
  }

  stop() {
    for (const one of this.stops) one.abort();
  }
}
