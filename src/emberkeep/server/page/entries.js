// What is kept, by its names: listing it, keeping it for longer, showing and removing it.

import { call, ofModel } from "./api.js";
import { useFresh } from "./fresh.js";
import { ago, number } from "./words.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

export const NAMES = { hot: "Engine", warm: "RAM", cold: "Disk" };
const LISTED = 50;
const SHOWN_CHARS = 20_000;

export const nameOf = (entry) => entry.head || entry.id;

/** What can be done with an entry; each tells whether it was done. */
export function entryActions(model, onDone, onProblem) {
  const act = (action) => action.then(() => (onDone(), true), (error) => (onProblem(error.message), false));
  return {
    pin: (entry) => act(call(ofModel(`/v1/cache/${entry.pinned ? "unpin" : "pin"}`, model), { method: "POST", body: { id: entry.id } })),
    remove: (entry) =>
      confirm(`Remove “${nameOf(entry)}” from the cache? What only it uses has to be evaluated again.`) &&
      act(call(ofModel(`/v1/cache/${encodeURIComponent(entry.id)}`, model), { method: "DELETE" })),
  };
}

export function Entries({ model, beat, acts, onActed }) {
  const { told: listed, error } = useFresh(() => call(ofModel(`/v1/cache?limit=${LISTED}`, model)), beat, acts);
  const [problem, setProblem] = useState("");
  const { pin, remove } = entryActions(model, () => (setProblem(""), onActed()), setProblem);
  const trouble = problem || error?.message;
  return html`<div>
    ${trouble && html`<p class="error" role="alert">${trouble}</p>`}
    ${listed &&
    html`<div class="wide" tabindex="0" role="region" aria-label="Kept conversations and prefixes">
      <table>
        <caption>Kept conversations and prefixes: ${number(listed.totals.entries)}</caption>
        <thead><tr><th scope="col">Begins with</th><th scope="col">Tokens</th><th scope="col">In</th><th scope="col">Used</th><th scope="col">Turns</th><th scope="col"><span class="spoken">Actions</span></th></tr></thead>
        <tbody>
          ${listed.data.map(
            (entry) => html`<tr key=${entry.id}>
              <th scope="row">${nameOf(entry)}</th>
              <td>${number(entry.tokens)}</td>
              <td><span class=${`swatch tier ${entry.tier}`}></span>${NAMES[entry.tier] ?? entry.tier}</td>
              <td>${ago(entry.last_used_s)}</td>
              <td>${number(entry.turns)}</td>
              <td>
                <button aria-pressed=${entry.pinned} onClick=${() => pin(entry)}>${entry.pinned ? "Pinned" : "Pin"}</button>
                <button aria-label=${`Remove ${nameOf(entry)}`} onClick=${() => remove(entry)}>Remove</button>
              </td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>`}
  </div>`;
}

/** The text of an entry as the model reads it; of a long one both ends. */
export function TextDialog({ model, entry, onClose }) {
  const [shown, setShown] = useState(null);
  const [problem, setProblem] = useState("");
  const dialog = useRef(null);
  useEffect(() => {
    dialog.current.showModal();
    call(ofModel(`/v1/cache/${encodeURIComponent(entry.id)}?chars=${SHOWN_CHARS}`, model)).then(setShown, (error) => setProblem(error.message));
  }, []);
  return html`<dialog ref=${dialog} class="prompt" aria-labelledby="text-title" onClose=${onClose}>
    <header>
      <h2 id="text-title">${nameOf(entry)}</h2>
      <button aria-label="Close" onClick=${() => dialog.current.close()}>×</button>
    </header>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${shown && html`<p class="note">${number(shown.tokens)} tokens, ${number(shown.text_chars)} characters${shown.text_chars > SHOWN_CHARS && ", of which both ends are shown"}</p>`}
    ${shown && html`<pre tabindex="0" aria-label="Its text">${shown.text}</pre>`}
  </dialog>`;
}
