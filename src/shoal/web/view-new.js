// A new job, or one that is run again with changes. Its fields are those of `shoal run`, and the server reads them.

import { chosen } from "./address.js";
import { call, get, me, newKey, post, Refused } from "./api.js";
import { copyable } from "./copy.js";
import { toast } from "./dialog.js";
import { h, throttled } from "./dom.js";
import { replace } from "./patch.js";

const CHECK_MS = 300;

export function mount(root) {
  const like = chosen("like");
  const box = h("div", { class: "stack new-job" });
  root.append(box);
  /** @type {Form} */
  let form = null;
  let alive = true;
  (async () => {
    const [table, filled] = await Promise.all([
      get("/v1/fields"),
      like ? get(`/v1/form?like=${encodeURIComponent(like)}&instead=${Boolean(chosen("instead"))}`) : null,
    ]);
    if (alive) form = new Form(box, table, filled);
  })().catch((error) => {
    if (alive) replace(box, title(like), h("p", { class: "problem", role: "alert" }, error.message));
  });
  return () => {
    alive = false;
    form?.stop();
  };
}

const title = (like) =>
  h("h1", {}, !like ? "New job" : chosen("instead") ? `Change ${like}` : `Run ${like} again with changes`);

class Form {
  constructor(box, table, filled) {
    this.like = filled?.like ?? "";
    this.fields = table.filter((one) => one.name !== "tenant" || me.tenant === "*");
    this.inputs = new Map();
    this.as = filled && !filled.fields ? "file" : "form";
    this.sent = ["", ""]; // what was submitted last, and its key
    this.asked = 0;
    this.check = throttled(CHECK_MS, () => this.look());
    this.problem = h("p", { class: "problem", role: "alert", hidden: true });
    this.line = h("section", { class: "card stack", "aria-label": "Command line" });
    this.text = h("textarea", {
      class: "mono",
      rows: "16",
      spellcheck: "false",
      "aria-label": "Job file",
      oninput: this.check,
    });
    this.go = h("button", { class: "primary", type: "submit" }, "Submit");
    this.instead = h("input", { type: "checkbox", name: "instead", checked: Boolean(chosen("instead")) });
    this.body = h("div", { class: "stack" });
    const swap = (as) => () => this.turn(as);
    const form = h(
      "form",
      {
        class: "stack",
        novalidate: true,
        onsubmit: (event) => {
          event.preventDefault();
          this.submit();
        },
      },
      h(
        "div",
        { class: "row" },
        title(this.like),
        h(
          "span",
          { class: "push row" },
          h("button", { type: "button", "data-as": "form", onclick: swap("form") }, "Form"),
          h("button", { type: "button", "data-as": "file", onclick: swap("file") }, "Job file"),
        ),
      ),
      filled?.package
        ? h("p", { class: "note" }, `Uses the code of ${this.like} (package ${filled.package.slice(0, 12)}).`)
        : null,
      this.body,
      filled?.waits
        ? h(
            "label",
            { class: "row" },
            this.instead,
            h("span", {}, `Replace ${this.like}, which is cancelled. If it has started by then, nothing is submitted.`),
          )
        : null,
      this.problem,
      h("div", { class: "row" }, this.go),
    );
    this.form = form;
    box.append(form, this.line);
    this.values = this.changed({ ...filled?.fields });
    this.text.value = filled?.file ?? "command: python train.py\n";
    this.draw();
    const command = this.inputs.get("command");
    if (this.as === "form") {
      command.focus();
      command.setSelectionRange(0, 0);
    } // a long one is seen from its beginning
    this.look();
  }

  stop() {
    this.check.stop();
    this.looking?.abort();
  }

  /** With what the address changes. */
  changed(values) {
    const query = new URLSearchParams(location.hash.split("?", 2)[1] ?? "");
    for (const one of this.fields) {
      if (!query.has(one.name)) continue;
      const text = query.get(one.name);
      values[one.name] = one.kind === "switch" ? Boolean(text) : one.kind === "lines" ? lines(text) : text;
    }
    return values;
  }

  draw() {
    for (const button of this.form.querySelectorAll("[data-as]"))
      button.setAttribute("aria-pressed", String(button.dataset.as === this.as));
    this.inputs.clear();
    if (this.as === "file") {
      this.body.replaceChildren(
        h("p", { class: "dim small" }, "A job file in YAML or JSON. Paste requirements as text, not as a path."),
        this.text,
      );
      return;
    }
    const groups = new Map();
    for (const one of this.fields.filter((field) => !field.common))
      groups.set(one.group, [...(groups.get(one.group) ?? []), one]);
    const common = this.fields.filter((field) => field.common);
    this.body.replaceChildren(
      h(
        "div",
        { class: "card fields" },
        common.map((one) => this.field(one)),
      ),
      h(
        "div",
        { class: "card folds" },
        [...groups].map(([group, all]) =>
          h(
            "details",
            { open: all.some((one) => filledIn(this.values[one.name])) },
            h("summary", {}, group),
            h(
              "div",
              { class: "fields" },
              all.map((one) => this.field(one)),
            ),
          ),
        ),
      ),
    );
  }

  field(one) {
    const value = this.values[one.name];
    const id = `field-${one.name}`;
    const hint = one.default && `default: ${one.default}`;
    const shared = { id, name: one.name, oninput: this.check, "aria-describedby": `${id}-help ${id}-problem` };
    const placeholder = hint || one.metavar;
    const input =
      one.kind === "switch"
        ? h("input", { ...shared, type: "checkbox", checked: Boolean(value) })
        : one.kind === "choice"
          ? h(
              "select",
              shared,
              h("option", { value: "" }, hint),
              one.choices.map((word) => h("option", { value: word, selected: word === value }, word)),
            )
          : one.kind === "lines" || one.kind === "long"
            ? h("textarea", {
                ...shared,
                class: "mono",
                rows: String(
                  Math.min(
                    8,
                    Math.max(
                      one.name === "command" ? 2 : 1,
                      Math.ceil(text(value).length / 100),
                      lines(text(value)).length + (one.kind === "lines" ? 1 : 0),
                    ),
                  ),
                ),
                spellcheck: "false",
                placeholder: one.kind === "lines" ? `${one.metavar}, one per line` : placeholder,
                value: text(value),
              })
            : h("input", {
                ...shared,
                type: one.kind === "number" ? "number" : "text",
                min: one.least,
                max: one.most,
                autocomplete: "off",
                spellcheck: "false",
                placeholder,
                value: text(value),
              });
    this.inputs.set(one.name, input);
    return h(
      "div",
      { class: `field ${one.kind}`, "data-field": one.name },
      h("label", { for: id }, one.name.replaceAll("_", " ")),
      input,
      h("small", { id: `${id}-help`, class: "dim" }, one.help),
      h("p", { id: `${id}-problem`, class: "problem small", hidden: true }),
    );
  }

  /** What is filled in, as the server takes it. */
  filled() {
    if (this.as === "file") return { file: this.text.value, like: this.like };
    const fields = { ...this.values };
    for (const one of this.fields) {
      const input = this.inputs.get(one.name);
      fields[one.name] =
        one.kind === "switch"
          ? input.checked
          : one.kind === "lines"
            ? lines(input.value)
            : input.validity?.badInput
              ? "?"
              : input.value.trim() && input.value;
    }
    return {
      fields: Object.fromEntries(Object.entries(fields).filter(([, value]) => filledIn(value))),
      like: this.like,
    };
  }

  wrong(error, submitted) {
    for (const place of this.form.querySelectorAll("[data-field] .problem")) place.hidden = true;
    for (const input of this.inputs.values()) input.removeAttribute("aria-invalid");
    this.problem.hidden = true;
    if (!error) return;
    const input = this.inputs.get(error.field);
    const place = input && this.form.querySelector(`#field-${error.field}-problem`);
    if (!input) {
      this.problem.hidden = false;
      this.problem.textContent = error.message;
      return;
    }
    place.textContent = error.plain;
    place.hidden = false;
    input.setAttribute("aria-invalid", "true");
    const fold = input.closest("details");
    if (fold) fold.open = true;
    if (submitted) input.focus();
  }

  async ask(body) {
    this.looking?.abort();
    this.looking = new AbortController();
    const view = await call("POST", "/v1/form", body, { signal: this.looking.signal });
    if (view.problem) throw new Refused(422, view.problem.message, view.problem.field);
    return view;
  }

  /** The server reads what is filled in so far. */
  async look() {
    const body = this.filled();
    const mine = ++this.asked;
    if (this.as === "form" && !body.fields.command) {
      this.wrong(null);
      this.show(null);
      return;
    }
    try {
      const view = await this.ask(body);
      if (mine !== this.asked) return;
      this.wrong(null);
      this.show(view);
    } catch (error) {
      if (error.name === "AbortError" || mine !== this.asked) return;
      this.wrong(error);
      this.show(null);
    }
  }

  show(view) {
    replace(
      this.line,
      h("h2", {}, "Command line"),
      view?.command_line
        ? copyable(view.command_line, "command line")
        : h("p", { class: "dim" }, view ? "" : "Enter a command to see it here."),
      (view?.notes ?? []).map((note) => h("p", { class: "dim small" }, note)),
    );
  }

  /** The form as a file, or the file as a form. */
  async turn(as) {
    if (as === this.as) return;
    const body = this.filled();
    if (as === "file" && !body.fields.command) {
      this.as = as;
      this.draw();
      return;
    }
    try {
      const view = await this.ask(body);
      if (as === "form" && !view.fields)
        throw new Error("A value has several lines and can only be edited in the job file.");
      this.text.value = view.file;
      this.values = view.fields ?? this.values;
      this.as = as;
      this.draw();
      this.wrong(null);
    } catch (error) {
      if (error.name !== "AbortError") this.wrong(error);
    }
  }

  /** The same request keeps its key until it is changed: an answer that is lost, or a second click, makes no second
   * job. */
  async submit() {
    if (this.go.disabled) return;
    const body = { ...this.filled(), instead: Boolean(this.like) && this.instead.isConnected && this.instead.checked };
    const content = JSON.stringify(body);
    if (this.sent[0] !== content) this.sent = [content, newKey()];
    this.go.disabled = true;
    this.check.stop();
    this.asked += 1;
    try {
      const job = await post("/v1/form/submit", { ...body, key: this.sent[1] });
      toast(`${job.id} submitted`);
      const { grid, rows } = job.spec.sweep ?? {};
      location.hash = `#/${Object.keys(grid ?? {}).length || rows?.length ? "sweep" : "job"}/${job.id}`;
    } catch (error) {
      if (!error.status)
        error.message = `${error.message} Submit again when the connection is back; no second job is created.`;
      this.wrong(error, true);
    }
    this.go.disabled = false;
  }
}

const lines = (text) =>
  String(text ?? "")
    .split("\n")
    .map((line) => line.trim())
    .filter(Boolean);
const text = (value) =>
  Array.isArray(value) ? value.join("\n") : value === undefined || value === null ? "" : String(value);
const filledIn = (value) =>
  Array.isArray(value) ? value.length > 0 : value !== "" && value !== false && value !== undefined && value !== null;
