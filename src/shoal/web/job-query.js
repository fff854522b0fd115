// What people look for, as the API wants it: words, `key:value` words and the choices of the view.

import { get } from "./api.js";
import { jobName } from "./dom.js";
import { cluster, now } from "./live.js";

const KEYS = {
  user: "user",
  tenant: "tenant",
  state: "state",
  label: "label",
  node: "on_node",
  name: "name",
  service: "service",
  array: "array",
  group: "group",
  since: "since",
  until: "until",
};
const UNITS = { s: 1000, m: 60_000, h: 3_600_000, d: 86_400_000, w: 604_800_000 };
export const FILTERS = ["state", "user", "tenant", "node", "service", "array", "label", "group", "since", "until"];

/** "2h" is two hours ago; a number is a time itself. */
function moment(value) {
  const [, count, unit] = value.match(/^(\d{1,6})([smhdw])$/) ?? [];
  return unit
    ? Math.max(0, Math.round(now()) - Number(count) * UNITS[unit])
    : /^\d{1,15}$/.test(value)
      ? Number(value)
      : 0;
}

/** "state:failed since:2h train-* lr=0.1" and { user: "ada" } together. Words that are no filter are looked for. */
export function query(text, choices = {}) {
  const found = new URLSearchParams();
  const words = [];
  const take = (key, value) => {
    if (key !== "since" && key !== "until") found.append(KEYS[key], value);
    else if (moment(value)) found.set(`${key}_ms`, String(moment(value)));
  };
  for (const word of text.trim().split(/\s+/).filter(Boolean)) {
    const at = word.indexOf(":");
    const key = word.slice(0, at);
    if (at > 0 && Object.hasOwn(KEYS, key) && word.length > at + 1) take(key, word.slice(at + 1));
    else if (/[*?]/.test(word)) found.set("name", word);
    else words.push(word);
  }
  for (const key of FILTERS) if (choices[key]) take(key, choices[key]);
  if (words.length) found.set("q", words.join(" "));
  return found;
}

const DEBOUNCE_MS = 200;
const OFFERED = 8;
let turn = 0;

/** For the palette: jobs that the page does not know yet, the newest first. */
export async function searchJobs(text) {
  const mine = ++turn;
  if (text.trim().length < 2) return [];
  await new Promise((resolve) => setTimeout(resolve, DEBOUNCE_MS));
  if (mine !== turn) return [];
  const rows = await get(`/v1/jobs?${query(text)}&sort=-submitted&limit=${OFFERED}`, { aside: true });
  const all = {
    title: `All jobs matching “${text.trim()}”`,
    hint: "jobs",
    keep: true,
    run: () => {
      location.hash = `#/jobs?q=${encodeURIComponent(text.trim())}`;
    },
  };
  const unknown = rows.filter((row) => !cluster.jobs.has(row.id) && !cluster.ended.has(row.id));
  return [
    ...unknown.map((row) => ({
      title: jobName(row),
      hint: `job · ${row.state}`,
      keep: true,
      run: () => {
        location.hash = `#/job/${row.id}`;
      },
    })),
    ...(rows.length ? [all] : []),
  ];
}
