// Draws the tree of what is stored, and lets it grow and shine when something has happened to it.

import { TIERS } from "./icicle.js";
import { titleOf } from "./tree_node.js";
import { number } from "./words.js";

export const SCALE_PX = 20; // above the picture
const GROWS_MS = 320;
const SHINES_MS = 1800;
const LABEL_PX = 13; // the least height with words in it
const CLOSEST = 4000; // times, without asking the server
const STEPS = [0, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];

/** Draws a tree whenever something about it has changed, and while it moves. */
export class Picture {
  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    this.tree = null;
    this.marked = { hovered: null, chosen: null };
    this.closeness = { top: 0, span: 1 };
    this.width = this.height = 1; // of the picture below the scale
    this.lit = new Map();
    this.begun = -Infinity;
    this.asked = 0;
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.readColours = () => ((this.colours = coloursNow()), this.redraw());
    this.scheme.addEventListener("change", this.readColours);
    this.sized = new ResizeObserver(() => this.redraw());
    this.sized.observe(canvas);
    this.readColours();
  }

  close() {
    cancelAnimationFrame(this.asked);
    this.scheme.removeEventListener("change", this.readColours);
    this.sized.disconnect();
  }

  /** Another tree, or the same one after something has happened to it. */
  show(tree) {
    const known = this.tree?.byId ?? new Map();
    for (const node of tree.nodes) node.at = node.from = known.get(node.id)?.at ?? seedOf(node);
    this.begun = this.tree && !isStill() ? performance.now() : -Infinity;
    this.tree = tree;
    this.redraw();
  }

  mark(marked) {
    this.marked = marked;
    this.redraw();
  }

  /** Let nodes shine for a moment. */
  light(ids) {
    for (const id of ids) this.lit.set(id, performance.now());
    this.redraw();
  }

  /** Look closer by a factor, with what is at `y` staying there; `by` 0: at everything. */
  approach(by, y = SCALE_PX + this.height / 2) {
    const { top, span } = this.closeness;
    const fixed = top + span * ((y - SCALE_PX) / this.height);
    const closer = by ? Math.min(Math.max(span / by, 1 / CLOSEST), 1) : 1;
    this.move(fixed - ((fixed - top) / span) * closer, closer);
  }

  pan(dy) {
    const { top, span } = this.closeness;
    this.move(top - (dy / this.height) * span, span);
  }

  move(top, span) {
    this.closeness = { span, top: Math.min(Math.max(top, 0), 1 - span) };
    this.redraw();
  }

  /** Move as little as it takes to see a node. */
  reveal({ y0, y1 }) {
    const { top, span } = this.closeness;
    this.move(y0 < top ? y0 : y1 > top + span ? y1 - span : top, span);
  }

  get isClose() {
    return this.closeness.span < 1;
  }

  /** The node at a place on the canvas, or null. */
  nodeAt(x, y) {
    const { top, span } = this.closeness;
    const [right, down] = [x / this.width, top + span * ((y - SCALE_PX) / this.height)];
    const isThere = ({ at }) => at.x0 <= right && right < at.x1 && at.y0 <= down && down < at.y1;
    return (y >= SCALE_PX && this.tree?.nodes.findLast(isThere)) || null;
  }

  redraw() {
    this.asked ||= requestAnimationFrame((time) => {
      this.asked = 0;
      this.draw(time);
    });
  }

  draw(time) {
    if (!this.tree || !this.fit()) return;
    const grown = ease(Math.min(Math.max((time - this.begun) / GROWS_MS, 0), 1));
    for (const node of this.tree.nodes) node.at = between(node.from, node, grown);
    for (const [id, since] of this.lit) if (time - since > SHINES_MS) this.lit.delete(id);
    this.pen.clearRect(0, 0, this.width, this.height + SCALE_PX);
    this.drawScale();
    const isSeen = ([, { y, h }]) => y < this.height + SCALE_PX && y + h > SCALE_PX;
    const seen = this.tree.nodes.map((node) => [node, this.boxOf(node)]).filter(isSeen);
    this.pen.save();
    this.pen.beginPath();
    this.pen.rect(0, SCALE_PX, this.width, this.height);
    this.pen.clip();
    for (const [node, box] of seen) this.drawNode(node, box, time);
    for (const [node, box] of seen) if (box.h >= LABEL_PX && box.w > 30) this.drawWords(node, box);
    this.drawMarks();
    this.pen.restore();
    if (grown < 1 || (this.lit.size && !isStill())) this.redraw();
    else if (this.lit.size) setTimeout(() => this.redraw(), SHINES_MS);
  }

  /** As many pixels as the screen has; false where there is nothing to draw on. */
  fit() {
    const { canvas, pen } = this;
    const ratio = devicePixelRatio || 1;
    const { clientWidth, clientHeight } = canvas; // asking for them takes time
    Object.assign(this, { width: clientWidth, height: Math.max(clientHeight - SCALE_PX, 1) });
    const [width, height] = [Math.round(clientWidth * ratio), Math.round(clientHeight * ratio)];
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = `12px ${this.colours.font}`;
    pen.textBaseline = "middle";
    return width > 0 && height > 0;
  }

  boxOf({ at }) {
    const { top, span } = this.closeness;
    const down = (y) => SCALE_PX + ((y - top) / span) * this.height;
    return { x: at.x0 * this.width, y: down(at.y0), w: (at.x1 - at.x0) * this.width, h: down(at.y1) - down(at.y0) };
  }

  drawScale() {
    const { pen, tree, colours } = this;
    pen.lineWidth = 1;
    let free = 0;
    for (const step of STEPS) {
      if (step > tree.extent) break;
      const x = tree.across(tree.origin + step) * this.width;
      const words = stepWords(tree.origin + step);
      const width = pen.measureText(words).width;
      if (x < free || x + width > this.width) continue;
      pen.fillStyle = colours.faint;
      pen.fillText(words, x + 2, SCALE_PX / 2);
      pen.fillStyle = colours.line;
      pen.fillRect(Math.round(x), SCALE_PX - 5, 1, this.height + 5);
      free = x + width + 14;
    }
  }

  drawNode(node, box, time) {
    const { pen, colours } = this;
    const isThin = box.h < 7;
    const gap = Math.min(1, box.h / 6);
    const [y, h] = [box.y + gap / 2, Math.max(box.h - gap, 0.4)];
    let x = box.x;
    const stretch = node.x1 > node.x0 ? box.w / (node.x1 - node.x0) : 0;
    for (const [tier, end] of node.parts) {
      const right = box.x + (end - node.x0) * stretch;
      pen.fillStyle = colours[tier];
      pen.globalAlpha = isThin ? 0.75 : node.branches ? 0.16 : 0.34;
      pen.fillRect(x, y, Math.max(right - x - 0.5, 0.5), h);
      pen.globalAlpha = 1;
      if (!isThin && node.branches) for (let line = y + 1; line < y + h - 1; line += 4) pen.fillRect(x, line, right - x - 0.5, 1);
      else if (!isThin) pen.fillRect(x, y, Math.min(3, (right - x) / 5), h);
      x = right;
    }
    const since = this.lit.get(node.id);
    if (since === undefined) return;
    pen.globalAlpha = isStill() ? 0.5 : Math.max(0.75 * (1 - (time - since) / SHINES_MS), 0);
    pen.fillStyle = colours.accent;
    pen.fillRect(box.x, y, Math.max(box.w - 0.5, 1), h);
    pen.globalAlpha = 1;
  }

  drawWords(node, { x, y, w, h }) {
    const { pen, colours } = this;
    const isPinned = node.pinned && !node.branches;
    const left = x + (isPinned ? 18 : 8);
    const words = this.shortened(titleOf(node), x + w - 4 - left);
    const hasTwoLines = h >= 34 && node.entries.length > 0;
    const middle = y + h / 2 - (hasTwoLines ? 8 : 0);
    if (node.branches && words) {
      pen.fillStyle = colours.ground;
      pen.fillRect(left - 4, middle - 8, pen.measureText(words).width + 8, 16);
    }
    pen.fillStyle = colours.text;
    pen.fillText(words, left, middle);
    if (isPinned) this.drawPin(x + 11, middle);
    if (!hasTwoLines) return;
    pen.fillStyle = colours.faint;
    pen.fillText(this.shortened(tokensIn(node.own_tokens), w - 12), x + 8, middle + 16);
  }

  drawPin(x, y) {
    this.pen.beginPath();
    this.pen.arc(x, y - 2, 3, 0, 2 * Math.PI);
    this.pen.fill();
    this.pen.fillRect(x - 0.5, y, 1, 6);
  }

  /** As much of `words` as fits. */
  shortened(words, room) {
    const width = this.pen.measureText(words).width;
    if (width <= room) return words;
    const fitting = Math.floor((words.length * (room - 8)) / width);
    return fitting > 1 ? `${words.slice(0, fitting).trimEnd()}…` : "";
  }

  drawMarks() {
    const { pen, colours, tree, marked } = this;
    for (const [id, colour] of [[marked.chosen, colours.text], [marked.hovered, colours.accent]]) {
      const node = tree.byId.get(id);
      if (!node) continue;
      const { x, y, w, h } = this.boxOf(node);
      pen.strokeStyle = colour;
      pen.lineWidth = 2;
      pen.strokeRect(x + 1, y + 1, Math.max(w - 2, 2), Math.max(h - 2, 1));
    }
  }
}

/** A new node grows out of the end of the one before it. */
const seedOf = ({ above, x0, y0, y1 }) => (above.at ? { ...above.at, x0: above.at.x1 } : { x0, x1: x0, y0, y1 });
const ease = (t) => 1 - (1 - t) ** 3;
const isStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
const mix = (from, to, t) => from + (to - from) * t;
const between = (from, to, t) => ({ x0: mix(from.x0, to.x0, t), x1: mix(from.x1, to.x1, t), y0: mix(from.y0, to.y0, t), y1: mix(from.y1, to.y1, t) });
const tokensIn = (tokens) => `${number(tokens)} tokens`;
const stepWords = (position) => (position < 1000 ? `${position}` : `${+(position / 1000).toFixed(1)}k`);

function coloursNow() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ground", "text", "faint", "line", "accent", ...TIERS];
  return { ...Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()])), font: style.fontFamily };
}
