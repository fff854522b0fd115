// What a view looks like while it is loading, stale, failed or not allowed: one mechanism for all views.

import { observe, Refused } from "./api.js";
import { clock, h } from "./dom.js";
import { cluster, listen } from "./live.js";

const FIRST_MS = 5000; // without a first word from the controller: the page says so
const PATIENCE_MS = 3000; // what is not answered by then shows its own placeholder in a view that is otherwise there
const plainly = (path) => path.split("?")[0];
/** Answers that mean "not there" or "not like this" are the view's to explain. */
const serious = (error) => !error.status || error.status === 403 || error.status >= 500;

// A view need not catch what the frame says for it.
addEventListener("unhandledrejection", (event) => {
  if (event.reason instanceof Refused && serious(event.reason)) event.preventDefault();
});

/** One opened view. What it asks for is followed: it is shown when all of it is answered, and says when it cannot be
 * brought up to date. The view draws into `root` and knows nothing of this. */
export class Opening {
  /** `shape`: the placeholders, from top to bottom. `retry`: opens the view again. */
  constructor(main, { title, shape = ["bar", "table"], retry }) {
    this.main = main;
    this.title = title;
    this.retry = retry;
    this.mounted = false;
    this.waiting = 0;
    this.first = 0; // requests that the view sent while it was mounted, and that are not answered
    this.problem = null;
    /** @type {Map<string, { error: Error, at: number }>} */
    this.late = new Map(); // by path: what could not be brought up to date
    this.root = h("fieldset", { class: "view", role: "presentation" });
    this.root.disabled = !cluster.linked && cluster.heard > 0;
    this.cover = h(
      "div",
      { class: "stack cover" },
      h("p", { class: "heading" }, title),
      shape.map((kind) => h("i", { class: `bone ${kind}` })),
    );
    main.replaceChildren(this.root, this.cover);
    this.enter("loading");
    observe((path) => this.ask(path));
    this.stop = listen((change) => {
      if (change.link && this.state === "failed") this.retry();
    });
  }

  close() {
    this.stop();
    this.closed = true;
    clearTimeout(this.timer);
  }

  enter(state) {
    this.state = state;
    this.main.dataset.state = state;
    this.main.setAttribute("aria-busy", String(state === "loading"));
    if (state === "ready") this.cover.remove();
    show();
  }

  /** Mounts the view; what it asks for at once is waited for longest. */
  mount(act) {
    const stop = act(this.root);
    this.mounted = true;
    this.timer = setTimeout(() => {
      this.settle();
      this.timer = setTimeout(() => {
        this.impatient = true;
        this.settle();
      }, PATIENCE_MS);
    });
    return stop;
  }

  ask(path) {
    const early = !this.mounted;
    this.waiting += 1;
    if (early) this.first += 1;
    return (error) => {
      this.waiting -= 1;
      if (early) this.first -= 1;
      if (this.closed) return;
      if (error && serious(error)) this.suffer(path, error);
      else if (this.late.delete(plainly(path))) show();
      // What the view asks for next, it asks for before this.
      if (this.state === "loading") setTimeout(() => this.settle());
    };
  }

  suffer(path, error) {
    if (this.state === "loading") this.problem ??= { path, error };
    else if (this.state !== "ready") return;
    else if (error.status === 403) this.deny(error.message);
    else {
      const at = this.late.get(plainly(path))?.at ?? cluster.heard;
      this.late.set(plainly(path), { error, at });
      show();
    }
  }

  settle() {
    if (this.closed || this.state !== "loading" || !this.mounted) return;
    if (this.waiting && !(this.impatient && !this.first && cluster.linked) && !this.problem) return;
    if (!this.problem) this.enter("ready");
    else if (this.problem.error.status === 403) this.deny(this.problem.error.message);
    else this.fail(`${plainly(this.problem.path)}: ${this.problem.error.message}`);
  }

  fail(text, act = this.retry) {
    this.instead(
      "failed",
      `Could not load ${this.title}`,
      text,
      h("button", { class: "primary", onclick: act }, "Retry"),
    );
  }
  deny(text) {
    this.instead("denied", "You do not have access", text, h("a", { class: "button", href: "#/" }, "Go to Cluster"));
  }

  instead(state, title, text, way) {
    this.cover.replaceChildren(
      h("div", { class: "empty", role: "alert" }, h("h1", {}, title), h("p", {}, text), h("p", {}, way)),
    );
    if (!this.cover.isConnected) this.main.append(this.cover);
    this.enter(state);
  }
}

/** The bar over the whole width, and what it says: that nothing is heard, or that the view is out of date. */
export const bar = h("div", { class: "stale", role: "status", hidden: true });
let opening = () => null;
let unheard = false;
let focused = null;

export function watchLink(current) {
  opening = current;
  unheard = false;
  const timer = setTimeout(() => {
    unheard = true;
    show();
  }, FIRST_MS);
  const stop = listen((change) => {
    if ("link" in change) show();
  });
  show();
  return () => {
    clearTimeout(timer);
    stop();
    document.documentElement.classList.remove("is-stale");
  };
}

function show() {
  const [late] = opening()?.late.values() ?? [];
  const cut = !cluster.linked && (cluster.heard > 0 || unheard);
  const text = !cut
    ? late && `Update failed: ${late.error.message}. Data from ${clock(late.at)}.`
    : cluster.heard
      ? `Disconnected: data from ${clock(cluster.heard)}`
      : "Disconnected: no data yet";
  bar.hidden = !text;
  bar.replaceChildren(
    text || "",
    cut
      ? h("span", {}, "Reconnecting. Actions are disabled.")
      : h("button", { onclick: () => opening()?.retry() }, "Retry"),
  );
  document.documentElement.classList.toggle("is-stale", Boolean(text));
  disable(!cluster.linked && cluster.heard > 0);
}

/** Nothing can be changed on a page that shows the past: no button, no field, in the view and in dialogs. */
function disable(off) {
  const active = document.activeElement;
  for (const one of document.querySelectorAll("fieldset.view, fieldset.acts")) {
    if (off && one.contains(active)) focused = active;
    /** @type {HTMLFieldSetElement} */ (one).disabled = off;
  }
  if (off || !focused) return;
  if (document.activeElement === document.body && focused.isConnected) focused.focus({ preventScroll: true });
  focused = null;
}
