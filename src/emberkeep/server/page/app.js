// What is on the page, and which conversation is open.

import { ApiError, call, key } from "./api.js";
import { CacheView } from "./cache.js";
import { Chat, answer } from "./chat.js";
import { add, asMarkdown, matches, newConversation } from "./conversation.js";
import { allKept, drop, keep } from "./kept.js";
import { html, render, useEffect, useReducer, useRef, useState } from "./vendor/preact-htm.js";

const VIEWS = [
  ["chat", "Chat"],
  ["cache", "Cache"],
];

function App() {
  const [models, setModels] = useState(null);
  const [problem, setProblem] = useState(null);
  const enter = async () => {
    try {
      setModels((await call("/v1/models")).data.map((model) => model.id));
      setProblem(null);
    } catch (error) {
      setProblem(error);
    }
  };
  useEffect(() => void enter(), []);
  if (problem instanceof ApiError && problem.status === 401) return html`<${KeyPrompt} onKey=${enter} />`;
  if (problem) return html`<main class="alone"><p role="alert">${problem.message}</p><button onClick=${enter}>Try again</button></main>`;
  return models && html`<${Workplace} models=${models} />`;
}

function KeyPrompt({ onKey }) {
  const [value, setValue] = useState("");
  const [isKept, setKept] = useState(false);
  const submit = (event) => {
    event.preventDefault();
    key.set(value.trim(), isKept);
    onKey();
  };
  return html`<main class="alone">
    <form onSubmit=${submit}>
      <h1>Emberkeep</h1>
      <p>${key.get() ? "That key was not accepted." : "This server has an API key."} Its operator knows it (api_key).</p>
      <label>Key <input type="password" autocomplete="current-password" required value=${value} onInput=${(e) => setValue(e.target.value)} /></label>
      <label class="check"><input type="checkbox" checked=${isKept} onChange=${(e) => setKept(e.target.checked)} /> Remember it in this browser</label>
      <button class="main" type="submit">Continue</button>
    </form>
  </main>`;
}

function Workplace({ models }) {
  const [list, setList] = useState([]);
  const [current, setCurrent] = useState(() => newConversation());
  const [isOpen, setOpen] = useState(false);
  const [view, setView] = useState("chat");
  const [, redraw] = useReducer((count) => count + 1, 0);
  const running = useRef(null);

  useEffect(() => {
    allKept().then((kept) => {
      setList(kept);
      const id = location.hash.slice(1);
      const wanted = kept.find((one) => one.id === id);
      if (wanted) setCurrent(wanted);
    });
  }, []);

  const save = async (conversation) => {
    await keep(structuredClone(conversation));
    setList(await allKept());
  };
  const open = (conversation) => {
    running.current?.abort();
    setCurrent(conversation);
    setOpen(false);
    setView("chat");
    history.replaceState(null, "", `#${conversation.id}`);
  };
  const complete = async (below) => {
    const conversation = current;
    running.current = new AbortController();
    redraw();
    history.replaceState(null, "", `#${conversation.id}`);
    await save(conversation);
    await answer(conversation, below, { signal: running.current.signal, onChange: redraw });
    running.current = null;
    await save(conversation);
    redraw();
  };
  const ask = (below, text) => complete(add(current, below, { role: "user", content: text }).id);
  const changed = () => (redraw(), save(current));
  const remove = async (conversation) => {
    await drop(conversation.id);
    setList(await allKept());
    if (conversation.id === current.id) open(newConversation(current.settings));
  };

  return html`<div class="workplace">
    <header>
      <button class="menu" aria-expanded=${isOpen} aria-controls="side" onClick=${() => setOpen(!isOpen)}>Conversations</button>
      <a class="brand" href="/">Emberkeep</a>
      <nav class="views" aria-label="Views">
        ${VIEWS.map(([name, words]) => html`<button aria-current=${view === name ? "page" : undefined} onClick=${() => setView(name)}>${words}</button>`)}
      </nav>
    </header>
    <${Side} id="side" ...${{ list, current, isOpen, open, remove, models, changed }} />
    <main>
      ${view === "cache"
        ? html`<${CacheView} />`
        : html`<${Chat}
            conversation=${current}
            isBusy=${running.current !== null}
            onAsk=${ask}
            onAgain=${complete}
            onStop=${() => running.current?.abort()}
            onChange=${changed}
          />`}
    </main>
  </div>`;
}

function Side({ id, list, current, isOpen, open, remove, models, changed }) {
  const [query, setQuery] = useState("");
  const found = query ? list.filter((one) => matches(one, query)) : list;
  return html`<nav id=${id} class=${`side ${isOpen ? "open" : ""}`} aria-label="Conversations">
    <button class="main" onClick=${() => open(newConversation(current.settings))}>New conversation</button>
    <input type="search" aria-label="Search conversations" placeholder="Search" value=${query} onInput=${(e) => setQuery(e.target.value)} />
    <ul>
      ${found.map(
        (one) => html`<li key=${one.id} class=${one.id === current.id ? "current" : ""}>
          <button class="title" aria-current=${one.id === current.id} onClick=${() => open(one)}>${one.title || "New conversation"}</button>
          <button aria-label=${`Remove ${one.title}`} onClick=${() => remove(one)}>×</button>
        </li>`,
      )}
    </ul>
    <${Settings} ...${{ current, models, changed }} />
  </nav>`;
}

function Settings({ current, models, changed }) {
  const set = (name, value) => {
    current.settings[name] = value;
    changed();
  };
  const numeric = (event) => (event.target.value === "" ? null : Number(event.target.value));
  return html`<details class="settings">
    <summary>Settings</summary>
    <label>Title <input value=${current.title} onChange=${(e) => ((current.title = e.target.value), changed())} /></label>
    <label>Model
      <select value=${current.settings.model ?? ""} onChange=${(e) => set("model", e.target.value)}>
        <option value="">default</option>
        ${models.map((model) => html`<option value=${model}>${model}</option>`)}
      </select>
    </label>
    <label>System prompt <textarea rows="3" value=${current.settings.system ?? ""} onChange=${(e) => set("system", e.target.value)}></textarea></label>
    <label>Temperature <input type="number" min="0" max="2" step="0.1" value=${current.settings.temperature ?? ""} onChange=${(e) => set("temperature", numeric(e))} /></label>
    <label>Longest answer, tokens <input type="number" min="1" value=${current.settings.maxTokens ?? ""} onChange=${(e) => set("maxTokens", numeric(e))} /></label>
    <button onClick=${() => download(current)}>Export</button>
  </details>`;
}

function download(conversation) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([asMarkdown(conversation)], { type: "text/markdown" }));
  link.download = `${(conversation.title || "conversation").replace(/[^\w-]+/g, "-").slice(0, 40)}.md`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

render(html`<${App} />`, document.getElementById("app"));
