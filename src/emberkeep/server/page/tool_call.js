// A tool that the server runs for an answer: what it was called with, what it gave, and whether it may.

import { call } from "./api.js";
import { milliseconds } from "./words.js";
import { html, useState } from "./vendor/preact-htm.js";

const DECISIONS = [
  ["once", "Allow"],
  ["always", "Always in this conversation"],
  ["no", "Don’t allow"],
  ["never", "Never in this conversation"],
];

/** What is told about a call, added to what is known about it. */
export function noteTool(node, tool) {
  const known = node.tools.findIndex((one) => one.id === tool.id);
  if (known < 0) node.tools.push(tool);
  else node.tools[known] = { ...node.tools[known], ...tool, question: undefined };
}

/** A call waits for someone to allow it. */
export function noteQuestion(node, { id, call_id, name, group, arguments: given }) {
  noteTool(node, { id: call_id, name, group, arguments: given, state: "asks" });
  node.tools.find((one) => one.id === call_id).question = id;
}

export function ToolCall({ tool, isRunning }) {
  if (tool.question && isRunning) return html`<${Question} tool=${tool} />`;
  return html`<details class="tool">
    <summary>${tool.name}${outcomeOf(tool, isRunning)}</summary>
    ${tool.arguments && html`<pre aria-label="Arguments">${readable(tool.arguments)}</pre>`}
    ${tool.result !== undefined && html`<pre aria-label="Result">${typeof tool.result === "string" ? tool.result : JSON.stringify(tool.result)}</pre>`}
    ${tool.remark && html`<p class="note">${tool.remark}</p>`}
  </details>`;
}

function outcomeOf({ state, ms }, isRunning) {
  if (state === "failed") return " · failed";
  if (state === "done") return ms ? ` · ${milliseconds(ms)}` : "";
  return isRunning ? " · runs" : " · did not run";
}

function Question({ tool }) {
  const [decided, setDecided] = useState("");
  const [problem, setProblem] = useState("");
  const decide = (decision) => {
    setDecided(decision);
    setProblem("");
    call("/v1/tools/decisions", { method: "POST", body: { id: tool.question, decision } }).catch((error) => {
      setDecided("");
      setProblem(error.message);
    });
  };
  return html`<section class="question" role="group" aria-label=${`May the model run ${tool.name}?`}>
    <p><strong>May the model run ${tool.name}?</strong> It can do harm: look at what it is called with.</p>
    <pre tabindex="0" aria-label="Arguments">${readable(tool.arguments)}</pre>
    <div class="actions">
      ${DECISIONS.map(
        ([decision, words], index) => html`<button class=${index ? "" : "main"} disabled=${decided !== ""} onClick=${() => decide(decision)}>${words}</button>`,
      )}
    </div>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
  </section>`;
}

/** JSON with its lines apart; what is none, as it is. */
function readable(text) {
  try {
    const value = JSON.parse(text);
    return JSON.stringify(value, null, 2);
  } catch {
    return text;
  }
}
