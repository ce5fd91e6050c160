// What a question or a text would reuse if it came now, and why not more.

import { call, ofModel, ofReplica } from "./api.js";
import { reusedOf } from "./cost.js";
import { Divergence, Legend, Part } from "./prompt.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const WHOLE = 2 ** 31 - 1; // characters

/** The body of a request that begins with all of an entry's text. Throws ApiError. */
export async function bodyOfEntry(entry, model) {
  const { text, user } = await call(ofModel(`/v1/cache/${encodeURIComponent(entry.id)}?chars=${WHOLE}`, model));
  return { prompt: text, user_id: user ?? undefined };
}

/** `given`: a body that was chosen elsewhere, with the name of what it is. */
export function Explain({ model, given }) {
  const [question, setQuestion] = useState("");
  const [answer, setAnswer] = useState({});
  const explain = async (body, of) => {
    setAnswer({ isAsked: true });
    try {
      const asked = { ...(await body), model: model || undefined, with_prompt: true };
      setAnswer({ of, told: await call(ofReplica("/v1/cache/explain"), { method: "POST", body: asked }) });
    } catch (error) {
      setAnswer({ problem: error.message });
    }
  };
  const form = useRef(null);
  useEffect(() => {
    if (!given) return;
    form.current.scrollIntoView({ block: "center" });
    explain(bodyOfEntry(given.entry, model), given.name);
  }, [given]);
  const submit = (event) => {
    event.preventDefault();
    if (question.trim()) explain({ messages: [{ role: "user", content: question }], ask_permission: true }, "");
  };
  return html`<form ref=${form} class="ask" aria-labelledby="explain-title" onSubmit=${submit}>
    <h2 id="explain-title">Explain</h2>
    <label>A question, as the first message of a chat
      <textarea rows="3" value=${question} onInput=${(e) => setQuestion(e.target.value)}></textarea>
    </label>
    <button class="main" type="submit" disabled=${answer.isAsked || !question.trim()}>What would be reused?</button>
    <div role="status">${answer.told && html`<${Explained} told=${answer.told} of=${answer.of} />`}</div>
    ${answer.problem && html`<p class="error" role="alert">${answer.problem}</p>`}
  </form>`;
}

function Explained({ told, of }) {
  const evaluated = Math.max(told.prompt_tokens - reusedOf(told), 0);
  return html`<p>${of && html`<strong>${of}: </strong>`}${told.explanation}</p>
    <${Legend} tokens=${{ ...told.reused, moved: told.moved_tokens, evaluated }} />
    ${told.divergence && html`<${Divergence} divergence=${told.divergence} />`}
    <pre tabindex="0" aria-label="The prompt">${told.prompt.map((part) => html`<${Part} part=${part} />`)}</pre>`;
}
