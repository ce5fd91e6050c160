// The tree of everything that is stored: as a whole, and closer.

import { call, ofModel } from "./api.js";
import { NAMES } from "./entries.js";
import { useFresh } from "./fresh.js";
import { arranged } from "./icicle.js";
import { Canvas, HELP } from "./tree_canvas.js";
import { Ends, titleOf, wordsFor } from "./tree_node.js";
import { bytes, number } from "./words.js";
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

const LIMIT = 800;

/** `onActed`: something was changed here. `onExplain` gets an entry whose text is to be explained. */
export function Tree({ model, beat, acts, onActed, onExplain }) {
  const [trail, setTrail] = useState([]);
  const [chosenId, setChosen] = useState(null);
  const [hovered, setHovered] = useState(null);
  const section = useRef(null);
  const at = trail.at(-1)?.id ?? "";
  const read = async () => ({ at, ...(await call(ofModel(`/v1/cache/tree?limit=${LIMIT}&at=${at}`, model))) });
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
  const seen = hovered ?? chosen;
  const focus = () => section.current.querySelector("[role=tree]")?.focus();
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
      <p class="under">${seen ? wordsFor(seen) : `${wordsForAll(told.totals)} ${HELP}`}</p>`}
    ${chosen && html`<${Ends} key=${chosen.id} node=${chosen} ...${{ model, onActed, onExplain }} onRemoved=${focus} />`}
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

const wordsForAll = ({ tokens, chunks, bytes: size }) => `${number(tokens)} tokens in ${number(chunks)} chunks, ${bytes(size)}.`;
