// The cache, live: what is where, what moves, and what is kept.

import { call, ofReplica } from "./api.js";
import { Entries, NAMES, nameOf } from "./entries.js";
import { reusedOf } from "./cost.js";
import { Explain } from "./explain.js";
import { REUSED, SHOWN, usePulse } from "./pulse.js";
import { Tree } from "./tree.js";
import { Warm } from "./warm.js";
import { bytes, duration, number } from "./words.js";
import { html, useEffect, useReducer, useRef, useState } from "./vendor/preact-htm.js";

const MEASURED_MS = 2000;

export function View({ models }) {
  const [model, setModel] = useState("");
  return html`<section class="view cache" aria-label="The cache">
    <header>
      <h1>The cache</h1>
      ${models.length > 1 && html`<${ModelChoice} ...${{ models, model, setModel }} />`}
    </header>
    <${CacheOf} key=${model} model=${model} />
  </section>`;
}

function ModelChoice({ models, model, setModel }) {
  return html`<label>of <select value=${model} onChange=${(e) => setModel(e.target.value)}>
    <option value="">the default model</option>
    ${models.map((name) => html`<option value=${name}>${name}</option>`)}
  </select></label>`;
}

function CacheOf({ model }) {
  const { now, moments, problem } = usePulse(model);
  return html`<div>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${now && !now.loaded && html`<p class="note">This model is not loaded. What is stored of it is shown when it is: the next request for it loads it.</p>`}
    ${now?.loaded && html`<${Totals} ...${now} />`}
    ${now?.loaded && html`<div class="gauges">${Object.keys(NAMES).map((tier) => html`<${Gauge} tier=${tier} held=${now.tiers[tier]} />`)}</div>`}
    ${now?.loaded && html`<${Moves} now=${now} />`}
    ${now?.loaded && html`<${Stored} ...${{ model, now, moments }} />`}
  </div>`;
}

/** Asked for only while the model is loaded: a question about its state would load it. */
function Stored({ model, now, moments }) {
  const [acts, acted] = useReducer((count) => count + 1, 0);
  const [explained, setExplained] = useState(null);
  const beat = JSON.stringify([now.active, now.tiers.warm, now.tiers.cold, now.tokens.prompt, now.tokens.evaluated, now.evicted]);
  return html`<${Tree} model=${model} beat=${beat} acts=${acts} onActed=${acted} onExplain=${(entry) => setExplained({ entry, name: nameOf(entry) })} />
    <${Moments} moments=${[...useEarlier(now.model), ...moments].slice(-SHOWN)} />
    <div class="asks">
      <${Warm} model=${model} onActed=${acted} />
      <${Explain} model=${model} given=${explained} />
    </div>
    <${Entries} model=${model} beat=${beat} acts=${acts} onActed=${acted} />`;
}

function Totals({ tokens, active, waiting, saved_s: saved }) {
  const reused = REUSED.reduce((sum, tier) => sum + tokens[tier], 0);
  const share = tokens.prompt ? Math.round((100 * reused) / tokens.prompt) : 0;
  return html`<p class="totals">
    <strong>${share}%</strong> of ${number(tokens.prompt)} prompt tokens were reused since the server started ·
    ${saved > 0 && html` <strong>saved ${duration(saved)} of prefill</strong> ·`}
    ${` ${number(tokens.prompt - reused)} evaluated · ${active} running, ${waiting} waiting`}
  </p>`;
}

function Gauge({ tier, held }) {
  const used = held.budget ? held.bytes / held.budget : 0;
  return html`<div class="gauge">
    <h2><span class=${`swatch tier ${tier}`}></span>${NAMES[tier]}</h2>
    <p>${number(held.tokens)} tokens${held.bytes !== undefined && ` · ${bytes(held.bytes)} of ${bytes(held.budget)}`}</p>
    ${held.budget > 0 && html`<meter aria-label=${`${NAMES[tier]} in use`} min="0" max="1" value=${used}></meter>`}
  </div>`;
}

// ── what moves ──

function Moves({ now }) {
  const { read, written, evicted } = useRates(now);
  const moves = [];
  if (read) moves.push(`reading ${bytes(read)}/s from disk`);
  if (written) moves.push(`writing ${bytes(written)}/s`);
  if (now.disk.pending_chunks) moves.push(`${number(now.disk.pending_chunks)} chunks wait to be written`);
  if (evicted) moves.push(`evicting ${evicted < 10 ? evicted.toFixed(1) : number(Math.round(evicted))} chunks/s`);
  const sums = sumsOf(now);
  return html`<p class="moves">
    <span class=${moves.length ? "busy" : ""}>${moves.join(" · ") || "Nothing is being read, written or evicted."}</span>
    <span class="note">${` In all ${bytes(sums.read)} read from disk, ${bytes(sums.written)} written, ${number(sums.evicted)} chunks evicted.`}</span>
    ${now.remote && html`<${Shared} remote=${now.remote} />`}
  </p>`;
}

/** What went to and came from the server that hosts share. */
function Shared({ remote }) {
  const { hits, lookups, read_bytes: read, written_bytes: written, pending_chunks: pending } = remote;
  const words = `${number(hits)} of ${number(lookups)} prompts found state of other hosts: ${bytes(read)} came from the shared server, ${bytes(written)} went there`;
  return html`<span class="note shared"><span class="swatch tier remote"></span>
    ${remote.breaker_open ? "The shared server does not answer, and is left alone for a while. " : ""}${words}${pending ? `, ${number(pending)} chunks wait.` : "."}</span>`;
}

const sumsOf = ({ disk, evicted }) => ({
  read: disk.read_bytes,
  written: disk.written_bytes,
  evicted: Object.values(evicted).reduce((sum, count) => sum + count, 0),
});

/** What was read, written and evicted in each of the last seconds. */
function useRates(now) {
  const samples = useRef([]).current;
  const [, tick] = useReducer((count) => count + 1, 0);
  const latest = sumsOf(now);
  const time = performance.now();
  if (JSON.stringify(latest) !== JSON.stringify(samples.at(-1)?.sums)) samples.push({ time, sums: latest });
  while (samples.length > 1 && samples[1].time < time - MEASURED_MS) samples.shift();
  const isMoving = samples.length > 1;
  useEffect(() => {
    const timer = isMoving && setInterval(tick, MEASURED_MS / 4);
    return () => clearInterval(timer);
  }, [isMoving]);
  const rate = (name) => Math.max((1000 * (latest[name] - samples[0].sums[name])) / MEASURED_MS, 0);
  return { read: rate("read"), written: rate("written"), evicted: rate("evicted") };
}

/** What was reused and evaluated before someone looked: the requests that the server remembers. */
function useEarlier(model) {
  const [earlier, setEarlier] = useState([]);
  useEffect(() => {
    const read = ({ data }) => {
      const ended = data.filter((one) => one.ended_at && one.model === model && one.kind === "answer").reverse();
      setEarlier(ended.map((one) => ({ reused: reusedOf(one), evaluated: one.prompt_tokens - reusedOf(one) })));
    };
    call(ofReplica(`/v1/requests?limit=${SHOWN}`)).then(read, () => undefined); // what comes now will show
  }, [model]);
  return earlier;
}

/** A bar for every moment in which something happened: what was reused, and above it what was evaluated. */
function Moments({ moments }) {
  if (!moments.length) return html`<p class="note">Ask something: every request will show here.</p>`;
  const highest = Math.max(...moments.map(({ reused, evaluated }) => reused + evaluated));
  const reused = moments.reduce((sum, moment) => sum + moment.reused, 0);
  const evaluated = moments.reduce((sum, moment) => sum + moment.evaluated, 0);
  const said = `Tokens reused (${number(reused)}) and evaluated (${number(evaluated)}) lately`;
  return html`<figure>
    <svg viewBox=${`0 0 ${SHOWN * 6} 120`} role="img" aria-label=${said} preserveAspectRatio="none">
      ${moments.map(({ reused, evaluated }, index) => {
        const low = (110 * reused) / highest;
        const high = (110 * evaluated) / highest;
        return html`<rect class="tier hot" x=${index * 6} width="5" y=${120 - low} height=${low} />
          <rect class="tier evaluated" x=${index * 6} width="5" y=${120 - low - high} height=${high} />`;
      })}
    </svg>
    <figcaption>${said}</figcaption>
  </figure>`;
}
