// Places each node on the map: blocks contain racks, racks contain nodes, nodes contain GPUs. Cells are as large as
// the window allows, so that the whole cluster is seen at once.

import { natural } from "./dom.js";

const CELL_MAX = 140;
const CELL_SCROLLED = 8; // where the cluster does not fit even with the least cell
const STRETCH = 1.6; // cells may be this far from square, to fill what is left
const COLUMNS = [1, 2, 3, 4, 6, 8, 12, 16, 24, Infinity]; // of nodes in a rack
const BLOCKS_ACROSS_MAX = 16;
const LETTER = 6;
const NAME_MAX = 96; // pixels for a letter of a node's name, and for the whole of it

// From roomy to dense; the first that fits with its least cell is taken. `head`: room for a node's name; `rack`,
// `block`: for theirs; `between`: nodes, racks, blocks.
const STYLES = [
  { named: true, least: 9, pad: 4, gap: 2, head: 14, rack: 15, block: 20, between: [6, 10, 16] },
  { named: false, least: 4, pad: 1, gap: 1, head: 0, rack: 12, block: 16, between: [2, 5, 9] },
  { named: false, least: 3, pad: 1, gap: 1, head: 0, rack: 0, block: 12, between: [1, 3, 5] },
];

export function layout(nodes, width, height) {
  const list = [...nodes.values()].sort((a, b) => natural(a.place ?? "", b.place ?? "") || natural(a.id, b.id));
  const most = Math.max(1, ...list.map((node) => node.gpus ?? 0));
  const blocks = grouped(list);
  const shapes = [...new Set([8, 4, 2, 1].map((columns) => Math.min(columns, most)))].filter(
    (columns) => columns > 1 || most === 1,
  );
  const name = Math.min(NAME_MAX, 8 + LETTER * Math.max(0, ...list.map((node) => (node.name ?? node.id).length)));
  let best = null;
  for (const style of STYLES) {
    for (const across of shapes)
      for (const beside of blocksAcross(blocks.length))
        for (const columns of COLUMNS) {
          // what cannot come near the best is not searched
          const word = style.named ? Math.ceil((name - 2 * style.pad + style.gap) / across) - style.gap : 0;
          const least = Math.max(style.least, word, (best?.square ?? 0) - 1);
          const plan = { style, across, beside, columns, name, wide: least, tall: least };
          if (heightOf(blocks, plan, width, height) > height) continue;
          grow(blocks, plan, width, height);
          if (!best || plan.wide * plan.tall > best.wide * best.tall) best = plan;
        }
    if (best) break;
  }
  best ??= {
    style: STYLES[1],
    across: shapes[0],
    beside: 1,
    columns: Infinity,
    wide: CELL_SCROLLED,
    tall: CELL_SCROLLED,
  };
  const found = {
    tiles: [],
    labels: [],
    across: best.across,
    gap: best.style.gap,
    pad: best.style.pad,
    named: best.style.named,
    wide: best.wide,
    tall: best.tall,
  };
  found.height = Math.max(1, heightOf(blocks, best, width, Infinity, found));
  return found;
}

/** [{name, nodes, racks: [{name, inside, most}]}] in the order of the list. */
function grouped(list) {
  const blocks = new Map();
  for (const node of list) {
    const [name = "", ...rest] = (node.place ?? "").split("/");
    const rack = rest.join("/");
    const block = blocks.get(name) ?? blocks.set(name, { name, nodes: 0, racks: new Map() }).get(name);
    const one = block.racks.get(rack) ?? block.racks.set(rack, { name: rack, inside: [], most: 1 }).get(rack);
    one.inside.push(node);
    one.most = Math.max(one.most, node.gpus ?? 0);
    block.nodes += 1;
  }
  return [...blocks.values()].map((block) => ({ ...block, racks: [...block.racks.values()] }));
}

const blocksAcross = (count) =>
  Array.from({ length: Math.min(Math.max(1, count), BLOCKS_ACROSS_MAX) }, (_, at) => at + 1);

/** The largest square cell that fits, by halving; then wider and taller while it still fits. */
function grow(blocks, plan, width, height) {
  const fits = (wide, tall) => heightOf(blocks, { ...plan, wide, tall }, width, height) <= height;
  let low = plan.wide;
  let high = CELL_MAX;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (fits(middle, middle)) low = middle;
    else high = middle - 1;
  }
  plan.square = plan.wide = plan.tall = low;
  while (plan.tall < Math.min(CELL_MAX, low * STRETCH) && fits(plan.wide, plan.tall + 1)) plan.tall += 1;
  while (plan.wide < Math.min(CELL_MAX, plan.tall * STRETCH) && fits(plan.wide + 1, plan.tall)) plan.wide += 1;
}

/** How high the map becomes; Infinity if something is too wide, or it is higher than `limit`.
 * `found` collects tiles and labels. */
function heightOf(blocks, plan, width, limit, found = null) {
  const { style, across, beside } = plan;
  const [betweenNodes, betweenRacks, betweenBlocks] = style.between;
  const tile = 2 * style.pad + across * (plan.wide + style.gap) - style.gap;
  if (style.named && tile < plan.name && !found) return Infinity;
  let y = 0;
  for (let first = 0; first < blocks.length; first += beside) {
    const shelf = blocks.slice(first, first + beside);
    const nodes = shelf.reduce((sum, block) => sum + block.nodes, 0);
    const room = width - (shelf.length - 1) * betweenBlocks;
    let x = 0;
    let tallest = 0;
    for (const block of shelf) {
      const share = shelf.length > 1 ? Math.floor((room * block.nodes) / nodes) : room;
      if (tile > share && !(found && shelf.length === 1)) return Infinity;
      const head = block.name ? style.block : 0;
      if (found && head)
        found.labels.push({ x, y: y + head - (style.named ? 6 : 3), text: block.name, large: true, width: share });
      const size = racksOf(block, plan, tile, x, y + head, share, betweenNodes, betweenRacks, found);
      tallest = Math.max(tallest, size.height + head);
      x += size.width + betweenBlocks;
    }
    y += tallest + betweenBlocks;
    if (y - betweenBlocks > limit) return Infinity;
  }
  return y - betweenBlocks;
}

function racksOf(block, plan, tile, left, top, room, betweenNodes, betweenRacks, found) {
  const { style } = plan;
  const fit = Math.max(1, Math.floor((room + betweenNodes) / (tile + betweenNodes)));
  let x = 0;
  let y = 0;
  let tallest = 0;
  let widest = 0;
  for (const rack of block.racks) {
    const count = rack.inside.length;
    const rows = Math.ceil(count / Math.min(count, fit, rack.name ? plan.columns : Infinity));
    const columns = Math.ceil(count / rows);
    const height =
      2 * style.pad + style.head + Math.ceil(rack.most / plan.across) * (plan.tall + style.gap) - style.gap;
    const wide = columns * (tile + betweenNodes) - betweenNodes;
    const head = rack.name ? style.rack : 0;
    if (x && x + wide > room) {
      x = 0;
      y += tallest + betweenRacks;
      tallest = 0;
    }
    if (found) {
      if (head)
        found.labels.push({
          x: left + x + style.pad,
          y: top + y + head - 4,
          text: rack.name,
          large: false,
          width: wide,
        });
      for (const [at, node] of rack.inside.entries())
        found.tiles.push({
          id: node.id,
          x: left + x + (at % columns) * (tile + betweenNodes),
          y: top + y + head + Math.floor(at / columns) * (height + betweenNodes),
          width: tile,
          height,
          top: style.head + style.pad,
          cells: node.gpus ?? 0,
        });
    }
    tallest = Math.max(tallest, head + rows * (height + betweenNodes) - betweenNodes);
    widest = Math.max(widest, x + wide);
    x += wide + betweenRacks;
  }
  return { width: widest, height: y + tallest };
}

/**
 * The joined blocks of cells with the same key, also across nodes that stand side by side: for each, where its label
 * goes, which is the largest rectangle of it within one node. `keyAt` is "" where nothing is joined.
 * @param {any} plan
 * @param {(tile: any, gpu: number) => string} keyAt
 */
export function blocks(plan, tiles, keyAt) {
  const { across } = plan;
  const parents = [];
  const root = (at) => {
    while (parents[at] !== at) at = parents[at] = parents[parents[at]];
    return at;
  };
  const cells = [];
  const grids = new Map();
  for (const tile of tiles) {
    const grid = Array.from({ length: tile.cells }, (_, gpu) => {
      const key = keyAt(tile, gpu);
      if (!key) return -1;
      parents.push(cells.length);
      return cells.push({ tile, gpu, key }) - 1;
    });
    grids.set(tile, grid);
  }
  const join = (one, other) => {
    if (one >= 0 && other >= 0 && cells[one].key === cells[other].key) parents[root(other)] = root(one);
  };
  for (const grid of grids.values())
    for (const [gpu, cell] of grid.entries()) {
      if ((gpu + 1) % across) join(cell, grid[gpu + 1] ?? -1);
      join(cell, grid[gpu + across] ?? -1);
    }
  beside(tiles, "y", "x", "width", (one, other) => {
    for (let row = 0; row * across < one.cells; row += 1)
      join(grids.get(one)[row * across + across - 1] ?? -1, grids.get(other)[row * across] ?? -1);
  });
  beside(tiles, "x", "y", "height", (one, other) => {
    const last = Math.floor((one.cells - 1) / across) * across;
    for (let column = 0; column < across; column += 1)
      join(grids.get(one)[last + column] ?? -1, grids.get(other)[column] ?? -1);
  });
  const joined = new Map();
  for (const [at, cell] of cells.entries()) {
    const first = root(at);
    const parts = joined.get(first) ?? joined.set(first, new Map()).get(first);
    (parts.get(cell.tile) ?? parts.set(cell.tile, new Set()).get(cell.tile)).add(cell.gpu);
  }
  return [...joined].map(([first, parts]) => ({ ...cells[first], ...place(plan, parts) }));
}

const BESIDE_MAX = 12; // pixels between tiles that look joined

/** Calls `act` for each tile and the next one in its row (or column). */
function beside(tiles, line, along, size, act) {
  const lines = new Map();
  for (const tile of tiles) (lines.get(tile[line]) ?? lines.set(tile[line], []).get(tile[line])).push(tile);
  for (const row of lines.values()) {
    row.sort((a, b) => a[along] - b[along]);
    for (const [at, tile] of row.entries()) {
      const next = row[at + 1];
      if (next && next[along] - tile[along] - tile[size] <= BESIDE_MAX) act(tile, next);
    }
  }
}

/** The largest rectangle of the cells of a block that are in one tile, in pixels. */
function place({ across, wide, tall, gap, pad }, parts) {
  let best = null;
  for (const [tile, gpus] of parts)
    for (const gpu of gpus) {
      const column = gpu % across;
      let columns = 1;
      while (column + columns < across && gpus.has(gpu + columns)) columns += 1;
      for (let rows = 1; columns; rows += 1) {
        if (!best || rows * columns > best.rows * best.columns) best = { tile, gpu, rows, columns };
        const below = gpu + rows * across;
        let common = 0;
        while (common < columns && gpus.has(below + common)) common += 1;
        columns = common;
      }
    }
  return {
    tile: best.tile,
    gpu: best.gpu,
    x: best.tile.x + pad + (best.gpu % across) * (wide + gap),
    y: best.tile.y + best.tile.top + Math.floor(best.gpu / across) * (tall + gap),
    width: best.columns * (wide + gap) - gap,
    height: best.rows * (tall + gap) - gap,
  };
}

const RACK_MAX = 64; // nodes; a larger one is shown in parts
const RACK_PART = 32;

/**
 * Racks as the map shows them from far away: `{id, name, place, gpus, nodes}`, by id.
 * @param {Iterable<Api.NodeLine>} nodes
 */
export function racks(nodes) {
  const places = new Map();
  for (const node of nodes) {
    const place = node.place ?? "";
    (places.get(place) ?? places.set(place, []).get(place)).push(node.id);
  }
  const found = new Map();
  for (const [place, ids] of places) {
    const at = place.indexOf("/");
    const block = at < 0 ? "" : place.slice(0, at);
    const add = (id, name, some) => found.set(id, { id, name, place: block, gpus: 1, nodes: some });
    if (place && ids.length <= RACK_MAX) {
      add(place, place.slice(at + 1), ids);
      continue;
    }
    ids.sort(natural);
    for (let first = 0; first < ids.length; first += RACK_PART) {
      const some = ids.slice(first, first + RACK_PART);
      const name = `${some[0]}–${some.at(-1)}`;
      add(place ? `${place}/${name}` : name, name, some);
    }
  }
  return found;
}
