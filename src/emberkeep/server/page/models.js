// Models: which are served and which are only installed, loading and unloading them, installing and removing them.

import { ApiError, call, lines } from "./api.js";
import { bytes, number } from "./words.js";
import { html, useEffect, useReducer, useRef, useState } from "./vendor/preact-htm.js";

const REFRESHED_MS = 5000;
const WATCHED_MS = 700; // while one is loaded or unloaded
const STATES = { loaded: "Loaded", loading: "Is being loaded", unloaded: "Not loaded", failed: "Could not be loaded" };

export function View() {
  const { listed, problem, refresh, watch } = useModels();
  return html`<section class="view models" aria-label="Models">
    <h1>Models</h1>
    <${Install} onInstalled=${refresh} />
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${listed &&
    html`<ul class="cards" aria-label="Models that answer here">
      ${listed.served.map((model, index) => html`<${Served} key=${model.id} isDefault=${index === 0} ...${{ model, refresh, watch }} />`)}
    </ul>`}
    ${listed?.others.length > 0 && html`<${Others} models=${listed.others} refresh=${refresh} />`}
  </section>`;
}

/** What there is, asked for again now and then, and more often while `watch` has something under way. */
function useModels() {
  const [listed, setListed] = useState(null);
  const [problem, setProblem] = useState("");
  const watched = useRef(0);
  const asked = useRef(0);
  const refresh = async () => {
    const mine = ++asked.current;
    try {
      const told = joined(await Promise.all([call("/v1/models"), call("/models/installed")]));
      if (mine !== asked.current) return; // a later question has its answer
      setListed(told);
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  };
  const isMoving = listed?.served.some(({ status }) => status.value === "loading");
  useEffect(() => {
    let timer;
    const again = () => {
      const wait = watched.current || isMoving ? WATCHED_MS : REFRESHED_MS;
      timer = setTimeout(() => refresh().then(again), wait);
    };
    again();
    return () => clearTimeout(timer);
  }, [isMoving]);
  useEffect(() => void refresh(), []);
  const watch = async (action) => {
    watched.current += 1;
    setTimeout(refresh, 50);
    try {
      return await action;
    } finally {
      watched.current -= 1;
      await refresh();
    }
  };
  return { listed, problem, refresh, watch };
}

function joined([{ data: served }, { data: installed }]) {
  const files = new Map(installed.map((file) => [file.id, file]));
  return {
    served: served.map((model) => ({ ...model, file: files.get(model.id) })),
    others: installed.filter((file) => !file.served),
  };
}

function Served({ model, isDefault, refresh, watch }) {
  const [problem, setProblem] = useState("");
  const { status, file } = model;
  const act = (action) => {
    setProblem("");
    watch(call(`/models/${action}`, { method: "POST", body: { model: model.id } })).catch((error) => setProblem(error.message));
  };
  return html`<li>
    <h2>
      ${model.id} ${isDefault && html`<span class="tag">default</span>`} ${!status.local && html`<span class="tag">elsewhere</span>`}
    </h2>
    <p class=${`state ${status.local ? status.value : "elsewhere"}`}>${stateOf(model)}</p>
    ${status.value === "loading" && html`<progress aria-label=${`${model.id} is being loaded`}></progress>`}
    <p class="note">${factsOf(model).join(" · ")}</p>
    ${status.error && html`<p class="error">${status.error}</p>`}
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <div class="actions">
      ${status.local && status.value !== "loaded" && html`<button disabled=${status.value === "loading"} onClick=${() => act("load")}>Load</button>`}
      ${status.local && status.value === "loaded" && html`<button onClick=${() => act("unload")}>Unload</button>`}
      ${file && html`<${Remove} file=${file} refresh=${refresh} onProblem=${setProblem} />`}
    </div>
    <${More} id=${model.id} />
  </li>`;
}

function stateOf({ status, owned_by }) {
  if (!status.local) return `Runs elsewhere (${owned_by})`;
  const told = [STATES[status.value] ?? status.value];
  if (status.running) told.push(`${number(status.running)} running`);
  if (status.waiting) told.push(`${number(status.waiting)} waiting`);
  if (status.value === "loaded" && status.pinned) told.push("stays");
  if (status.value === "loaded" && status.expires_s !== null) told.push(`is unloaded in ${span(status.expires_s)} unless it is asked`);
  return told.join(" · ");
}

const span = (seconds) => (seconds < 90 ? `${Math.max(Math.round(seconds), 0)} s` : `${Math.round(seconds / 60)} min`);

function factsOf({ details, context_length, aliases, status, file }) {
  const size = file?.bytes ?? details.size;
  const weights = file?.quantisation ?? details.quantisation ?? details.dtype;
  const facts = [];
  if (size) facts.push(bytes(size));
  if (weights) facts.push(weights);
  if (context_length) facts.push(`context ${number(context_length)} tokens`);
  if (status.memory_bytes) facts.push(`takes ${bytes(status.memory_bytes)} of memory`);
  if (details.gpu_layers > 0) facts.push(`${details.gpu_layers} layers on the GPU`);
  if (aliases.length) facts.push(`also called ${aliases.join(", ")}`);
  return facts;
}

/** What its file says, asked for when someone wants to know. */
function More({ id }) {
  const [told, setTold] = useState(null);
  const [problem, setProblem] = useState("");
  const look = ({ target }) => {
    if (!target.open || told) return;
    call("/api/show", { method: "POST", body: { model: id } }).then(setTold, (error) => setProblem(error.message));
  };
  return html`<details onToggle=${look}>
    <summary>More<span class="spoken"> about ${id}</span></summary>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${told && html`<dl class="facts">${shownOf(told).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`}
  </details>`;
}

function shownOf({ details, model_info: info, capabilities, modelfile }) {
  const family = info["general.architecture"];
  const trained = info[`${family}.context_length`];
  const from = /^FROM (.+)$/m.exec(modelfile)?.[1];
  return [
    ["Parameters", details.parameter_size],
    ["Architecture", details.family],
    ["Format", [details.format, details.quantization_level].filter(Boolean).join(", ")],
    ["Layers", info[`${family}.block_count`]],
    ["Trained for", trained && `${number(trained)} tokens`],
    ["Can do", capabilities.join(", ")],
    ["Licence", info["general.license"]],
    ["Comes from", from],
  ].filter(([, value]) => value);
}

function Remove({ file, refresh, onProblem }) {
  const remove = () => {
    if (!confirm(`Remove ${file.id} (${bytes(file.bytes)}) from the server's disk?`)) return;
    onProblem("");
    call("/api/delete", { method: "DELETE", body: { model: file.id } }).then(refresh, (error) => onProblem(error.message));
  };
  return html`<button aria-label=${`Remove ${file.id}`} onClick=${remove}>Remove</button>`;
}

function Others({ models, refresh }) {
  const [problem, setProblem] = useState("");
  return html`<h2>Installed, but not served</h2>
    <p class="note">This server answers with what it was started with. <code>emberkeep serve --models all</code> answers with all that are installed.</p>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <div class="wide" tabindex="0" role="region" aria-label="Installed, but not served">
      <table>
        <thead><tr><th scope="col">Model</th><th scope="col">Size</th><th scope="col">Weights</th><th scope="col"><span class="spoken">Actions</span></th></tr></thead>
        <tbody>
          ${models.map(
            (file) => html`<tr key=${file.id}>
              <th scope="row">${file.id}</th>
              <td>${bytes(file.bytes)}</td>
              <td>${file.quantisation}</td>
              <td><${Remove} file=${file} refresh=${refresh} onProblem=${setProblem} /></td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>`;
}

// ── installing: it goes on while other views are looked at ──

const AGAIN = "install it again, and it goes on where it was.";
const installs = new Map();
const watchers = new Set();

async function install(name) {
  const leaving = new AbortController();
  const one = { name, status: "asking for it", isRunning: true, stop: () => leaving.abort() };
  const note = (more) => (Object.assign(one, more), watchers.forEach((tell) => tell(one)));
  installs.set(name, one);
  note({});
  try {
    for await (const told of lines("/api/pull", { model: name }, leaving.signal)) {
      note({ status: wordsOf(told), completed: told.completed, total: told.total, isDone: told.status === "success" });
    }
    note({ isRunning: false, problem: one.isDone ? "" : `It broke off: ${AGAIN}` });
  } catch (error) {
    const cut = error.name === "AbortError" ? `Given up: ${AGAIN}` : `It broke off: ${AGAIN}`;
    note({ isRunning: false, problem: error instanceof ApiError ? error.message : cut });
  }
}

function wordsOf({ status, completed, total }) {
  if (status === "success") return "is installed";
  if (total) return `${bytes(completed)} of ${bytes(total)}`;
  return completed ? bytes(completed) : status;
}

function Install({ onInstalled }) {
  const [name, setName] = useState("");
  const [said, setSaid] = useState("");
  const [, redraw] = useReducer((count) => count + 1, 0);
  useEffect(() => {
    const tell = (one) => {
      redraw();
      if (one.isRunning || !one.isDone) return;
      setSaid(`${one.name} is installed.`);
      onInstalled();
    };
    watchers.add(tell);
    return () => watchers.delete(tell);
  }, []);
  const start = (event) => {
    event.preventDefault();
    const wanted = name.trim();
    if (!wanted || installs.get(wanted)?.isRunning) return;
    setName("");
    install(wanted);
  };
  return html`<form class="row" onSubmit=${start}>
      <label>Install a model
        <input value=${name} placeholder="hf.co/owner/repo:Q4_K_M" spellcheck="false" autocapitalize="off" onInput=${(e) => setName(e.target.value)} />
      </label>
      <button class="main" type="submit" disabled=${!name.trim()}>Install</button>
    </form>
    <p class="spoken" role="status">${said}</p>
    <ul class="installs">
      ${[...installs.values()].map((one) => html`<${Installing} key=${one.name} one=${one} onDrop=${() => (installs.delete(one.name), redraw())} />`)}
    </ul>`;
}

function Installing({ one, onDrop }) {
  const share = one.total ? one.completed / one.total : undefined;
  return html`<li>
    <strong>${one.name}</strong>
    ${one.problem ? html`<span class="error" role="alert">${one.problem}</span>` : html`<span class="note">${one.status}</span>`}
    ${one.isRunning
      ? html`<button aria-label=${`Cancel ${one.name}`} onClick=${one.stop}>Cancel</button>
          <progress aria-label=${`${one.name} is being installed`} max="1" value=${share}></progress>`
      : html`<button aria-label=${`Dismiss ${one.name}`} onClick=${onDrop}>×</button>`}
  </li>`;
}
