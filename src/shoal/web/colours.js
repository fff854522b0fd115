// Colours of data, apart from the page's own: as many as there are jobs, alike in weight.

import { css } from "./dom.js";

export const isDark = () => css("color-scheme") === "dark" || getComputedStyle(document.documentElement).colorScheme === "dark";

const number = (id) => Number(/\d+/.exec(id)?.[0] ?? 0);

/** The golden angle keeps neighbours apart, however many there are. */
export function hue(index, dark = isDark()) {
  const angle = (index * 137.508 + 205) % 360;
  const light = dark ? 56 + (index % 3) * 6 : 60 + (index % 3) * 6;
  return `hsl(${angle.toFixed(0)} ${dark ? 42 : 52}% ${light}%)`;
}
const known = new Map(); // 16,000 cells are painted again and again
export function jobColour(id, dark = isDark()) {
  const key = dark ? `${id}d` : id;
  let colour = known.get(key);
  if (!colour) {
    if (known.size > 20_000) known.clear();
    colour = hue(number(id), dark);
    known.set(key, colour);
  }
  return colour;
}

/** From idle to busy, one hue: readable without telling colours apart. -1 is not known. */
export function heatColour(share, dark = isDark()) {
  if (share < 0) return dark ? "#3a4752" : "#c5ced6";
  const part = share / 100;
  return dark ? `hsl(${212 - 172 * part} ${30 + 45 * part}% ${28 + 34 * part}%)` : `hsl(${205 - 180 * part} ${35 + 45 * part}% ${84 - 34 * part}%)`;
}

// The ledger's accounts: what was of use is blue and green, what was lost is warm, what was free is grey.
const ACCOUNTS = {
  useful: [200, 62, 45], serving: [174, 55, 40], warm: [174, 30, 66], startup: [222, 45, 68], checkpoint: [262, 35, 64], straggler: [36, 78, 56],
  recompute: [8, 64, 56], preempted: [20, 68, 64], idle: [48, 62, 60], fragmented: [300, 22, 66], reserved: [240, 22, 74], free: [210, 12, 84],
  closed: [210, 8, 62], quarantined: [340, 45, 55], lost: [0, 55, 42],
};
export const ACCOUNT_ORDER = Object.keys(ACCOUNTS);
export function accountColour(name, dark = isDark()) {
  const [angle, strength, light] = ACCOUNTS[name] ?? [(name.length * 47) % 360, 30, 60];
  return `hsl(${angle} ${dark ? strength * 0.85 : strength}% ${dark ? (name === "free" ? 27 : Math.max(40, light - 6)) : light}%)`;
}
export const accountRank = (name) => { const at = ACCOUNT_ORDER.indexOf(name); return at < 0 ? 99 : at; };
