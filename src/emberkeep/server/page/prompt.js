// The prompt of an answer as the cache sees it: its text, coloured by where its state came from.

import { call } from "./api.js";
import { TIERS } from "./cost.js";
import { number } from "./words.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

/** `body` is what the model was sent, `cost` what its answer has told. */
export function PromptDialog({ body, cost, onClose }) {
  const [told, setTold] = useState(null);
  const [problem, setProblem] = useState("");
  const dialog = useRef(null);
  useEffect(() => {
    dialog.current.showModal();
    const asked = { ...body, stream: undefined, with_prompt: true, sources: cost.sources };
    call("/v1/cache/explain", { method: "POST", body: asked }).then(setTold, (error) => setProblem(error.message));
  }, []);
  return html`<dialog ref=${dialog} class="prompt" aria-labelledby="prompt-title" onClose=${onClose}>
    <header>
      <h2 id="prompt-title">The prompt as the cache saw it</h2>
      <button aria-label="Close" onClick=${() => dialog.current.close()}>×</button>
    </header>
    <${Legend} tokens=${cost.tokens} />
    ${cost.reason && html`<p>Not more was reused: ${cost.reason}${cost.where && ` (${cost.where})`}.</p>`}
    ${cost.divergence && html`<${Divergence} divergence=${cost.divergence} />`}
    ${told?.as_told === false && html`<p class="note">The prompt would be another one now, so it is shown with what is stored now.</p>`}
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${told && html`<pre tabindex="0" aria-label="The prompt">${told.prompt.map((part) => html`<${Part} part=${part} />`)}</pre>`}
  </dialog>`;
}

export function Legend({ tokens }) {
  return html`<ul class="legend">
    ${TIERS.filter(([tier]) => tokens[tier] > 0).map(
      ([tier, words]) => html`<li><span class=${`swatch tier ${tier}`}></span>${number(tokens[tier])} ${words}</li>`,
    )}
  </ul>`;
}

export function Divergence({ divergence }) {
  return html`<dl>
    <dt>Stored, from token ${number(divergence.token_index)} on</dt>
    <dd><code>${divergence.stored_text}</code></dd>
    <dt>This prompt</dt>
    <dd><code>${divergence.prompt_text}</code></dd>
  </dl>`;
}

export function Part({ part }) {
  const words = TIERS.find(([tier]) => tier === part.from)[1];
  return html`<span class=${`part ${part.from}`} title=${`${number(part.tokens)} tokens ${words}`}
    ><span class="spoken">${`(${words}:) `}</span>${part.text}</span
  >`;
}
