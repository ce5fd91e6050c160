// A tool that the server runs for an answer: what it was called with, what it gave, and whether it may.

import { call } from "./api.js";
import { milliseconds, number } from "./words.js";
import { html, useReducer, useState } from "./vendor/preact-htm.js";

const DECISIONS = [
  ["once", "Allow"],
  ["always", "Always in this conversation"],
  ["no", "Don’t allow"],
  ["never", "Never in this conversation"],
];

const LONG = 2000;

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

/** The question that someone has to answer next. */
export const openQuestion = (node) => node?.tools?.find((tool) => tool.question && !tool.decided);

export function ToolCall({ tool, isRunning }) {
  if (tool.question && isRunning) return html`<${Question} tool=${tool} />`;
  return html`<details class="tool">
    <summary>${tool.name}${outcomeOf(tool, isRunning)}</summary>
    ${tool.arguments && html`<pre aria-label="Arguments">${readable(tool.arguments)}</pre>`}
    ${tool.result !== undefined && html`<pre aria-label="Result">${visible(String(tool.result))}</pre>`}
    ${tool.remark && html`<p class="note">${tool.remark}</p>`}
  </details>`;
}

function outcomeOf({ state, ms }, isRunning) {
  if (state === "failed") return " · failed";
  if (state === "done") return ms ? ` · ${milliseconds(ms)}` : "";
  return isRunning ? " · runs" : " · did not run";
}

function Question({ tool }) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const [problem, setProblem] = useState("");
  const decide = async (decision) => {
    tool.decided = decision;
    setProblem("");
    try {
      await call("/v1/tools/decisions", { method: "POST", body: { id: tool.question, decision } });
    } catch (error) {
      tool.decided = undefined;
      setProblem(error.message);
    }
    redraw();
  };
  const long = tool.arguments.length > LONG && `${number(tool.arguments.length)} characters: scroll to see all of it.`;
  return html`<section class="question" role="group" aria-label=${`May the model run ${tool.name}?`}>
    <p><strong>May the model run ${tool.name}?</strong> It can do harm: look at what it is called with. ${long}</p>
    <pre tabindex="0" aria-label="Arguments">${readable(tool.arguments)}</pre>
    <div class="actions">
      ${DECISIONS.map(
        ([decision, words], index) => html`<button class=${index ? "" : "main"} disabled=${Boolean(tool.decided)} onClick=${() => decide(decision)}>${words}</button>`,
      )}
    </div>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
  </section>`;
}

/** JSON with its lines apart, and every letter of it as it is: what is decided on is what runs. */
export function readable(text) {
  try {
    JSON.parse(text);
  } catch {
    return visible(text);
  }
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  const spaced = text.replace(/"(?:[^"\\]|\\.)*"|[{}[\],:]|\s+/gs, (part) => {
    if (part[0] === '"') return part;
    if (part === "{" || part === "[") return (depth += 1), part + line();
    if (part === "}" || part === "]") return (depth = Math.max(depth - 1, 0)), line() + part;
    return part === "," ? part + line() : part === ":" ? ": " : "";
  });
  return visible(spaced);
}

/** Letters that cannot be seen, or that turn others around, by their numbers. */
export function visible(text) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cs}\u2028\u2029]/gu, (letter) =>
    letter === "\n" || letter === "\t" ? letter : `\\u{${letter.codePointAt(0).toString(16)}}`,
  );
}
