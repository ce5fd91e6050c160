// The tree of everything that is stored: looked at as a whole and closer, by mouse, by finger and by keyboard.

import { call } from "./api.js";
import { NAMES, TextDialog, entryActions, nameOf } from "./entries.js";
import { useFresh } from "./fresh.js";
import { Picture, ROW_PX, SCALE_PX, arranged, leavesOf } from "./icicle.js";
import { bytes, number } from "./words.js";
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

const LIMIT = 800;
const HEIGHTS = [120, 520];
const CLOSER = 1.5;
const DRAGGED_PX = 5;
const HELP = "Arrow keys move, Enter looks closer, Escape goes back, plus and minus stretch.";

/** `onActed`: something was changed here. `onExplain` gets an entry whose text is to be explained. */
export function Tree({ beat, acts, onActed, onExplain }) {
  const [trail, setTrail] = useState([]);
  const [chosenId, setChosen] = useState(null);
  const [hovered, setHovered] = useState(null);
  const section = useRef(null);
  const at = trail.at(-1)?.id ?? "";
  const read = async () => ({ at, ...(await call(`/v1/cache/tree?limit=${LIMIT}&at=${at}`)) });
  const { told, error } = useFresh(read, beat, `${acts} ${at}`);
  const tree = useMemo(() => told && { at: told.at, ...arranged(told.nodes) }, [told]);
  const chosen = tree?.byId.get(chosenId) ?? null;
  const leave = () => setTrail((known) => known.slice(0, -1));
  useEffect(() => {
    if (error?.status === 404) leave();
  }, [error]);
  const enter = (node) => {
    setChosen(node.id);
    if ((node.below || node.branches) && node.id !== at) setTrail([...trail, { id: node.id, words: titleOf(node) }]);
  };
  const look = hovered ?? chosen;
  return html`<section ref=${section} class="tree" aria-labelledby="tree-title">
    <header>
      <h2 id="tree-title">What is stored</h2>
      <${Legend} />
    </header>
    ${error && error.status !== 404 && html`<p class="error" role="alert">${error.message}</p>`}
    <${Trail} ...${{ trail, setTrail }} />
    ${tree?.nodes.length === 0 && html`<p class="note">Nothing yet: ask something, or warm a prompt.</p>`}
    ${tree?.nodes.length > 0 &&
    html`<${Canvas} ...${{ tree, chosen, hovered, setHovered, setChosen, enter, leave }} />
      <p class="under">${look ? wordsFor(look) : `${number(told.totals.tokens)} tokens in ${number(told.totals.chunks)} chunks, ${bytes(told.totals.bytes)}. ${HELP}`}</p>`}
    ${chosen && html`<${Ends} key=${chosen.id} node=${chosen} ...${{ onActed, onExplain }} onRemoved=${() => section.current.querySelector(".picture")?.focus()} />`}
  </section>`;
}

function Legend() {
  return html`<ul class="legend">
    ${Object.entries(NAMES).map(([tier, words]) => html`<li><span class=${`swatch tier ${tier}`}></span>${words}</li>`)}
  </ul>`;
}

function Trail({ trail, setTrail }) {
  if (!trail.length) return null;
  const places = [{ id: "", words: "Everything" }, ...trail];
  return html`<nav class="trail" aria-label="Where the picture looks">
    <ol>
      ${places.map(({ id, words }, index) =>
        index < places.length - 1
          ? html`<li key=${id}><button class="link" onClick=${() => setTrail(trail.slice(0, index))}>${words}</button></li>`
          : html`<li key=${id} aria-current="location">${words}</li>`,
      )}
    </ol>
  </nav>`;
}

/** The picture, and for those who do not see it the node that is chosen as an item of a tree. */
function Canvas({ tree, chosen, hovered, setHovered, setChosen, enter, leave }) {
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

/** The entries that end in a node, and what can be done with them. */
function Ends({ node, onActed, onExplain, onRemoved }) {
  const [problem, setProblem] = useState("");
  const [shown, setShown] = useState(null);
  const { pin, remove } = entryActions(() => (setProblem(""), onActed()), setProblem);
  const more = node.more_entries;
  return html`<div class="ends">
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <ul>
      ${node.entries.map(
        (end) => html`<li key=${`${end.id} ${end.position}`}>
          <span class="name">${nameOf(end)}</span>
          <span class="note">${end.kind}, ${end.latest ? "ends" : "an earlier branch ends"} at ${number(end.position)}</span>
          <span class="actions">
            <button aria-pressed=${end.pinned} aria-label=${`${end.pinned ? "Unpin" : "Pin"} ${nameOf(end)}`} onClick=${() => pin(end)}>${end.pinned ? "Pinned" : "Pin"}</button>
            <button aria-label=${`Show the text of ${nameOf(end)}`} onClick=${() => setShown(end)}>Show</button>
            <button aria-label=${`Explain ${nameOf(end)}`} onClick=${() => onExplain(end)}>Explain</button>
            <button aria-label=${`Remove ${nameOf(end)} from the cache`} onClick=${async () => (await remove(end)) && onRemoved()}>Remove</button>
          </span>
        </li>`,
      )}
    </ul>
    ${more > 0 && html`<p class="note">${number(more)} ${node.entries.length ? "more end here." : more === 1 ? "conversation or prefix ends in it." : "conversations and prefixes end in it."}</p>`}
    ${shown && html`<${TextDialog} entry=${shown} onClose=${() => setShown(null)} />`}
  </div>`;
}

function titleOf(node) {
  if (node.branches) return `${number(node.branches)} more ${node.branches === 1 ? "branch" : "branches"}`;
  return node.entries[0] ? nameOf(node.entries[0]) : `${number(node.own_tokens)} tokens`;
}

function wordsFor(node) {
  const tiers = Object.entries(NAMES).filter(([tier]) => node.tiers[tier] > 0);
  const where = tiers.length === 1 ? `all in ${nameIn(tiers[0][1])}` : tiers.map(([tier, words]) => `${number(node.tiers[tier])} in ${nameIn(words)}`).join(", ");
  const told = [`tokens ${number(node.start)} to ${number(node.end)}`];
  if (node.branches) told.unshift(`${titleOf(node)}: ${number(node.own_tokens)} tokens`);
  const chunks = node.chunks ? `${number(node.chunks)} ${node.chunks === 1 ? "chunk" : "chunks"}` : "part of a chunk";
  told.push(where, `${chunks}, ${bytes(node.bytes)}`);
  if (node.hits) told.push(`reused ${number(node.hits)} ${node.hits === 1 ? "time" : "times"}`);
  if (node.below) told.push(`${number(node.below)} ${node.below === 1 ? "branch follows" : "branches follow"} with ${number(node.tokens - node.own_tokens)} tokens`);
  if (node.pinned) told.push("pinned");
  if (node.shared) told.push("shared by all users");
  if (node.user) told.push(`of ${node.user}`);
  if (!node.exact) told.push("approximate");
  const words = told.join(" · ");
  return words[0].toUpperCase() + words.slice(1);
}

const nameIn = (words) => (words === "RAM" ? "RAM" : words === "Disk" ? "files" : "the engine");
