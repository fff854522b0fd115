// Colours for data, separate from the page's own: any number of them, equally prominent.

import { css } from "./dom.js";

export const isDark = () =>
  css("color-scheme") === "dark" || getComputedStyle(document.documentElement).colorScheme === "dark";

export const numberOf = (id) => Number.parseInt(id.slice(1), 10) || 0;

// Lightness, chroma and hue (OKLCH) of 16 colours, found by a search: any two differ for every common kind of colour
// vision, and those of successive jobs in lightness too. tests/web/test_map.py simulates and measures them.
const PALETTE = [
  [0.46, 0.15, 320],
  [0.62, 0.11, 320],
  [0.78, 0.11, 0],
  [0.66, 0.15, 120],
  [0.54, 0.15, 260],
  [0.78, 0.11, 240],
  [0.58, 0.06, 160],
  [0.78, 0.11, 120],
  [0.46, 0.06, 40],
  [0.7, 0.15, 0],
  [0.46, 0.15, 300],
  [0.62, 0.11, 120],
  [0.54, 0.06, 260],
  [0.74, 0.11, 120],
  [0.54, 0.11, 100],
  [0.66, 0.15, 240],
];
const LIGHTER = 0.06; // on a dark page
const shade = (index) => PALETTE[index % PALETTE.length];
const SHADES = [false, true].map((dark) =>
  PALETTE.map(([light, chroma, angle]) => rgb(light + (dark ? LIGHTER : 0), chroma, (angle * Math.PI) / 180)),
);

export const hue = (index, dark = isDark()) => SHADES[Number(dark)][index % PALETTE.length];
/** Text on a colour: contrast of at least 4.5. */
export const inkOn = (index, dark = isDark()) =>
  shade(index)[0] + (dark ? LIGHTER : 0) > 0.565 ? "#000000" : "#ffffff";

/** OKLCH as #rrggbb, which a canvas reads fastest: up to 16,000 cells are painted often. */
function rgb(light, chroma, angle) {
  const a = chroma * Math.cos(angle);
  const b = chroma * Math.sin(angle);
  const [l, m, s] = [
    light + 0.3963377774 * a + 0.2158037573 * b,
    light - 0.1055613458 * a - 0.0638541728 * b,
    light - 0.0894841775 * a - 1.291485548 * b,
  ].map((one) => one ** 3);
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  const byte = (one) => {
    const part = Math.min(1, Math.max(0, one));
    return Math.round(255 * (part <= 0.0031308 ? 12.92 * part : 1.055 * part ** (1 / 2.4) - 0.055));
  };
  return `#${linear.map((one) => byte(one).toString(16).padStart(2, "0")).join("")}`;
}

/** Jobs of others, which have no number here, are grey. */
export function jobColour(id, dark = isDark()) {
  if (!id || id.startsWith("@")) return dark ? "#5b6770" : "#9aa5ad";
  return hue(numberOf(id), dark);
}

// One hue from idle to busy: its lightness shows the value, so it does not depend on colour vision.
const HEAT = {
  light: [
    [223, 233, 239],
    [120, 178, 205],
    [8, 84, 116],
  ],
  dark: [
    [34, 47, 58],
    [44, 106, 137],
    [120, 206, 243],
  ],
};
export function heatColour(share, dark = isDark()) {
  const stops = HEAT[dark ? "dark" : "light"];
  const part = Math.max(0, Math.min(100, share)) / 50;
  const from = stops[part < 1 ? 0 : 1];
  const to = stops[part < 1 ? 1 : 2];
  const mix = part < 1 ? part : part - 1;
  return `rgb(${from.map((value, at) => Math.round(value + (to[at] - value) * mix)).join(" ")})`;
}

// The ledger's accounts: useful time is blue or green, lost time is warm, free time is grey.
const ACCOUNTS = {
  useful: [200, 62, 45],
  serving: [174, 55, 40],
  warm: [174, 30, 66],
  startup: [222, 45, 68],
  checkpoint: [262, 35, 64],
  asleep: [250, 42, 58],
  straggler: [36, 78, 56],
  recompute: [8, 64, 56],
  preempted: [20, 68, 64],
  idle: [48, 62, 60],
  fragmented: [300, 22, 66],
  reserved: [240, 22, 74],
  free: [210, 12, 84],
  closed: [210, 8, 62],
  quarantined: [340, 45, 55],
  lost: [0, 55, 42],
};
const ACCOUNT_ORDER = Object.keys(ACCOUNTS);
export function accountColour(name, dark = isDark()) {
  const [angle, strength, light] = ACCOUNTS[name] ?? [(name.length * 47) % 360, 30, 60];
  return (
    `hsl(${angle} ${dark ? strength * 0.85 : strength}% ` +
    `${dark ? (name === "free" ? 27 : Math.max(40, light - 6)) : light}%)`
  );
}
export const accountRank = (name) => {
  const at = ACCOUNT_ORDER.indexOf(name);
  return at < 0 ? 99 : at;
};
