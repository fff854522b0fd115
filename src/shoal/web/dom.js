// Builds elements; text is always text, never markup.

import { handle } from "./patch.js";

const SVG = "http://www.w3.org/2000/svg";

/**
 * @template {HTMLElement | SVGElement} E
 * @param {E} element
 * @param {Record<string, any> | null | undefined} props
 * @param {any[]} children
 * @returns {E}
 */
function fill(element, props, children) {
  const acts = {};
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) acts[name.slice(2)] = value;
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "value" || name === "checked" || name === "selected" || name === "disabled")
      element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  handle(element, acts);
  return element;
}

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, any> | null} [props]
 * @param {...any} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
/**
 * @template {keyof SVGElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, any> | null} [props]
 * @param {...any} children
 * @returns {SVGElementTagNameMap[T]}
 */
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

/** Calls at most once per `ms`, and always makes the last call. */
export function throttled(ms, act) {
  let timer = 0;
  let last = 0;
  const call = () => {
    last = performance.now();
    timer = 0;
    act();
  };
  const later = () => {
    if (!timer) timer = setTimeout(call, Math.max(0, ms - (performance.now() - last)));
  };
  later.stop = () => {
    clearTimeout(timer);
    timer = 0;
  };
  return later;
}

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// -- text and figures ----------------------------------------------------------------------

export const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
// Made once: a call of toLocaleString makes them again, which takes longer than the rest of a row.
const WHOLE = new Intl.NumberFormat("en-US");
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
export const whole = (number) => WHOLE.format(Math.round(number));

/** The same number of digits after the point, so that columns align: 1,234.5. Too little to show is "< 0.1". */
export function fixed(number, digits = 1) {
  if (number === null || number === undefined || !Number.isFinite(number)) return "–";
  const least = 10 ** -digits;
  if (number > 0 && number < least / 2) return `< ${least.toFixed(digits)}`;
  return number.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// As `model/amounts.py` has them.
const SIGNS = { USD: "$", EUR: "€", GBP: "£", JPY: "¥" };
/** In the price list's currency: $12.40, €41,300, 12.40 CHF; a dash if it is not known. */
export function money(value, currency) {
  if (value === null || value === undefined || !currency) return "–";
  const size = Math.abs(value);
  const number = fixed(size, size < 1000 ? 2 : 0);
  const sign = SIGNS[currency.toUpperCase()];
  return `${value < 0 ? "-" : ""}${sign ? sign + number : `${number} ${currency}`}`;
}

/** A cell of a column of numbers, rounded for people; the exact value is its tooltip. */
export const number = (text, exact, props) =>
  h(
    "td",
    { class: "num", title: exact === undefined || String(exact) === text ? null : String(exact), ...props },
    text,
  );

/** The whole view in one sentence. */
export const verdict = (text, tone = "") => (text ? h("p", { class: `verdict ${tone}`, role: "status" }, text) : null);

/** Three significant digits: 0.0123, 1.23, 12.3, 123, 1.2k. */
export function short(number) {
  if (number === null || number === undefined || !Number.isFinite(number)) return "–";
  const size = Math.abs(number);
  if (size >= 1e6) return `${trim(number / 1e6)}M`;
  if (size >= 1e4) return `${trim(number / 1e3)}k`;
  if (size >= 100) return whole(number);
  if (size === 0) return "0";
  return String(Number(number.toPrecision(3)));
}
const trim = (number) => String(Number(number.toPrecision(3)));

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; count >= 1000 && at < units.length - 1; at += 1) count /= 1000;
  return `${trim(count)} ${units[at]}`;
}

export function span(ms) {
  if (ms === null || ms === undefined) return "–";
  const seconds = Math.max(0, ms) / 1000;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

export const ago = (ms, now) => `${span(now - ms)} ago`;
export const clock = (ms) => CLOCK.format(ms);
export function moment(ms, now = Date.now()) {
  const day = new Date(ms).toDateString() === new Date(now).toDateString();
  return (day ? CLOCK : DAY).format(ms);
}
export const natural = new Intl.Collator("en", { numeric: true }).compare;
export const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;

const LOOKS = {
  __proto__: null, // a neighbor may name any state
  running: ["live", "▶"],
  ready: ["ok", "●"],
  succeeded: ["ok", "✓"],
  waiting: ["", "◔"],
  starting: ["live", "◌"],
  stopping: ["warn", "■"],
  failed: ["bad", "✕"],
  "timed-out": ["bad", "⏱"],
  cancelled: ["", "⊘"],
  lost: ["bad", "✕"],
  silent: ["warn", "?"],
  suspect: ["warn", "?"],
  quarantined: ["bad", "!"],
  draining: ["warn", "↓"],
  drained: ["warn", "⏏"],
  cordoned: ["warn", "–"],
  joining: ["", "…"],
  dozing: ["sleep", "☽"],
  asleep: ["sleep", "☾"],
  waking: ["sleep", "☀"],
  away: ["live", "⇢"],
  rolling: ["live", "↻"],
  failing: ["bad", "!"],
  idle: ["", "○"],
  down: ["bad", "✕"],
};
export const glyphOf = (state) => LOOKS[state]?.[1] ?? "•";
export function chip(state, text = state) {
  const [tone, glyph] = LOOKS[state] ?? ["", "•"];
  return h("span", { class: `chip ${tone}`, "data-glyph": glyph, "data-state": state }, text);
}

/** @param {Api.JobView | Api.JobLine | Api.JobRow} job */
export function shape(job) {
  const gpus = !job.gpus
    ? "no GPU"
    : (job.gpu_milli ?? 1000) < 1000
      ? `${(job.gpu_milli ?? 0) / 1000 || "part of a"} GPU`
      : plural(job.gpus, "GPU");
  const members = job.size && job.size !== job.members ? job.size : (job.members ?? 1);
  return members > 1 ? `${members} × ${gpus}` : gpus;
}
/** @param {{ id: string, name?: string }} job */
export const jobName = (job) => (job.name ? `${job.id} ${job.name}` : job.id);
export const empty = (text, command) =>
  h("div", { class: "empty" }, h("p", {}, text), command ? h("code", {}, command) : null);

/**
 * An event in a list: the server's sentence about it, in which the job's id is a link.
 * @param {Api.Recorded} recorded
 */
export function eventLine({ seq, event, text = "" }) {
  const job = event.job && text.startsWith(`${event.job} `) ? event.job : "";
  const words = job ? [h("a", { href: `#/job/${job}`, "data-key": job }, job), text.slice(job.length)] : text;
  return h(
    "li",
    { "data-key": seq },
    h("time", { datetime: new Date(event.at_ms).toISOString() }, clock(event.at_ms)),
    h("span", {}, words),
  );
}
