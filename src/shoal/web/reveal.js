// Shows a secret once, with lines to copy; it is in no address and in no store.

import { copyable } from "./copy.js";
import { h } from "./dom.js";

function box(title, ...inside) {
  const close = h("button", { class: "primary", type: "submit" }, "Done");
  const dialog = h(
    "dialog",
    { "aria-label": title, class: "wide", onclose: () => dialog.remove() },
    h("form", { method: "dialog" }, h("h2", {}, title), inside, h("div", { class: "row" }, close)),
  );
  document.body.append(dialog);
  dialog.showModal();
  close.focus();
}

const login = (fingerprint = "") =>
  `shoal login ${location.origin}${fingerprint ? ` --fingerprint ${fingerprint}` : ""}`;

export const reveal = {
  /** @param {Api.SecretTokenView} made */
  token: ({ token, secret }) =>
    box(
      `Token for ${token.user}`,
      h("p", { class: "note" }, "Copy the token now: it is shown only once."),
      copyable(secret, "Token"),
      h("p", { class: "dim" }, "To use it from a terminal, run this and paste the token when asked:"),
      copyable(login(), "Command"),
    ),
  /**
   * @param {Api.SecretApiKeyView} made
   * @param {string} base the address of a service, if there is one
   */
  apiKey: ({ key, secret }, base) =>
    box(
      `API key for ${key.user}`,
      h("p", { class: "note" }, "Copy the key now: it is shown only once."),
      copyable(secret, "API key"),
      base
        ? [
            h("p", { class: "dim" }, "In a program, with the key in place of KEY:"),
            copyable(`client = OpenAI(base_url="${base}", api_key="KEY")`, "OpenAI client"),
          ]
        : null,
    ),
  /** @param {Api.InviteView} made */
  invite: ({ token, code, fingerprint }) =>
    box(
      `Invite for ${token.user}`,
      h("p", { class: "note" }, "Send this link to them. It works once, expires in 7 days and is shown only now."),
      copyable(`${location.origin}/#invite=${code}`, "Invite link"),
      h("p", { class: "dim" }, "For a terminal: this command, and the code when it asks for a token."),
      copyable(login(fingerprint), "Command"),
      copyable(code, "Code"),
    ),
};
