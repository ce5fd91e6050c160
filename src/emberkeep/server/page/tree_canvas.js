// The picture of the tree, by mouse and by keyboard.

import { leavesOf } from "./icicle.js";
import { Picture, SCALE_PX } from "./picture.js";
import { titleOf, wordsFor } from "./tree_node.js";
import { html, useEffect, useRef } from "./vendor/preact-htm.js";

export const HELP = "Click selects, double-click looks closer; arrow keys move, Enter looks closer, Escape goes back, plus and minus stretch. Colours are the fastest place that has it.";
const ROW_PX = 26;
const HEIGHTS = [120, 520];
const CLOSER = 1.5;
const DRAGGED_PX = 5;

/** The picture, and for those who do not see it the node that is chosen as an item of a tree. */
export function Canvas({ tree, chosen, hovered, setHovered, setChosen, enter, leave }) {
  const canvas = useRef(null);
  const picture = useRef(null);
  const before = useRef(null);
  useEffect(() => {
    picture.current = new Picture(canvas.current);
    return () => picture.current.close();
  }, []);
  useEffect(() => {
    const isSame = before.current?.at === tree.at;
    if (!isSame) picture.current.approach(0);
    picture.current.show(tree);
    if (isSame) picture.current.light(changesOf(before.current, tree));
    before.current = tree;
  }, [tree]);
  useEffect(() => picture.current.mark({ hovered: hovered?.id, chosen: chosen?.id }), [hovered, chosen]);
  useEffect(() => void (chosen && picture.current.reveal(chosen)), [chosen?.id]);
  usePointer(canvas, picture, { setHovered, enter });
  const onKeyDown = (event) => {
    const act = keyAction(event.key, { tree, chosen, picture: picture.current, setChosen, enter, leave });
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  };
  const item = chosen ?? tree.nodes[0];
  const height = Math.min(Math.max(leavesOf(tree) * ROW_PX + SCALE_PX, HEIGHTS[0]), HEIGHTS[1]);
  return html`<div
    class="picture"
    role="tree"
    tabindex="0"
    aria-label=${`What is stored, by where texts part. ${HELP}`}
    aria-activedescendant=${`node-${item.id}`}
    onKeyDown=${onKeyDown}
    onFocus=${({ target }) => !chosen && target.matches(":focus-visible") && setChosen(tree.nodes[0].id)}
  >
    <canvas ref=${canvas} aria-hidden="true" style=${{ height: `${height}px` }}></canvas>
    <div
      key=${item.id}
      id=${`node-${item.id}`}
      class="spoken"
      role="treeitem"
      aria-level=${item.level}
      aria-posinset=${item.index + 1}
      aria-setsize=${item.above.children.length}
      aria-selected=${item === chosen}
      aria-label=${`${titleOf(item)}. ${wordsFor(item)}`}
    ></div>
  </div>`;
}

/** Hovering, clicking, dragging, and stretching with Ctrl and the wheel, as two fingers on a touchpad do. */
function usePointer(canvas, picture, { setHovered, enter }) {
  const latest = useRef(null);
  latest.current = { setHovered, enter };
  useEffect(() => {
    const drag = { y: null, moved: 0 };
    const nodeOf = (event) => picture.current.nodeAt(event.offsetX, event.offsetY);
    const on = {
      pointerdown: (event) => Object.assign(drag, { y: event.clientY, moved: 0 }),
      pointermove: (event) => {
        if (drag.y !== null && event.buttons && picture.current.isClose) {
          picture.current.pan(event.clientY - drag.y);
          drag.moved += Math.abs(event.clientY - drag.y);
          drag.y = event.clientY;
        }
        latest.current.setHovered(nodeOf(event));
      },
      pointerleave: () => latest.current.setHovered(null),
      click: (event) => {
        const node = nodeOf(event);
        if (node && drag.moved < DRAGGED_PX) latest.current.enter(node);
      },
      wheel: (event) => {
        if (!event.ctrlKey) return;
        event.preventDefault();
        picture.current.approach(Math.exp(-event.deltaY / 150), event.offsetY);
      },
    };
    const element = canvas.current;
    for (const [name, act] of Object.entries(on)) element.addEventListener(name, act, { passive: false });
    return () => Object.entries(on).forEach(([name, act]) => element.removeEventListener(name, act));
  }, []);
}

/** What a key does, or undefined. */
function keyAction(key, { tree, chosen, picture, setChosen, enter, leave }) {
  const here = chosen ?? tree.nodes[0];
  const go = (node) => () => node && node !== tree.top && setChosen(node.id);
  return {
    ArrowRight: go(here.children[0]),
    ArrowLeft: go(here.above),
    ArrowUp: go(beside(here, -1)),
    ArrowDown: go(beside(here, 1)),
    Home: go(tree.nodes[0]),
    End: go(tree.top.children.at(-1)),
    Enter: () => enter(here),
    " ": () => enter(here),
    Escape: leave,
    Backspace: leave,
    "+": () => picture.approach(CLOSER),
    "-": () => picture.approach(1 / CLOSER),
    0: () => picture.approach(0),
  }[key];
}

/** The next node of the same level, or of one as near to it as there is. */
function beside(node, step) {
  let up = node;
  while (up.above && !up.above.children[up.index + step]) up = up.above;
  if (!up.above) return null;
  let found = up.above.children[up.index + step];
  while (found.level < node.level && found.children.length) found = found.children.at(step > 0 ? 0 : -1);
  return found;
}

/** Nodes that are new, have grown or were reused; what is left of a chunk after a branch is not new. */
function changesOf(before, after) {
  const isTouched = (node) => {
    const known = before.byId.get(node.id);
    return known ? node.hits > known.hits || (node.branches > 0 && node.tokens > known.tokens) || node.own_tokens > known.own_tokens : !node.id.includes(".");
  };
  return after.nodes.filter(isTouched).map((node) => node.id);
}
