// Text to take along: shown as it is, with a button that copies it.

import { toast } from "./dialog.js";
import { h } from "./dom.js";

/** `label` says what it is. A browser that does not let a page copy gets it selected instead. */
export function copyable(text, label) {
  const code = h("pre", { class: "code", tabindex: "0", "aria-label": label }, text);
  return h(
    "div",
    { class: "copyable", "data-copy": label },
    code,
    h(
      "button",
      { "aria-label": `Copy: ${label}`, onclick: (event) => copy(event.currentTarget.previousElementSibling) },
      "Copy",
    ),
  );
}

async function copy(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    toast("Copied");
  } catch {
    getSelection().selectAllChildren(code);
    toast("Press Ctrl-C to copy what is selected");
  }
}
