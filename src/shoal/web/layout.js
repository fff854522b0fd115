// Places each node on the map: blocks contain racks, racks contain nodes, nodes contain GPUs.

import { natural } from "./dom.js";

const GAP = 2;

/** The size of a GPU's cell: small enough to show the whole cluster at once, if possible. */
export function cellSize(gpus) {
  if (gpus <= 40) return 34;
  if (gpus <= 96) return 26;
  if (gpus <= 320) return 18;
  if (gpus <= 1200) return 13;
  if (gpus <= 4800) return 10;
  return 7;
}

export function layout(nodes, width) {
  const list = [...nodes.values()].sort((a, b) => natural(a.place ?? "", b.place ?? "") || natural(a.id, b.id));
  const total = list.reduce((sum, node) => sum + Math.max(1, node.gpus ?? 0), 0);
  const cell = cellSize(total), named = cell >= 10;
  const across = Math.min(8, Math.max(1, ...list.map((node) => node.gpus ?? 0)));
  const tile = { width: Math.max(across * (cell + GAP) + 8, named ? 60 : 0) + (named ? 0 : 9) };
  const blocks = new Map();
  for (const node of list) {
    const [block = "", ...rest] = (node.place ?? "").split("/");
    const racks = blocks.get(block) ?? blocks.set(block, new Map()).get(block);
    const rack = rest.join("/");
    (racks.get(rack) ?? racks.set(rack, []).get(rack)).push(node);
  }
  const tiles = [], labels = [];
  let y = 0;
  for (const [block, racks] of blocks) {
    if (block) { labels.push({ x: 0, y: y + 15, text: block, large: true }); y += 24; }
    let x = 0, tallest = 0;
    for (const [rack, inside] of racks) {
      const fits = Math.max(1, Math.floor((width + 6) / (tile.width + 6)));
      const columns = rack ? Math.min(fits, Math.max(1, Math.ceil(inside.length / 32))) : Math.min(fits, inside.length);
      const wide = columns * (tile.width + 6);
      if (x && x + wide - 6 > width) { x = 0; y += tallest + 12; tallest = 0; }
      const head = rack ? (named ? 18 : 14) : 0;
      if (rack) labels.push({ x: x + 1, y: y + head - 5, text: rack, large: false });
      const heights = new Array(columns).fill(y + head);
      inside.forEach((node, at) => {
        const column = at % columns, rows = Math.max(1, Math.ceil((node.gpus ?? 0) / 8));
        const tall = rows * (cell + GAP) + (named ? 22 : 2);
        tiles.push({ id: node.id, x: x + column * (tile.width + 6), y: heights[column], width: tile.width, height: tall, top: named ? 18 : 2 });
        heights[column] += tall + (named ? 8 : 1);
      });
      tallest = Math.max(tallest, Math.max(...heights) - y);
      x += wide + (rack ? 8 : 0);
    }
    y += tallest + 16;
  }
  return { tiles, labels, height: Math.max(1, y), cell, gap: GAP, named };
}
