// Colors for data, separate from the page's own. Jobs and tenants get theirs when they are first shown: one that
// differs from what stands beside them, and they keep it while any picture shows them.

import { css, natural } from "./dom.js";
import { cluster, listen } from "./live.js";

export const isDark = () =>
  css("color-scheme") === "dark" || getComputedStyle(document.documentElement).colorScheme === "dark";

// Lightness, chroma and hue (OKLCH) of 12 colors, found by a search: any two differ for every common kind of color
// vision (tests/web/test_map.py measures it). The first eight are dark enough for thin lines.
const PALETTE = [
  [0.48, 0.1, 285],
  [0.6, 0.12, 165],
  [0.48, 0.12, 15],
  [0.66, 0.12, 345],
  [0.6, 0.12, 300],
  [0.54, 0.12, 135],
  [0.54, 0.06, 345],
  [0.66, 0.12, 135],
  [0.72, 0.1, 240],
  [0.78, 0.12, 90],
  [0.78, 0.12, 195],
  [0.78, 0.08, 135],
];
const LIGHTER = 0.05; // on a dark page
const SHADES = [false, true].map((dark) =>
  PALETTE.map(([light, chroma, angle]) => rgb(light + (dark ? LIGHTER : 0), chroma, (angle * Math.PI) / 180)),
);
const ALIKE_BELOW = 0.3; // in OKLab, where 0.02 can just be seen
const ALIKE = PALETTE.map((one) => PALETTE.map((other) => Math.max(0, 1 - distance(one, other) / ALIKE_BELOW) ** 2));

/**
 * Of two colors, also for eyes that do not tell red from green, or blue from yellow.
 * @param {number[]} _one
 * @param {number[]} _other
 */
function distance([light, chroma, angle], [light2, chroma2, angle2]) {
  const part = (length, degrees, of) => length * of((degrees * Math.PI) / 180);
  const a = part(chroma, angle, Math.cos) - part(chroma2, angle2, Math.cos);
  const b = part(chroma, angle, Math.sin) - part(chroma2, angle2, Math.sin);
  return Math.hypot(light - light2, Math.min(Math.abs(a), Math.abs(b), Math.hypot(a, b) / 1.5));
}

export const hue = (index, dark = isDark()) => SHADES[Number(dark)][index % PALETTE.length];

const inks = new Map();
/** Text on a color (#rrggbb): black or white, whichever has more contrast, which is 4.5 at least. */
export function inkOn(color) {
  if (!inks.has(color)) {
    const parts = [1, 3, 5].map((at) => {
      const part = Number.parseInt(color.slice(at, at + 2), 16) / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    inks.set(color, 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] > 0.179 ? "#000000" : "#ffffff");
  }
  return inks.get(color);
}

// -- who has which ---------------------------------------------------------------------------------

const given = new Map(); // the number of the color of a job, or of a tenant
const shown = new Map(); // what each picture shows
const NEAR = 8; // nodes on each side that count as neighbors: what stands above another depends on the window

/**
 * Gives colors to all that a picture shows, those named first before others. What no picture shows loses its color.
 * @param {string} picture
 * @param {Set<string>} keys
 * @param {(key: string, add: (other: string, weight: number) => void) => void} near names the neighbors of one
 */
export function give(picture, keys, near) {
  shown.set(picture, keys);
  const used = new Array(PALETTE.length).fill(0);
  const pictures = [...shown.values()];
  for (const [key, color] of given) {
    if (pictures.some((all) => all.has(key))) used[color] += 1;
    else given.delete(key);
  }
  for (const key of keys) {
    if (given.has(key)) continue;
    const same = new Array(PALETTE.length).fill(0);
    near(key, (other, weight) => {
      if (other !== key && given.has(other)) same[given.get(other)] += weight;
    });
    // Not a neighbor's; of these the least used; of these the one that is least like the neighbors'.
    const alike = same.map((_, at) => same.reduce((sum, weight, color) => sum + weight * ALIKE[color][at], 0));
    const [color] = [...same.keys()].sort((a, b) => same[a] - same[b] || used[a] - used[b] || alike[a] - alike[b]);
    used[color] += 1;
    given.set(key, color);
  }
}

/** Colors of the jobs on these nodes. Neighbors share a node, or are on nodes that stand near each other. */
export function giveOnNodes(picture, nodes) {
  const racks = new Map();
  const places = new Map(); // of jobs without a color: the nodes
  const sizes = new Map();
  for (const node of nodes.values()) {
    const place = node.place ?? "";
    (racks.get(place) ?? racks.set(place, []).get(place)).push(node);
    for (const [job, , gpus] of node.held ?? []) {
      if (foreign(job)) continue;
      sizes.set(job, (sizes.get(job) ?? 0) + gpus.length);
      if (!given.has(job)) (places.get(job) ?? places.set(job, []).get(job)).push(node);
    }
  }
  const order = new Map(); // of nodes in their rack
  const near = (job, add) => {
    for (const node of places.get(job)) {
      const rack = racks.get(node.place ?? "");
      if (!order.has(node))
        for (const [at, one] of rack.sort((a, b) => natural(a.id, b.id)).entries()) order.set(one, at);
      const here = order.get(node);
      for (let at = Math.max(0, here - NEAR); at <= Math.min(rack.length - 1, here + NEAR); at += 1)
        for (const [other] of rack[at].held ?? []) add(other, at === here ? 4 : Math.abs(at - here) === 1 ? 2 : 1);
    }
  };
  const fresh = [...places.keys()].sort((a, b) => sizes.get(b) - sizes.get(a) || natural(a, b)); // the largest first
  give(picture, new Set([...fresh, ...sizes.keys()]), near);
}

/** A picture is gone. */
export const forget = (picture) => give(picture, new Set(), () => {});

let stale = true;
listen((change) => {
  stale ||= Boolean(change.whole || change.nodes?.length || change.gone_nodes?.length);
});

const foreign = (id) => !id || id.startsWith("@"); // a job of others, which has no number here
/** Jobs of others are gray; jobs that no picture shows have the color of their number. */
export function jobColor(id, dark = isDark()) {
  if (foreign(id)) return dark ? "#5b6770" : "#9aa5ad";
  if (stale) {
    stale = false;
    giveOnNodes("live", cluster.nodes);
  }
  return hue(given.get(id) ?? (Number.parseInt(id.slice(1), 10) || 0), dark);
}

const tenants = new Set();
/** Tenants are few: each differs from all others as much as it can. */
export function tenantColor(name, dark = isDark()) {
  if (!tenants.has(name)) {
    tenants.add(name);
    give("tenants", new Set([...tenants].map((one) => `tenant:${one}`)), (_, add) => {
      for (const one of tenants) add(`tenant:${one}`, 1);
    });
  }
  return hue(given.get(`tenant:${name}`), dark);
}

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
    return 255 * (part <= 0.0031308 ? 12.92 * part : 1.055 * part ** (1 / 2.4) - 0.055);
  };
  return hex(linear.map(byte));
}
function hex(parts) {
  return `#${parts.map((part) => Math.round(part).toString(16).padStart(2, "0")).join("")}`;
}

// One hue from idle to busy: its lightness shows the value, so it does not depend on color vision.
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
export function heatColor(share, dark = isDark()) {
  const stops = HEAT[dark ? "dark" : "light"];
  const part = Math.max(0, Math.min(100, share)) / 50;
  const from = stops[part < 1 ? 0 : 1];
  const to = stops[part < 1 ? 1 : 2];
  const mix = part < 1 ? part : part - 1;
  return hex(from.map((value, at) => value + (to[at] - value) * mix));
}

// Measured rates beside the usual one, from weak (orange) to usual (blue): told apart by eyes of every kind.
const RATES = {
  failed: ["Failed", "#96005a"],
  quarter: ["< 25 %", "#d94801"],
  half: ["< 50 %", "#fdae6b"],
  less: ["< 80 %", "#fedeba"],
  usual: ["Usual", "#6baed6"],
  more: ["> 150 %", "#08519c"],
};
const RATES_BELOW = { quarter: 250, half: 500, less: 800, usual: 1500, more: Infinity };
export const rates = Object.keys(RATES);
export const rateName = (key) => RATES[key][0];
export const rateColor = (key) => RATES[key][1];
/** The class of a rate in thousandths of the usual one. */
export const rateOf = (milli) => rates.find((key) => milli < RATES_BELOW[key]);

// The ledger's accounts: useful time is blue or green, lost time is warm, free time is gray.
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
export function accountColor(name, dark = isDark()) {
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
