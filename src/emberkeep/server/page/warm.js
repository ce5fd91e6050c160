// Evaluating the beginning of prompts before someone waits for it.

import { call } from "./api.js";
import { milliseconds, number } from "./words.js";
import { html, useState } from "./vendor/preact-htm.js";

const KINDS = {
  system: ["A system prompt", (content) => ({ messages: [{ role: "system", content }] })],
  text: ["A text, as completions get it", (text) => ({ text })],
};

export function Warm({ model, onActed }) {
  const [kind, setKind] = useState("system");
  const [text, setText] = useState("");
  const [answer, setAnswer] = useState({});
  const submit = async (event) => {
    event.preventDefault();
    if (answer.isAsked || !text.trim()) return;
    setAnswer({ isAsked: true });
    try {
      const warmed = await call("/v1/warm", { method: "POST", body: { ...KINDS[kind][1](text), model: model || undefined, ask_permission: true } });
      setAnswer(warmed.ready ? { warmed } : { problem: warmed.error });
      onActed();
    } catch (error) {
      setAnswer({ problem: error.message });
    }
  };
  return html`<form class="ask" aria-labelledby="warm-title" onSubmit=${submit}>
    <h2 id="warm-title">Warm</h2>
    <label>What prompts will begin with
      <select value=${kind} onChange=${(e) => setKind(e.target.value)}>
        ${Object.entries(KINDS).map(([name, [words]]) => html`<option value=${name}>${words}</option>`)}
      </select>
    </label>
    <textarea rows="3" aria-label="The text to warm" value=${text} onInput=${(e) => setText(e.target.value)}></textarea>
    <button class="main" type="submit" disabled=${answer.isAsked || !text.trim()}>${answer.isAsked ? "Evaluating…" : "Evaluate it now"}</button>
    <p role="status">${answer.warmed && wordsFor(answer.warmed)}</p>
    ${answer.problem && html`<p class="error" role="alert">${answer.problem}</p>`}
  </form>`;
}

function wordsFor({ tokens, evaluated_tokens: evaluated, seconds }) {
  if (!evaluated) return `All ${number(tokens)} tokens were there already.`;
  return `${number(evaluated)} of ${number(tokens)} tokens evaluated in ${milliseconds(1000 * seconds)}.`;
}
