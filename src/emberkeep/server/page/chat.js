// The conversation in the middle: messages, branches, and the answer that is being written.

import { ApiError, stream } from "./api.js";
import { ROOT, add, branchesOf, choose, messagesUpTo, shown } from "./conversation.js";
import { Cost, costOf } from "./cost.js";
import { PromptDialog } from "./prompt.js";
import { loadColours, needsColours, toHtml } from "./markdown.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const REDRAWN_MS = 60;

/** Asks the model below a node, and fills the new message as it arrives. */
export async function answer(conversation, below, { signal, onChange }) {
  const node = add(conversation, below, { role: "assistant", content: "", reasoning: "", tools: [], isRunning: true });
  onChange();
  const told = {};
  try {
    for await (const { data } of stream("/v1/chat/completions", bodyOf(conversation, below), signal)) {
      const delta = data.choices?.[0]?.delta ?? {};
      node.content += delta.content ?? "";
      node.reasoning += delta.reasoning_content ?? "";
      if (data.emberkeep?.tool) noteTool(node, data.emberkeep.tool);
      else if (data.emberkeep) Object.assign(told, { emberkeep: data.emberkeep, timings: data.timings });
      if (data.usage) told.usage = data.usage;
      onChange();
    }
    node.cost = costOf(told);
  } catch (error) {
    if (error.name === "AbortError") node.isStopped = true;
    else node.error = error instanceof ApiError ? error.message : `Something went wrong: ${error.message}`;
  } finally {
    node.isRunning = false;
    onChange();
  }
}

export function bodyOf(conversation, below) {
  const { model, temperature, maxTokens } = conversation.settings;
  return {
    model: model || undefined,
    messages: messagesUpTo(conversation, below),
    stream: true,
    stream_options: { include_usage: true },
    temperature: temperature ?? undefined,
    max_tokens: maxTokens ?? undefined,
    conversation_id: conversation.id,
  };
}

function noteTool(node, tool) {
  const known = node.tools.findIndex((one) => one.id === tool.id);
  if (known < 0) node.tools.push(tool);
  else node.tools[known] = { ...node.tools[known], ...tool };
}

export function Chat({ conversation, isBusy, onAsk, onAgain, onStop, onChange }) {
  const messages = shown(conversation);
  const end = useRef(null);
  const last = messages.at(-1);
  useEffect(() => {
    if (isNearEnd(end.current)) end.current.scrollIntoView({ block: "end" });
  }, [last?.id, last?.content.length, last?.isRunning]);
  return html`<section class="chat" aria-label="Conversation">
    <div class="messages" role="region" aria-label="Messages" tabindex="0">
      ${messages.length === 0 && html`<${Welcome} />`}
      <ol>
        ${messages.map(
          (node) => html`<${Message}
            key=${node.id}
            ...${{ node, conversation, isBusy, onAsk, onAgain, onChange }}
          />`,
        )}
      </ol>
      <div ref=${end}></div>
    </div>
    <p class="spoken" role="status">${isBusy ? "The model is answering." : last?.role === "assistant" ? "Answered." : ""}</p>
    <${Composer} key=${conversation.id} isBusy=${isBusy} onSend=${(text) => onAsk(last?.id ?? ROOT, text)} onStop=${onStop} />
  </section>`;
}

function isNearEnd(element) {
  const list = element?.parentElement;
  return list && list.scrollHeight - list.scrollTop - list.clientHeight < 240;
}

function Welcome() {
  return html`<h1>Emberkeep</h1>
    <p>
      Ask something, and then something more: under each answer stands how much of the conversation did not have to be
      evaluated again, and where it was.
    </p>`;
}

function Message({ node, conversation, isBusy, onAsk, onAgain, onChange }) {
  const [isEdited, setEdited] = useState(false);
  const [isShown, setShown] = useState(false);
  const isUser = node.role === "user";
  const resend = (text) => {
    setEdited(false);
    onAsk(node.parent, text);
  };
  return html`<li class=${`message ${node.role}`} data-testid=${node.role}>
    <h2 class="spoken">${isUser ? "You" : "Model"}</h2>
    ${isEdited
      ? html`<${Editor} text=${node.content} onSend=${resend} onCancel=${() => setEdited(false)} />`
      : isUser
        ? html`<div class="text">${node.content}</div>`
        : html`<${Answer} node=${node} onShow=${() => setShown(true)} />`}
    ${isShown &&
    html`<${PromptDialog}
      body=${bodyOf(conversation, node.parent)}
      cost=${node.cost}
      onClose=${() => setShown(false)}
    />`}
    ${!node.isRunning &&
    !isEdited &&
    html`<div class="actions">
      <${Branches} ...${{ node, conversation, isBusy, onChange }} />
      ${isUser
        ? html`<button disabled=${isBusy} onClick=${() => setEdited(true)}>Edit</button>`
        : html`<button disabled=${isBusy} onClick=${() => onAgain(node.parent)}>Ask again</button>`}
      <button onClick=${() => navigator.clipboard?.writeText(node.content)}>Copy</button>
    </div>`}
  </li>`;
}

function Branches({ node, conversation, isBusy, onChange }) {
  const { count, index } = branchesOf(conversation, node);
  if (count < 2) return null;
  const go = (step) => {
    choose(conversation, node, step);
    onChange();
  };
  return html`<span class="branches">
    <button disabled=${isBusy} aria-label="Previous version" onClick=${() => go(-1)}>‹</button>
    <span>${index + 1} / ${count}</span>
    <button disabled=${isBusy} aria-label="Next version" onClick=${() => go(1)}>›</button>
  </span>`;
}

function Answer({ node, onShow }) {
  return html`
    ${node.reasoning && html`<details class="reasoning"><summary>Reasoning</summary><div class="text">${node.reasoning}</div></details>`}
    ${node.tools.map((tool) => html`<${ToolCall} key=${tool.id} tool=${tool} />`)}
    <${Markdown} text=${node.content} isRunning=${node.isRunning} />
    ${node.isStopped && html`<p class="note">Stopped.</p>`}
    ${node.error && html`<p class="error" role="alert">${node.error}</p>`}
    ${node.cost && html`<${Cost} cost=${node.cost} onShow=${node.cost.sources?.length && onShow} />`}
  `;
}

function ToolCall({ tool }) {
  return html`<details class="tool">
    <summary>${tool.name}</summary>
    ${tool.arguments && html`<pre>${tool.arguments}</pre>`}
    ${tool.result !== undefined && html`<pre>${typeof tool.result === "string" ? tool.result : JSON.stringify(tool.result)}</pre>`}
  </details>`;
}

/** Drawn again a few times a second while it grows, and once more when code can be coloured. */
function Markdown({ text, isRunning }) {
  const [drawn, setDrawn] = useState("");
  const [colours, setColours] = useState(0);
  const due = useRef(0);
  useEffect(() => {
    const wait = isRunning ? Math.max(due.current - Date.now(), 0) : 0;
    const timer = setTimeout(() => {
      due.current = Date.now() + REDRAWN_MS;
      setDrawn(toHtml(text));
    }, wait);
    if (needsColours(text)) loadColours().then(() => setColours((before) => before + 1));
    return () => clearTimeout(timer);
  }, [text, isRunning, colours]);
  return html`<div class=${`markdown ${isRunning ? "running" : ""}`} dangerouslySetInnerHTML=${{ __html: drawn }}></div>`;
}

function Editor({ text, onSend, onCancel }) {
  const [draft, setDraft] = useState(text);
  return html`<form class="editor" onSubmit=${(event) => (event.preventDefault(), draft.trim() && onSend(draft))}>
    <textarea
      aria-label="Edit your message"
      rows=${Math.min(draft.split("\n").length + 1, 12)}
      value=${draft}
      onInput=${(event) => setDraft(event.target.value)}
      onKeyDown=${(event) => event.key === "Escape" && onCancel()}
    ></textarea>
    <div class="actions">
      <button class="main" type="submit">Send as a new branch</button>
      <button type="button" onClick=${onCancel}>Cancel</button>
    </div>
  </form>`;
}

function Composer({ isBusy, onSend, onStop }) {
  const [draft, setDraft] = useState("");
  const field = useRef(null);
  useEffect(() => field.current?.focus(), []);
  const send = () => {
    if (isBusy || !draft.trim()) return;
    onSend(draft);
    setDraft("");
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  return html`<form class="composer" onSubmit=${(event) => (event.preventDefault(), send())}>
    <textarea
      ref=${field}
      aria-label="Your message"
      placeholder="Ask something. Enter sends, Shift+Enter starts a new line."
      rows=${Math.min(Math.max(draft.split("\n").length, 2), 10)}
      value=${draft}
      onInput=${(event) => setDraft(event.target.value)}
      onKeyDown=${onKeyDown}
    ></textarea>
    ${isBusy
      ? html`<button class="main" type="button" onClick=${onStop}>Stop</button>`
      : html`<button class="main" type="submit" disabled=${!draft.trim()}>Send</button>`}
  </form>`;
}
