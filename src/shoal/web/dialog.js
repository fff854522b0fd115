// Asks for confirmation, then shows the result.

import { h } from "./dom.js";

/** Describes the action and asks; `act` gets the form's values. Resolves to true when it was done. */
export function confirm({ title, text, verb, danger = false, fields = [], act }) {
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
        h("input", {
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
      { method: "dialog", novalidate: false },
      h("h2", {}, title),
      h("p", { class: "dim" }, text),
      inputs,
      problem,
      h("div", { class: "row" }, h("button", { type: "button", onclick: () => box.close() }, "Keep as is"), go),
    );
    let done = false;
    const box = h(
      "dialog",
      {
        "aria-label": title,
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
    (inputs[0]?.querySelector("input") ?? go).focus();
  });
}

export function toast(text) {
  document.querySelector(".toast")?.remove();
  const bread = h("div", { class: "toast", role: "status" }, text);
  document.body.append(bread);
  setTimeout(() => bread.remove(), 4000);
}
