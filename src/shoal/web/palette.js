// The palette (Ctrl-K): views, jobs, nodes, services, people and actions, by typing.

import { find } from "./commands.js";
import { h } from "./dom.js";
import { replace } from "./patch.js";

const SHOWN_MAX = 12;

export function watchKeys() {
  addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.altKey && !event.shiftKey) {
      event.preventDefault();
      show();
      return;
    }
    if (event.key === "/" && !typing(event.target) && !event.ctrlKey && !event.metaKey && !event.altKey) {
      const box = document.querySelector("main input[type=search]");
      if (box) {
        event.preventDefault();
        box.focus();
        box.select();
      }
    }
  });
}

const typing = (element) =>
  element instanceof HTMLElement && (element.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(element.tagName));

export function show() {
  if (document.querySelector("dialog[open]")) return;
  let rows = [];
  let at = 0;
  let asked = 0;
  const list = h("ul", { id: "palette-list", role: "listbox", "aria-label": "Commands" });
  const input = h("input", {
    type: "text",
    role: "combobox",
    "aria-expanded": "true",
    "aria-controls": "palette-list",
    "aria-label": "Search or run a command",
    placeholder: "Search jobs, nodes, services, people, or type an action: drain n6",
    autocomplete: "off",
    spellcheck: "false",
    maxlength: 200,
  });
  const box = h("dialog", { class: "palette", "aria-label": "Command palette" }, input, list);

  function draw() {
    at = Math.max(0, Math.min(at, rows.length - 1));
    replace(
      list,
      rows.length
        ? rows.map((one, index) =>
            h(
              "li",
              {
                id: `palette-${index}`,
                role: "option",
                "aria-selected": String(index === at),
                onpointerdown: (event) => event.preventDefault(),
                onclick: () => run(one),
              },
              h("span", {}, one.title),
              h("span", { class: "dim small" }, one.hint ?? ""),
            ),
          )
        : h("li", { class: "dim", role: "option", "aria-disabled": "true" }, "No results"),
    );
    input.setAttribute("aria-activedescendant", rows.length ? `palette-${at}` : "");
    list.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
  }
  function look() {
    const turn = ++asked;
    find(input.value, (found) => {
      if (turn === asked) {
        rows = found.slice(0, SHOWN_MAX);
        draw();
      }
    });
  }
  function run(one) {
    box.close();
    one.run();
  }

  input.addEventListener("input", () => {
    at = 0;
    look();
  });
  input.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (move && rows.length) {
      event.preventDefault();
      at = (at + move + rows.length) % rows.length;
      draw();
    }
    if (event.key === "Enter" && rows[at]) {
      event.preventDefault();
      run(rows[at]);
    }
  });
  box.addEventListener("click", (event) => {
    if (event.target === box) box.close();
  });
  box.addEventListener("close", () => {
    asked += 1;
    box.remove();
  });
  document.body.append(box);
  box.showModal();
  input.focus();
  look();
}
