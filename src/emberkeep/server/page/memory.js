// What is remembered of one user: searching it, facts, saved conversations, taking it along, forgetting it.

import { blobOf, call } from "./api.js";
import { ago, number } from "./words.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const FOUND = 20;
const LISTED = 200;
const COUNTED = [
  ["turns", "turns have left a conversation"],
  ["facts", "facts"],
  ["answers", "stored answers"],
  ["conversations", "saved conversations"],
  ["responses", "stored responses"],
];

export function View() {
  const [user, setUser] = useState("");
  const [counts, setCounts] = useState(null);
  const [problem, setProblem] = useState(null);
  const [version, setVersion] = useState(0);
  useEffect(() => {
    call(pathOf("/stats", user)).then((told) => (setCounts(told), setProblem(null)), setProblem);
  }, [user, version]);
  const changed = () => setVersion((before) => before + 1);
  if (problem?.code === "memory_off") return html`<${Off} sentence=${problem.message} />`;
  return html`<section class="view memory" aria-label="Memory">
    <h1>Memory</h1>
    <${Whose} user=${user} onUser=${setUser} />
    ${problem
      ? html`<p class="error" role="alert">${problem.message}</p>`
      : counts &&
        html`<${Counts} counts=${counts} />
          <${Search} key=${`search ${user}`} user=${user} onChange=${changed} />
          <${Facts} key=${`facts ${user}`} user=${user} version=${version} onChange=${changed} />
          <${Conversations} key=${`conversations ${user}`} user=${user} version=${version} onChange=${changed} />
          <${Whole} user=${user} onChange=${changed} />`}
  </section>`;
}

function Off({ sentence }) {
  return html`<section class="view memory" aria-label="Memory">
    <h1>Memory</h1>
    <p class="error" role="alert">${sentence}</p>
    <p>
      <code>memory = true</code> stands in <code>emberkeep.toml</code>, or <code>EMBERKEEP_MEMORY=true</code> before
      <code> emberkeep serve</code>. What leaves a long conversation is kept from then on, and can be found here.
    </p>
  </section>`;
}

/** The path of something of one user; an empty name stands for everybody who gave none. */
function pathOf(path, user, more = {}) {
  return `/v1/memory${path}?${new URLSearchParams({ user_id: user, ...more })}`;
}

function Whose({ user, onUser }) {
  const [draft, setDraft] = useState(user);
  return html`<form class="row" onSubmit=${(event) => (event.preventDefault(), onUser(draft.trim()))}>
    <label>Whose (user_id)
      <input value=${draft} placeholder="those who gave no name, like this page" spellcheck="false" autocapitalize="off" onInput=${(e) => setDraft(e.target.value)} />
    </label>
    <button type="submit" disabled=${draft.trim() === user}>Show</button>
  </form>`;
}

function Counts({ counts }) {
  const known = COUNTED.filter(([name]) => counts[name] > 0);
  if (!known.length) return html`<p class="note">Nothing yet: what leaves a long conversation is kept here, and so are facts.</p>`;
  return html`<dl class="figures">
    ${known.map(([name, words]) => html`<div><dt>${words}</dt><dd>${number(counts[name])}</dd></div>`)}
    ${counts.newest != null && html`<div><dt>the latest turn</dt><dd>${since(counts.newest)}</dd></div>`}
  </dl>`;
}

const since = (at) => ago(Date.now() / 1000 - at);

// ── searching ──

function Search({ user, onChange }) {
  const [query, setQuery] = useState("");
  const [within, setWithin] = useState("");
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  const asked = useRef(0);
  const search = (conversation) => {
    const mine = ++asked.current;
    const more = conversation ? { conversation_id: conversation } : {};
    setWithin(conversation);
    if (!query.trim()) return setFound(null);
    call(pathOf("/search", user, { query: query.trim(), max_results: FOUND, ...more })).then(
      ({ data }) => mine === asked.current && (setFound(data), setProblem("")),
      (error) => setProblem(error.message),
    );
  };
  const submit = (event) => (event.preventDefault(), search(within));
  const forgotten = () => (onChange(), search(""));
  return html`<h2>Search</h2>
    <form class="row" role="search" onSubmit=${submit}>
      <input type="search" aria-label="Search what is remembered" placeholder="Where is the spare key?" value=${query} onInput=${(e) => setQuery(e.target.value)} />
      <button class="main" type="submit" disabled=${!query.trim()}>Search</button>
    </form>
    ${within && html`<p class="note">Only in <code>${within}</code> · <button class="link" onClick=${() => search("")}>search all</button></p>`}
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <p class="spoken" role="status">${found && `${found.length} found`}</p>
    ${found?.length === 0 && html`<p>Nothing like that is remembered: only what has left a conversation is searched, and stored answers.</p>`}
    ${found?.length > 0 &&
    html`<ol class="found">
      ${found.map((one) => html`<${Recollection} key=${one.id} ...${{ one, user, onWithin: search, onForgotten: forgotten }} />`)}
    </ol>`}`;
}

function Recollection({ one, user, onWithin, onForgotten }) {
  const words = new Set([...one.highlight.matchAll(MARK)].map(([, word]) => word.toLowerCase()));
  const said = [
    [one.kind === "answer" ? "Question" : "You", one.user_text],
    [one.kind === "answer" ? "Answer" : "Model", one.assistant_text],
    ...one.tool_uses.map((use) => [use.name, `${use.arguments}\n${use.result}`]),
  ];
  return html`<li>
    <p class="passage">${one.highlight.split(MARK).map(markedOdd)}</p>
    <p class="note">
      ${one.kind === "answer" ? "stored answer" : "said"} ${since(one.at)}
      ${one.conversation && html` in <code>${one.conversation}</code> · <button class="link" onClick=${() => onWithin(one.conversation)}>search only there</button>`}
      ${one.conversation && html` · <${Forget} user=${user} conversation=${one.conversation} onForgotten=${onForgotten} />`}
    </p>
    <details>
      <summary>The whole turn</summary>
      <dl class="facts">${said.filter(([, text]) => text).map(([who, text]) => html`<dt>${who}</dt><dd class="text"><${Marked} text=${text} words=${words} /></dd>`)}</dl>
    </details>
  </li>`;
}

const MARK = /\*\*([^*\s][^*]*)\*\*/g; // around words that the server has found
const markedOdd = (part, index) => (index % 2 ? html`<mark>${part}</mark>` : part);

/** A text with some words marked, wherever they stand. */
function Marked({ text, words }) {
  if (!words.size) return text;
  const any = [...words].map((word) => word.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&")).join("|");
  return text.split(new RegExp(`(?<![\\p{L}\\p{N}])(${any})(?![\\p{L}\\p{N}])`, "giu")).map(markedOdd);
}

// ── facts ──

function Facts({ user, version, onChange }) {
  const [facts, setFacts] = useState(null);
  const [problem, setProblem] = useState("");
  const [draft, setDraft] = useState({ name: "", value: "" });
  const field = useRef(null);
  useEffect(() => {
    call(pathOf("/facts", user)).then(({ data }) => setFacts(data), (error) => setProblem(error.message));
  }, [user, version]);
  const act = (action) => action.then(() => (setProblem(""), onChange()), (error) => setProblem(error.message));
  const pathOfFact = (name) => pathOf(`/facts/${encodeURIComponent(name)}`, user);
  const set = (event) => {
    event.preventDefault();
    const { name, value } = draft;
    act(call(pathOfFact(name.trim()), { method: "PUT", body: { value } }).then(() => setDraft({ name: "", value: "" })));
  };
  const remove = ({ name }) => confirm(`Forget the fact “${name}”?`) && act(call(pathOfFact(name), { method: "DELETE" }));
  const change = (fact) => (setDraft({ name: fact.name, value: fact.value }), field.current.focus());
  return html`<h2>Facts</h2>
    <form class="row" onSubmit=${set}>
      <input aria-label="Name of the fact" placeholder="name" required value=${draft.name} onInput=${(e) => setDraft({ ...draft, name: e.target.value })} />
      <input ref=${field} aria-label="Value of the fact" placeholder="what is to be remembered" required value=${draft.value} onInput=${(e) => setDraft({ ...draft, value: e.target.value })} />
      <button class="main" type="submit" disabled=${!draft.name.trim() || !draft.value.trim()}>Remember</button>
    </form>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${facts?.length > 0 && html`<${FactTable} facts=${facts} onEdit=${change} onRemove=${remove} />`}`;
}

function FactTable({ facts, onEdit, onRemove }) {
  return html`<div class="wide" tabindex="0" role="region" aria-label="Facts">
    <table>
      <thead><tr><th scope="col">Name</th><th scope="col">Value</th><th scope="col">Told</th><th scope="col"><span class="spoken">Actions</span></th></tr></thead>
      <tbody>
        ${facts.map(
          (fact) => html`<tr key=${fact.name}>
            <th scope="row">${fact.name}</th>
            <td class="text">${fact.value}</td>
            <td>${since(fact.at)}</td>
            <td>
              <button aria-label=${`Change ${fact.name}`} onClick=${() => onEdit(fact)}>Change</button>
              <button aria-label=${`Remove ${fact.name}`} onClick=${() => onRemove(fact)}>Remove</button>
            </td>
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

// ── saved conversations ──

function Conversations({ user, version, onChange }) {
  const [saved, setSaved] = useState(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    call(pathOf("/conversations", user, { limit: LISTED })).then(({ data }) => setSaved(data), (error) => setProblem(error.message));
  }, [user, version]);
  return html`<h2>Saved conversations</h2>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${saved?.length === 0 && html`<p class="note">None: <code>emberkeep chat</code> saves its conversations here. Those of this page are kept in the browser.</p>`}
    ${saved?.map((one) => html`<${Conversation} key=${`${user} ${one.id}`} ...${{ one, user, onChange }} />`)}`;
}

function Conversation({ one, user, onChange }) {
  const [messages, setMessages] = useState(null);
  const [problem, setProblem] = useState("");
  const look = ({ target }) => {
    if (!target.open || messages) return;
    call(pathOf(`/conversations/${encodeURIComponent(one.id)}`, user)).then((told) => setMessages(told.messages), (error) => setProblem(error.message));
  };
  return html`<details class="conversation" onToggle=${look}>
    <summary>${one.title || one.id} <span class="note">${number(one.message_count)} messages · ${one.model} · ${since(one.updated)}</span></summary>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <dl class="facts">${messages?.map((message) => html`<dt>${message.role}</dt><dd class="text">${textOf(message)}</dd>`)}</dl>
    <p><${Forget} user=${user} conversation=${one.id} onForgotten=${onChange} /></p>
  </details>`;
}

function textOf({ content, tool_calls: calls = [] }) {
  return [content, ...calls.map(({ function: called }) => `${called.name} ${called.arguments}`)].filter(Boolean).join("\n");
}

// ── everything of a user ──

/** Of one conversation; of everything without one. Asks first. */
function Forget({ user, conversation, onForgotten }) {
  const [problem, setProblem] = useState("");
  const whom = user ? `of ${user}` : "of everybody who gave no name";
  const what = conversation ? `everything of the conversation ${conversation}` : `everything ${whom}, facts too`;
  const forget = () => {
    if (!confirm(`Forget ${what}? It cannot be brought back.`)) return;
    const more = conversation ? { conversation_id: conversation } : {};
    call(pathOf("", user, more), { method: "DELETE" }).then(onForgotten, (error) => setProblem(error.message));
  };
  return html`<button class=${conversation ? "link" : ""} onClick=${forget}>${conversation ? "forget this conversation" : "Forget everything"}</button>
    ${problem && html`<span class="error" role="alert">${problem}</span>`}`;
}

function Whole({ user, onChange }) {
  const [problem, setProblem] = useState("");
  const [said, setSaid] = useState("");
  const take = async () => {
    try {
      const all = await blobOf(pathOf("/export", user));
      const last = (await all.slice(-4096).text()).trim().split("\n").at(-1);
      if (last.startsWith('{"error"')) throw new Error("Not all of it could be read: try again, and look in the server's log.");
      save(all, `emberkeep-memory${user && `-${user}`}.jsonl`);
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  };
  const forgotten = ({ removed }) => {
    setSaid(`Forgotten: ${number(removed.turns)} turns, ${number(removed.facts)} facts, ${number(removed.conversations)} conversations.`);
    onChange();
  };
  return html`<h2>Take it along, or forget it</h2>
    <p class="note">An export is lines of JSON, which <code>emberkeep memory import</code> reads. What is forgotten is nowhere in the file afterwards.</p>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <p role="status">${said}</p>
    <div class="actions"><button onClick=${take}>Export</button><${Forget} user=${user} onForgotten=${forgotten} /></div>`;
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
