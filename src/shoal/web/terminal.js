// A line of output as a terminal would show it: what was overwritten is gone, colors are kept, and
// other escapes are dropped.

import { css } from "./dom.js";

const CONTROL = new RegExp(
  [
    /\x1b\[([0-9;:]*)m/, // a style
    /\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\|$)|[ -/]*[0-Z\\^-~])/, // other escapes
    /\x1b[\x5b-\x7e\x20-\x2f]?[0-?]*$/, // an escape that is cut off
    /[\x00-\x08\x0b-\x1f\x7f-\x9f]/,
  ]
    .map((one) => one.source)
    .join("|"),
  "g",
);
const PLAIN = /^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*$/;
const NONE = {};

/** The parts of a line, [{ text, style }]; `carry.style` goes on in the next line. */
export function parts(line, carry = {}) {
  const text = line.replace(/\r+$/, "");
  let style = carry.style ?? NONE;
  let found = [];
  let at = 0;
  const add = (until) => {
    if (until > at) found.push({ text: text.slice(at, until), style });
  };
  if (PLAIN.test(text)) return text ? [{ text, style }] : [];
  for (const match of text.matchAll(CONTROL)) {
    add(match.index);
    at = match.index + match[0].length;
    if (match[1] !== undefined) style = styled(style, match[1]);
    else if (match[0] === "\r") found = [];
    else if (match[0] === "\b") shorten(found);
  }
  add(text.length);
  carry.style = style;
  return found;
}

function shorten(found) {
  const last = found.at(-1);
  if (!last) return;
  last.text = [...last.text].slice(0, -1).join("");
  if (!last.text) found.pop();
}

const FLAGS = {
  1: { bold: true },
  2: { dim: true },
  3: { italic: true },
  4: { under: true },
  7: { swap: true },
  9: { strike: true },
  22: { bold: false, dim: false },
  23: { italic: false },
  24: { under: false },
  27: { swap: false },
  29: { strike: false },
  39: { ink: null },
  49: { paper: null },
};

function styled(style, codes) {
  const list = codes.split(/[;:]/).map(Number);
  const next = { ...style };
  for (let at = 0; at < list.length; at += 1) {
    const code = list[at];
    if (!code) {
      for (const name of Object.keys(next)) delete next[name];
    } else if (code === 38 || code === 48) {
      const name = code === 38 ? "ink" : "paper";
      if (list[at + 1] === 5) {
        next[name] = cube(list[at + 2] ?? 0);
        at += 2;
      } else if (list[at + 1] === 2) {
        const from = codes.includes(":") && list.length - at > 5 ? 3 : 2;
        next[name] = [0, 1, 2].map((one) => byte(list[at + from + one]));
        at += from + 2;
      }
    } else if (FLAGS[code]) Object.assign(next, FLAGS[code]);
    else if (code >= 30 && code <= 37) next.ink = code - 30;
    else if (code >= 40 && code <= 47) next.paper = code - 40;
    else if (code >= 90 && code <= 97) next.ink = code - 82;
    else if (code >= 100 && code <= 107) next.paper = code - 92;
  }
  return next;
}

const byte = (value) => Math.max(0, Math.min(255, value || 0));
const BASIC = [
  [0, 0, 0],
  [205, 49, 49],
  [13, 140, 80],
  [160, 120, 0],
  [36, 114, 200],
  [188, 63, 188],
  [17, 140, 170],
  [190, 190, 190],
  [110, 110, 110],
  [241, 76, 76],
  [35, 209, 139],
  [230, 200, 60],
  [59, 142, 234],
  [214, 112, 214],
  [41, 184, 219],
  [245, 245, 245],
];

/** One of 256 colors: 16 by name, a cube, and grays. */
function cube(number) {
  const code = byte(number);
  if (code < 16) return code;
  if (code > 231) return Array(3).fill(8 + (code - 232) * 10);
  return [36, 6, 1].map((size) => {
    const step = Math.floor((code - 16) / size) % 6;
    return step ? 55 + 40 * step : 0;
  });
}

// -- colors that can be read ------------------------------------------------------------------

const linear = (value) => {
  const part = value / 255;
  return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
};
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const contrast = (a, b) => {
  const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};
const mix = (from, to, share) => from.map((value, at) => Math.round(value + (to[at] - value) * share));
const ENOUGH = 4.6; // WCAG AA asks for 4.5

/** The ink itself, or as much lighter or darker as it must be to be read on this paper. */
function readable(ink, paper) {
  const goal = light(paper) > 0.18 ? [0, 0, 0] : [255, 255, 255];
  for (let share = 0; share < 1; share += 0.1) {
    const tried = mix(ink, goal, share);
    if (contrast(tried, paper) >= ENOUGH) return tried;
  }
  return goal;
}

const hex = (name) => {
  const code = parseInt(css(name).slice(1), 16);
  return [code >> 16, (code >> 8) & 255, code & 255];
};
let known = new Map();
let ground = null;
addEventListener("shoal-theme", () => {
  ground = null;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  ground = null;
});

/** Colors of a style in the current theme: { ink, paper }, either may be missing. */
export function colors(style) {
  if (!ground) {
    ground = { paper: hex("--sunken"), ink: hex("--ink") };
    known = new Map();
  }
  const rgb = (one, usual) => (one === null || one === undefined ? usual : Array.isArray(one) ? one : BASIC[one]);
  const key = `${style.ink}/${style.paper}/${style.swap}/${style.dim}`;
  let found = known.get(key);
  if (!found) {
    let ink = rgb(style.ink, ground.ink);
    let paper = rgb(style.paper, ground.paper);
    if (style.swap) [ink, paper] = [paper, ink];
    if (style.dim) ink = mix(ink, paper, 0.4);
    const bare = !style.swap && (style.paper === null || style.paper === undefined);
    found = { ink: `rgb(${readable(ink, paper).join(" ")})`, paper: bare ? "" : `rgb(${paper.join(" ")})` };
    if (known.size > 4096) known.clear();
    known.set(key, found);
  }
  return found;
}
