// The schedules: when each runs next, and how its last run ended.

import { get } from "./api.js";
import { chip, h, moment, plural, whole } from "./dom.js";
import { now } from "./live.js";
import { replace } from "./patch.js";
import { table } from "./table.js";

const AGAIN_MS = 10_000;
const SHOWN = 100;
const NEXT_SHOWN = 3;

/** Keeps a card up to date; it is hidden while there are no schedules. */
export function watchSchedules(card) {
  let alive = true;
  async function ask() {
    if (document.hidden) return;
    try {
      const found = await get("/v1/schedules");
      if (alive) draw(card, found);
    } catch {
      /* what was shown stays until the next answer */
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
  card.hidden = !found.length;
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
      h(
        "td",
        { class: "dim small" },
        [
          plural(one.runs, "run"),
          one.missed && `${whole(one.missed)} missed`,
          one.skipped && `${whole(one.skipped)} skipped`,
        ]
          .filter(Boolean)
          .join(", "),
      ),
    ),
  );
  replace(
    card,
    h(
      "summary",
      {},
      h("h2", {}, "Schedules"),
      h("span", { class: "dim small" }, ` ${plural(found.length, "schedule")}, times as in your browser's time zone`),
    ),
    table(["Schedule", "When", "", "Next runs", "Last run", ""], rows),
    found.length > SHOWN
      ? h("p", { class: "dim small" }, `and ${whole(found.length - SHOWN)} more: run shoal schedule list`)
      : null,
  );
}
