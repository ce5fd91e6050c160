// What is on the page, and which conversation is open.

import { ApiError, call, health, key, lookAt } from "./api.js";
import { Chat, answer } from "./chat.js";
import { add, asMarkdown, matches, newConversation } from "./conversation.js";
import { allKept, drop, keep } from "./kept.js";
import { html, render, useEffect, useReducer, useRef, useState } from "./vendor/preact-htm.js";

const SAVED_MS = 1000; // while an answer is written
const PATIENCE_MS = 500;
const LOADING_MS = 500; // between two looks at how far a model is

const VIEWS = [
  ["chat", "Chat"],
  ["cache", "Cache"],
  ["requests", "Requests"],
  ["models", "Models"],
  ["tools", "Tools"],
  ["memory", "Memory"],
];

const OF_A_REPLICA = ["cache", "requests"]; // views of what one server holds and does

function App() {
  const [models, setModels] = useState(null);
  const [replicas, setReplicas] = useState([]);
  const [problem, setProblem] = useState(null);
  const enter = async () => {
    try {
      const named = Object.keys((await health()).replicas ?? {}).sort(); // the next question says what is wrong
      lookAt(named[0] ?? "");
      setReplicas(named);
      setModels((await call("/v1/models")).data.map((model) => model.id));
      setProblem(null);
    } catch (error) {
      setProblem(error);
    }
  };
  useEffect(() => void enter(), []);
  if (problem instanceof ApiError && problem.status === 401) return html`<${KeyPrompt} onKey=${enter} />`;
  const otherKey = () => (key.forget(), enter());
  if (problem) {
    return html`<main class="alone">
      <p role="alert">${problem.message}</p>
      <button class="main" onClick=${enter}>Try again</button>
      ${key.get() && html`<button onClick=${otherKey}>Use another key</button>`}
    </main>`;
  }
  return models && html`<${Workplace} models=${models} replicas=${replicas} onReady=${enter} />`;
}

/** How far a server is that has just been started; nothing once it can answer. */
function Starting({ onReady }) {
  const [told, setTold] = useState(null);
  useEffect(() => {
    let next = null;
    const look = async (wasLoading) => {
      const now = await health();
      const isLoading = now.status === "loading";
      setTold(isLoading ? now : null);
      if (isLoading) next = setTimeout(look, LOADING_MS, true);
      else if (wasLoading) onReady();
    };
    look(false);
    return () => clearTimeout(next);
  }, []);
  return told && html`<p class="starting" role="status">
    ${told.step}${told.progress != null && ` ${Math.floor(100 * told.progress)}%`}. What you ask waits for it.
    <progress aria-label="How far it is" value=${told.progress ?? undefined}></progress>
  </p>`;
}

function KeyPrompt({ onKey }) {
  const [value, setValue] = useState("");
  const [isKept, setKept] = useState(false);
  const [isOdd, setOdd] = useState(false);
  const submit = (event) => {
    event.preventDefault();
    setOdd(!/^[\x20-\xff]+$/.test(value.trim()));
    if (!/^[\x20-\xff]+$/.test(value.trim())) return; // no header can have it
    key.set(value.trim(), isKept);
    onKey();
  };
  return html`<main class="alone">
    <form onSubmit=${submit}>
      <h1>Emberkeep</h1>
      <p role=${key.get() || isOdd ? "alert" : undefined}>
        ${isOdd ? "That cannot be a key: it has other characters than a key may have." : key.get() ? "That key was not accepted." : "This server has an API key."}
        ${" "}Its operator knows it (api_key).
      </p>
      <label>Key <input type="password" autocomplete="current-password" required value=${value} onInput=${(e) => setValue(e.target.value)} /></label>
      <label class="check"><input type="checkbox" checked=${isKept} onChange=${(e) => setKept(e.target.checked)} /> Remember it in this browser</label>
      <button class="main" type="submit">Continue</button>
    </form>
  </main>`;
}

function Workplace({ models, replicas, onReady }) {
  const [replica, setReplica] = useState(replicas[0]);
  const [list, setList] = useState([]);
  const [current, setCurrent] = useState(() => newConversation());
  const [isOpen, setOpen] = useState(false);
  const [view, setView] = useState(viewInAddress);
  const [, redraw] = useReducer((count) => count + 1, 0);
  const [trouble, setTrouble] = useState("");
  const running = useRef(null);
  const removed = useRef(new Set()).current;

  const trying = async (action) => {
    try {
      await action();
      setTrouble("");
    } catch (error) {
      setTrouble(`This browser does not keep conversations now (${error?.message ?? "no room"}): export what you need.`);
    }
  };
  useEffect(() => {
    trying(async () => {
      const kept = await allKept();
      setList(kept);
      const wanted = kept.find((one) => one.id === location.hash.slice(1));
      if (wanted) setCurrent(wanted);
    });
  }, []);
  useEffect(() => {
    const refresh = () => document.visibilityState === "visible" && !running.current && trying(async () => setList(await allKept()));
    document.addEventListener("visibilitychange", refresh); // another tab may have gone on
    return () => document.removeEventListener("visibilitychange", refresh);
  }, []);
  useEffect(() => {
    const follow = () => setView(viewInAddress());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);

  const show = (name) => {
    setView(name);
    history.pushState(null, "", name === "chat" ? `#${current.id}` : `#/${name}`);
  };
  const look = (name) => {
    lookAt(name);
    setReplica(name);
  };
  const save = (conversation) =>
    trying(async () => {
      if (removed.has(conversation.id)) return;
      await keep(structuredClone(conversation));
      // Not read again: with pictures that takes long, and it happens while answers are written.
      setList((known) => [conversation, ...known.filter((one) => one.id !== conversation.id)]);
    });
  const open = (conversation) => {
    setOpen(false);
    if (conversation.id === current.id) return;
    running.current?.abort();
    setCurrent(conversation);
    history.replaceState(null, "", `#${conversation.id}`);
  };
  const complete = async (below) => {
    if (running.current) return;
    const conversation = current;
    const mine = (running.current = new AbortController());
    redraw();
    history.replaceState(null, "", `#${conversation.id}`);
    const saving = setInterval(() => save(conversation), SAVED_MS);
    save(conversation);
    try {
      await answer(conversation, below, { signal: mine.signal, onChange: redraw });
    } finally {
      clearInterval(saving);
      if (running.current === mine) running.current = null;
      // What is shown as finished is kept, unless that takes long.
      await Promise.race([save(conversation), new Promise((resolve) => setTimeout(resolve, PATIENCE_MS))]);
      redraw();
    }
  };
  const ask = (below, text, images = []) =>
    running.current || complete(add(current, below, { role: "user", content: text, images }).id);
  const changed = () => (redraw(), save(current));
  const remove = (conversation) => {
    if (!confirm(`Remove “${conversation.title || "this conversation"}” from this browser?`)) return;
    removed.add(conversation.id);
    if (conversation.id === current.id) open(newConversation(current.settings));
    trying(async () => {
      await drop(conversation.id);
      setList(await allKept());
    });
  };

  return html`<div class="workplace" data-view=${view}>
    <header>
      <button class="menu" aria-expanded=${isOpen} aria-controls="side" aria-label="Conversations" onClick=${() => setOpen(!isOpen)}>☰</button>
      <a class="brand" href="/">Emberkeep</a>
      <nav class="views" aria-label="Views">
        ${VIEWS.map(([name, words]) => html`<button aria-current=${view === name ? "page" : undefined} onClick=${() => show(name)}>${words}</button>`)}
      </nav>
      ${OF_A_REPLICA.includes(view) && replicas.length > 1 && html`<${ReplicaChoice} ...${{ replicas, replica }} onChoose=${look} />`}
    </header>
    ${view === "chat" && html`<${Side} id="side" ...${{ list, current, isOpen, open, remove, models, changed, redraw }} onClose=${() => setOpen(false)} />`}
    <main>
      <${Starting} onReady=${onReady} />
      ${trouble && html`<p class="error trouble" role="alert">${trouble}</p>`}
      ${view !== "chat"
        ? html`<${OtherView} key=${`${view} ${replica}`} name=${view} models=${models} />`
        : html`<${Chat}
            conversation=${current}
            isBusy=${running.current !== null}
            onAsk=${ask}
            onAgain=${complete}
            onStop=${() => running.current?.abort()}
            onChange=${changed}
            model=${current.settings.model || models[0]}
          />`}
    </main>
  </div>`;
}

function ReplicaChoice({ replicas, replica, onChoose }) {
  return html`<label class="replica">Replica <select value=${replica} onChange=${(e) => onChoose(e.target.value)}>
    ${replicas.map((name) => html`<option value=${name}>${name}</option>`)}
  </select></label>`;
}

function viewInAddress() {
  const named = location.hash.startsWith("#/") ? location.hash.slice(2) : "chat";
  return VIEWS.some(([name]) => name === named) ? named : "chat";
}

/** A view is fetched when someone looks at it: a module of its name, which exports `View`. */
function OtherView({ name, models }) {
  const [module, setModule] = useState(null);
  const [problem, setProblem] = useState("");
  useEffect(() => void import(`./${name}.js`).then(setModule, () => setProblem("The server does not answer: is it still running?")), []);
  if (problem) return html`<p class="error trouble" role="alert">${problem}</p>`;
  return module && html`<${module.View} models=${models} />`;
}

function Side({ id, list, current, isOpen, open, remove, models, changed, redraw, onClose }) {
  const [query, setQuery] = useState("");
  const found = query ? list.filter((one) => matches(one, query)) : list;
  return html`<nav id=${id} class=${`side ${isOpen ? "open" : ""}`} aria-label="Conversations" onKeyDown=${(e) => e.key === "Escape" && onClose()}>
    <button class="main" onClick=${() => open(newConversation(current.settings))}>New conversation</button>
    <input type="search" aria-label="Search conversations" placeholder="Search" value=${query} onInput=${(e) => setQuery(e.target.value)} />
    ${query && !found.length && html`<p class="note">No conversation has “${query}”.</p>`}
    <ul>
      ${found.map(
        (one) => html`<li key=${one.id} class=${one.id === current.id ? "current" : ""}>
          <button class="title" aria-current=${one.id === current.id} onClick=${() => open(one)}>${one.title || "New conversation"}</button>
          <button aria-label=${`Remove ${one.title}`} onClick=${() => remove(one)}>×</button>
        </li>`,
      )}
    </ul>
    <${Settings} ...${{ current, models, changed, redraw }} />
  </nav>`;
}

/** Every letter counts at once, since the page may be drawn again at any time; it is kept when the field is left. */
function Settings({ current, models, changed, redraw }) {
  const field = (name, read = (target) => target.value) => ({
    value: current.settings[name] ?? "",
    onInput: ({ target }) => ((current.settings[name] = read(target)), redraw()),
    onChange: changed,
  });
  const numeric = (target) => (target.value === "" ? null : Number(target.value));
  const title = { value: current.title, onInput: (e) => ((current.title = e.target.value), redraw()), onChange: changed };
  return html`<details class="settings">
    <summary>Settings</summary>
    <label>Title <input ...${title} /></label>
    <label>Model
      <select ...${field("model")}>
        <option value="">default</option>
        ${models.map((model) => html`<option value=${model}>${model}</option>`)}
      </select>
    </label>
    <label>System prompt <textarea rows="3" ...${field("system")}></textarea></label>
    <label>Temperature <input type="number" min="0" max="2" step="0.1" ...${field("temperature", numeric)} /></label>
    <label>Longest answer, tokens <input type="number" min="1" ...${field("maxTokens", numeric)} /></label>
    <button onClick=${() => download(current)}>Export</button>
    ${key.get() && html`<button onClick=${() => (key.forget(), location.reload())}>Forget the key</button>`}
  </details>`;
}

function download(conversation) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([asMarkdown(conversation)], { type: "text/markdown" }));
  link.download = `${(conversation.title || "conversation").replace(/[^\p{L}\p{N}-]+/gu, "-").slice(0, 40)}.md`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

render(html`<${App} />`, document.getElementById("app"));
