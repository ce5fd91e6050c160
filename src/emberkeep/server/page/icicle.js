// Where each node of the tree is in its picture: from left to right the place in a text, from top to bottom the texts.

export const TIERS = ["hot", "warm", "cold"];
const EVEN = 256; // tokens: up to about here the scale is even, further on it gets narrower

const bend = (tokens) => Math.log1p(tokens / EVEN);

/** Nodes as the server tells them, each with its place in a square of size 1 and with its neighbours. */
export function arranged(told) {
  const top = { children: [], level: 0, y0: 0, y1: 1 };
  const byId = new Map();
  for (const node of told) {
    const above = byId.get(node.parent) ?? top;
    byId.set(node.id, { ...node, above, children: [], level: above.level + 1, index: above.children.length });
    above.children.push(byId.get(node.id));
  }
  const nodes = [...byId.values()];
  const origin = nodes[0]?.start ?? 0;
  const extent = nodes.reduce((most, node) => Math.max(most, node.end), origin + 1) - origin;
  const across = (position) => bend(position - origin) / bend(extent);
  stack(top);
  for (const node of nodes) {
    Object.assign(node, { x0: across(node.start), x1: across(node.end), parts: partsOf(node, across) });
    stack(node); // parents come first
  }
  return { nodes, byId, top, origin, extent, across };
}

/** Heights grow with the root of the tokens: beside a long conversation a short one can still be seen. */
function stack({ children, y0, y1 }) {
  const all = children.reduce((sum, child) => sum + Math.sqrt(child.tokens), 0);
  let y = y0;
  for (const child of children) {
    child.y0 = y;
    y += ((y1 - y0) * Math.sqrt(child.tokens)) / all;
    child.y1 = y;
  }
}

/** Where its tiers end: what is in the engine is at its beginning. */
function partsOf({ start, end, own_tokens: own, tiers }, across) {
  let sum = 0;
  return TIERS.filter((tier) => tiers[tier] > 0).map((tier) => {
    sum += tiers[tier];
    return [tier, across(start + ((end - start) * sum) / own)];
  });
}

export const leavesOf = ({ nodes }) => nodes.reduce((sum, node) => sum + (node.children.length === 0), 0);
