// The conversation in the middle: messages, branches, and the answer that is being written.

import { ApiError, call, stream } from "./api.js";
import { Composer, Pictures, pictureRoom } from "./composer.js";
import { ROOT, add, branchesOf, choose, messagesUpTo, shown } from "./conversation.js";
import { Cost, costOf, costOfRequest } from "./cost.js";
import { PromptDialog } from "./prompt.js";
import { ToolCall, noteQuestion, noteTool, openQuestion } from "./tool_call.js";
import { loadColours, needsColours, toHtml } from "./markdown.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const REDRAWN_MS = 60;

/** Asks the model below a node, and fills the new message as it arrives; that it is over is not told to `onChange`. */
export async function answer(conversation, below, { signal, onChange }) {
  const asked = { ...conversation.settings };
  const node = add(conversation, below, { role: "assistant", content: "", reasoning: "", tools: [], isRunning: true, asked });
  onChange();
  const told = {};
  try {
    for await (const { data } of stream("/v1/chat/completions", bodyOf(conversation, below, asked), signal)) {
      const delta = data.choices?.[0]?.delta ?? {};
      node.content += delta.content ?? "";
      node.reasoning += delta.reasoning_content ?? "";
      if (data.emberkeep?.tool) noteTool(node, data.emberkeep.tool);
      else if (data.emberkeep?.permission) noteQuestion(node, data.emberkeep.permission);
      else if (data.emberkeep) Object.assign(told, { emberkeep: data.emberkeep, timings: data.timings });
      if (data.usage) told.usage = data.usage;
      if (data.choices?.[0]?.finish_reason === "length") node.isCut = true;
      onChange();
    }
    node.cost = costOf(told);
  } catch (error) {
    if (error.name === "AbortError") Object.assign(node, { isStopped: true, cost: await costUntilNow(conversation) });
    else node.error = error instanceof ApiError ? error.message : `Something went wrong: ${error.message}`;
  } finally {
    node.isRunning = false;
  }
}

/** Of the latest answer; null where the server does not tell. */
async function costUntilNow({ id }) {
  try {
    const { data } = await call("/v1/requests?limit=50");
    const latest = data.find((one) => one.conversation_id === id);
    return latest ? costOfRequest(latest) : null;
  } catch {
    return null;
  }
}

function bodyOf(conversation, below, settings) {
  const { model, temperature, maxTokens } = settings;
  return {
    model: model || undefined,
    messages: messagesUpTo(conversation, below, settings),
    stream: true,
    stream_options: { include_usage: true },
    temperature: temperature ?? undefined,
    max_tokens: maxTokens ?? undefined,
    conversation_id: conversation.id,
    ask_permission: true,
  };
}

export function Chat({ conversation, model, isBusy, onAsk, onAgain, onStop, onChange }) {
  const messages = shown(conversation);
  const last = messages.at(-1);
  const hasAnswered = useRef(false);
  hasAnswered.current ||= isBusy;
  const asked = isBusy && openQuestion(last);
  const said = asked ? `The model asks whether it may run ${asked.name}.` : isBusy ? "The model is answering." : hasAnswered.current && !last?.error ? "Answered." : "";
  const list = useStickyEnd(conversation.id);
  return html`<section class="chat" aria-label="Conversation">
    <div ref=${list} class="messages" role="region" aria-label="Messages" tabindex="0">
      ${messages.length === 0 && html`<${Welcome} model=${model} />`}
      <ol>
        ${messages.map(
          (node, index) => html`<${Message}
            key=${index}
            isLast=${node === last}
            ...${{ node, conversation, isBusy, onAsk, onAgain, onChange }}
          />`,
        )}
      </ol>
    </div>
    <p class="spoken" role="status">${said}</p>
    <${Composer} key=${conversation.id} room=${pictureRoom(messages)} isBusy=${isBusy} onSend=${(text, images) => onAsk(last?.id ?? ROOT, text, images)} onStop=${onStop} />
  </section>`;
}

/** A list that stays at its end while that grows, unless someone has scrolled away from it. */
function useStickyEnd(id) {
  const list = useRef(null);
  useEffect(() => {
    const element = list.current;
    let sticks = true;
    const onScroll = () => (sticks = element.scrollHeight - element.scrollTop - element.clientHeight < 80);
    const observer = new ResizeObserver(() => sticks && (element.scrollTop = element.scrollHeight));
    observer.observe(element.querySelector("ol"));
    element.addEventListener("scroll", onScroll);
    return () => (observer.disconnect(), element.removeEventListener("scroll", onScroll));
  }, [id]);
  return list;
}

function Welcome({ model }) {
  return html`<h1>Emberkeep</h1>
    <p>
      You talk to <strong>${model}</strong>. Ask something, and then something more: the bar under each answer shows how much of the
      conversation was still known, and did not have to be read again.
    </p>`;
}

function Message({ node, isLast, conversation, isBusy, onAsk, onAgain, onChange }) {
  const [isEdited, setEdited] = useState(false);
  const [isShown, setShown] = useState(false);
  const isUser = node.role === "user";
  const resend = (text) => {
    setEdited(false);
    onAsk(node.parent, text, node.images);
  };
  return html`<li class=${`message ${node.role}`} data-testid=${node.role}>
    <h2 class="spoken">${isUser ? "You" : "Model"}</h2>
    ${isEdited
      ? html`<${Editor} text=${node.content} hasMore=${node.images?.length > 0} isBusy=${isBusy} onSend=${resend} onCancel=${() => setEdited(false)} />`
      : isUser
        ? html`<${Pictures} images=${node.images} /><div class="text">${node.content}</div>`
        : html`<${Answer} node=${node} onShow=${() => setShown(true)} />`}
    ${isShown &&
    html`<${PromptDialog}
      body=${bodyOf(conversation, node.parent, node.asked ?? conversation.settings)}
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
      ${isUser && isLast && html`<button disabled=${isBusy} onClick=${() => onAgain(node.id)}>Ask</button>`}
      ${navigator.clipboard && html`<button onClick=${() => navigator.clipboard.writeText(node.content)}>Copy</button>`}
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
    ${node.tools.map((tool) => html`<${ToolCall} key=${tool.id} tool=${tool} isRunning=${node.isRunning} />`)}
    <${Markdown} text=${node.content} isRunning=${node.isRunning} />
    ${node.isStopped && html`<p class="note">Stopped.</p>`}
    ${node.isCut && html`<p class="note">It was cut at the longest answer that is allowed: see Settings, or ask it to go on.</p>`}
    ${node.error && html`<p class="error" role="alert">${node.error}</p>`}
    ${node.cost && html`<${Cost} cost=${node.cost} onShow=${node.cost.sources?.length > 0 && onShow} />`}
  `;
}

/** Drawn again a few times a second while it grows, and once more when code can be coloured. */
function Markdown({ text, isRunning }) {
  const [drawn, setDrawn] = useState("");
  const [colours, setColours] = useState(0);
  const due = useRef(0);
  useEffect(() => {
    const wait = isRunning ? Math.max(due.current - Date.now(), 0) : 0;
    const timer = setTimeout(() => {
      const begun = Date.now();
      setDrawn(toHtml(text));
      due.current = Date.now() + Math.max(REDRAWN_MS, 4 * (Date.now() - begun));
    }, wait);
    if (needsColours(text)) loadColours().then(() => setColours((before) => before + 1));
    return () => clearTimeout(timer);
  }, [text, isRunning, colours]);
  return html`<div class=${`markdown ${isRunning ? "running" : ""}`} dangerouslySetInnerHTML=${{ __html: drawn }}></div>`;
}

function Editor({ text, hasMore, isBusy, onSend, onCancel }) {
  const [draft, setDraft] = useState(text);
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const send = () => (draft.trim() || hasMore) && !isBusy && onSend(draft.trimEnd());
  const onKeyDown = (event) => {
    if (event.key === "Escape") onCancel();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  return html`<form class="editor" onSubmit=${(event) => (event.preventDefault(), send())}>
    <textarea
      ref=${field}
      aria-label="Edit your message"
      rows=${Math.min(draft.split("\n").length + 1, 12)}
      value=${draft}
      onInput=${(event) => setDraft(event.target.value)}
      onKeyDown=${onKeyDown}
    ></textarea>
    <div class="actions">
      <button class="main" type="submit" disabled=${isBusy}>Send as a new branch</button>
      <button type="button" onClick=${onCancel}>Cancel</button>
    </div>
  </form>`;
}
