// Colours for data, separate from the page's own: any number of them, equally prominent.

import { css } from "./dom.js";

export const isDark = () => css("color-scheme") === "dark" || getComputedStyle(document.documentElement).colorScheme === "dark";

const number = (id) => Number(/\d+/.exec(id)?.[0] ?? 0);

/** The golden angle keeps neighbours apart, for any number of them. */
export function hue(index, dark = isDark()) {
  const angle = (index * 137.508 + 205) % 360;
  const light = dark ? 56 + (index % 3) * 6 : 60 + (index % 3) * 6;
  return `hsl(${angle.toFixed(0)} ${dark ? 42 : 52}% ${light}%)`;
}
const known = new Map(); // cached, because up to 16,000 cells are painted often
/** Jobs of others, which have no number here, are grey. */
export function jobColour(id, dark = isDark()) {
  if (!id || id.startsWith("@")) return dark ? "#5b6770" : "#9aa5ad";
  const key = dark ? `${id}d` : id;
  let colour = known.get(key);
  if (!colour) {
    if (known.size > 20_000) known.clear();
    colour = hue(number(id), dark);
    known.set(key, colour);
  }
  return colour;
}

// One hue from idle to busy: its lightness shows the value, so it does not depend on colour vision.
const HEAT = { light: [[223, 233, 239], [120, 178, 205], [8, 84, 116]], dark: [[34, 47, 58], [44, 106, 137], [120, 206, 243]] };
export function heatColour(share, dark = isDark()) {
  const stops = HEAT[dark ? "dark" : "light"], part = Math.max(0, Math.min(100, share)) / 50;
  const from = stops[part < 1 ? 0 : 1], to = stops[part < 1 ? 1 : 2], mix = part < 1 ? part : part - 1;
  return `rgb(${from.map((value, at) => Math.round(value + (to[at] - value) * mix)).join(" ")})`;
}

// The ledger's accounts: useful time is blue or green, lost time is warm, free time is grey.
const ACCOUNTS = {
  useful: [200, 62, 45], serving: [174, 55, 40], warm: [174, 30, 66], startup: [222, 45, 68], checkpoint: [262, 35, 64], asleep: [250, 42, 58], straggler: [36, 78, 56],
  recompute: [8, 64, 56], preempted: [20, 68, 64], idle: [48, 62, 60], fragmented: [300, 22, 66], reserved: [240, 22, 74], free: [210, 12, 84],
  closed: [210, 8, 62], quarantined: [340, 45, 55], lost: [0, 55, 42],
};
export const ACCOUNT_ORDER = Object.keys(ACCOUNTS);
export function accountColour(name, dark = isDark()) {
  const [angle, strength, light] = ACCOUNTS[name] ?? [(name.length * 47) % 360, 30, 60];
  return `hsl(${angle} ${dark ? strength * 0.85 : strength}% ${dark ? (name === "free" ? 27 : Math.max(40, light - 6)) : light}%)`;
}
export const accountRank = (name) => { const at = ACCOUNT_ORDER.indexOf(name); return at < 0 ? 99 : at; };
