// The schedules: when each runs next, and how its last run ended.

import { get } from "./api.js";
import { chip, empty, h, moment, plural, whole } from "./dom.js";
import { now } from "./live.js";
import { replace } from "./patch.js";
import { table } from "./table.js";

const AGAIN_MS = 10_000;
const SHOWN = 100;
const NEXT_SHOWN = 3;

/** Keeps a card up to date. Returns how to stop it. */
export function watchSchedules(card) {
  let alive = true;
  let known = false;
  async function ask() {
    if (document.hidden && known) return;
    try {
      const found = await get("/v1/schedules");
      if (alive) draw(card, found);
      known = true;
    } catch (error) {
      // what was shown stays until the next answer
      if (alive && !known) replace(card, h("p", { class: "problem" }, error.message));
    }
  }
  const timer = setInterval(ask, AGAIN_MS);
  ask();
  return () => {
    alive = false;
    clearInterval(timer);
  };
}

/**
 * @param {HTMLElement} card
 * @param {Api.ScheduleView[]} found
 */
function draw(card, found) {
  if (!found.length) {
    replace(card, empty("No schedules yet. To add one:", 'shoal run --cron "0 3 * * *" -- python nightly.py'));
    return;
  }
  const rows = found.slice(0, SHOWN).map((one) =>
    h(
      "tr",
      { "data-key": `${one.tenant}/${one.name}`, "data-schedule": one.name },
      h("td", {}, one.name, h("div", { class: "dim small" }, `${one.tenant}${one.user ? ` · ${one.user}` : ""}`)),
      h("td", {}, h("code", {}, one.cron), h("div", { class: "dim small" }, one.timezone)),
      h(
        "td",
        {},
        chip(one.state === "paused" ? "cordoned" : "ready", one.state),
        one.why ? h("div", { class: "dim small" }, one.why) : null,
      ),
      h(
        "td",
        { "data-name": "next" },
        one.next_ms
          .slice(0, NEXT_SHOWN)
          .map((ms) => moment(ms, now()))
          .join(", ") || "–",
      ),
      h(
        "td",
        { "data-name": "last" },
        one.last_job
          ? [h("a", { href: `#/job/${one.last_job}` }, one.last_job), " ", one.last_state ? chip(one.last_state) : null]
          : "–",
      ),
      h("td", { class: "num", "data-name": "runs" }, whole(one.runs)),
      h("td", { class: "num", "data-name": "missed" }, one.missed ? whole(one.missed) : "–"),
      h("td", { class: "num", "data-name": "skipped" }, one.skipped ? whole(one.skipped) : "–"),
    ),
  );
  replace(
    card,
    h("p", { class: "dim small" }, "Times are in your time zone."),
    table(["Schedule", "Cron", "State", "Next runs", "Last run", "num:Runs", "num:Missed", "num:Skipped"], rows),
    found.length > SHOWN
      ? h("p", { class: "dim small" }, `${plural(found.length - SHOWN, "more schedule")}: run shoal schedule list`)
      : null,
  );
}
