// Asks for confirmation, then shows the result.

import { h } from "./dom.js";
import { cluster } from "./live.js";

/**
 * Describes the action and asks; `act` gets the form's values. Resolves to true when it was done. A field with
 * `choices` ([value, label]) is a select; `body` is shown below the text; `changed` gets the
 * values when one was.
 */
export function confirm({
  title,
  text = "",
  verb,
  danger = false,
  fields = [],
  body = null,
  wide = false,
  changed = null,
  act,
}) {
  // one question at a time: a second click is not a second one
  if (document.querySelector("dialog[open]")) return Promise.resolve(false);
  return new Promise((resolve) => {
    const problem = h("p", { class: "problem", role: "alert", hidden: true });
    const go = h("button", { class: `primary ${danger ? "danger" : ""}`, type: "submit" }, verb);
    const inputs = fields.map((field) =>
      h(
        "label",
        { class: "field" },
        field.label,
        field.choices
          ? select(field)
          : h("input", {
              name: field.name,
              type: field.type ?? "number",
              min: field.min,
              max: field.max,
              value: field.value,
              maxlength: 160,
              required: !field.optional,
            }),
      ),
    );
    const form = h(
      "form",
      { method: "dialog", novalidate: false, onchange: () => changed?.(Object.fromEntries(new FormData(form))) },
      h("h2", {}, title),
      text ? h("p", { class: "dim" }, text) : null,
      body,
      h("fieldset", { class: "acts", disabled: !cluster.linked }, inputs),
      problem,
      h(
        "div",
        { class: "row" },
        h("button", { type: "button", onclick: () => box.close() }, "Keep as is"),
        h("fieldset", { class: "acts", disabled: !cluster.linked }, go),
      ),
    );
    let done = false;
    const box = h(
      "dialog",
      {
        "aria-label": title,
        class: wide ? "wide" : null,
        onclose: () => {
          box.remove();
          resolve(done);
        },
      },
      form,
    );
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      go.disabled = true;
      try {
        const answer = await act(Object.fromEntries(new FormData(form)));
        done = true;
        box.close();
        toast(answer?.note || `${title}: done`);
      } catch (error) {
        problem.hidden = false;
        problem.textContent = error.message;
        go.disabled = false;
      }
    });
    document.body.append(box);
    box.showModal();
    (inputs[0]?.querySelector("input, select") ?? go).focus();
  });
}

const select = ({ name, choices, value }) =>
  h(
    "select",
    { name },
    choices.map(([one, label]) => h("option", { value: one, selected: one === value }, label)),
  );

export function toast(text) {
  document.querySelector(".toast")?.remove();
  const bread = h("div", { class: "toast", role: "status" }, text);
  document.body.append(bread);
  setTimeout(() => bread.remove(), 4000);
}
