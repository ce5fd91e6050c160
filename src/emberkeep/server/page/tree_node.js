// What is said about a node of the tree, and what can be done with the entries that end in it.

import { TextDialog, entryActions, nameOf } from "./entries.js";
import { bytes, number } from "./words.js";
import { html, useState } from "./vendor/preact-htm.js";

const WHERE = { hot: "in the engine", warm: "in RAM", cold: "on disk" };

/** The entries that end in a node, and what can be done with them. */
export function Ends({ model, node, onActed, onExplain, onRemoved }) {
  const [problem, setProblem] = useState("");
  const [shown, setShown] = useState(null);
  const { pin, remove } = entryActions(model, () => (setProblem(""), onActed()), setProblem);
  const more = node.more_entries;
  return html`<div class="ends">
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <ul>
      ${node.entries.map(
        (end) => html`<li key=${`${end.id} ${end.position}`}>
          <span class="name">${nameOf(end)}</span>
          <span class="note">${end.kind}, ${end.latest ? "ends" : "an earlier branch ends"} at ${number(end.position)}${end.latest ? "" : "; the buttons are about all of it"}</span>
          <span class="actions">
            <button aria-label=${`${end.pinned ? "Unpin" : "Pin"} ${nameOf(end)}`} onClick=${() => pin(end)}>${end.pinned ? "Unpin" : "Pin"}</button>
            <button aria-label=${`Show the text of ${nameOf(end)}`} onClick=${() => setShown(end)}>Show</button>
            <button aria-label=${`Explain ${nameOf(end)}`} onClick=${() => onExplain(end)}>Explain</button>
            <button aria-label=${`Remove ${nameOf(end)} from the cache`} onClick=${async () => (await remove(end)) && onRemoved()}>Remove</button>
          </span>
        </li>`,
      )}
    </ul>
    ${more > 0 && html`<p class="note">${node.entries.length ? `${number(more)} more end here.` : `Entries that end in it: ${number(more)}.`}</p>`}
    ${shown && html`<${TextDialog} model=${model} entry=${shown} onClose=${() => setShown(null)} />`}
  </div>`;
}

export function titleOf(node) {
  if (node.branches) return `${number(node.branches)} more ${node.branches === 1 ? "branch" : "branches"}`;
  return node.entries[0] ? nameOf(node.entries[0]) : `${number(node.own_tokens)} tokens`;
}

export function wordsFor(node) {
  const tiers = Object.keys(WHERE).filter((tier) => node.tiers[tier] > 0);
  const where = tiers.map((tier) => `${tiers.length > 1 ? number(node.tiers[tier]) : "all"} ${WHERE[tier]}`).join(", ");
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
