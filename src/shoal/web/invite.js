// Accepting an invite. It takes a click: programs that look at links in messages must not use it up.

import { signIn } from "./api.js";
import { h } from "./dom.js";

/**
 * Resolves when the person is signed in.
 * @returns {Promise<void>}
 */
export const accepted = (root, invite) =>
  new Promise((resolve) => {
    const problem = h("p", { class: "problem", role: "alert", hidden: true });
    const go = h("button", { class: "primary" }, "Accept invite");
    const form = h(
      "form",
      {},
      h("img", { src: "/web/icon.svg", alt: "" }),
      h("h1", {}, "You are invited to Shoal"),
      h("p", { class: "dim" }, "The invite works once. Accepting it signs you in on this browser."),
      problem,
      go,
      h("p", {}, h("a", { href: "/" }, "Sign in with a token instead")),
    );
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      go.disabled = true;
      try {
        await signIn({ invite });
        resolve();
      } catch (error) {
        problem.hidden = false;
        problem.textContent = error.message;
        go.disabled = error.status === 401;
      }
    });
    root.replaceChildren(h("div", { class: "sign-in" }, form));
    go.focus();
  });
