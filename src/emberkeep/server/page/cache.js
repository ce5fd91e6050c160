// The cache, live: what is where, what moves, and what is kept.

import { call } from "./api.js";
import { ago, bytes, number } from "./words.js";
import { REUSED, SHOWN, usePulse } from "./pulse.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const REFRESHED_MS = 1500;
const NAMES = { hot: "Engine", warm: "RAM", cold: "Disk" };

export function View() {
  const { now, moments, problem } = usePulse();
  return html`<section class="view cache" aria-label="The cache">
    <h1>The cache</h1>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${now && html`<${Totals} tokens=${now.tokens} active=${now.active} waiting=${now.waiting} />`}
    ${now && html`<div class="gauges">${Object.keys(NAMES).map((tier) => html`<${Gauge} tier=${tier} held=${now.tiers[tier]} />`)}</div>`}
    ${now && html`<p class="note">${movesOf(now)}</p>`}
    <${Moments} moments=${moments} />
    <${Entries} beat=${now?.tokens.prompt} />
  </section>`;
}

function Totals({ tokens, active, waiting }) {
  const reused = REUSED.reduce((sum, tier) => sum + tokens[tier], 0);
  const share = tokens.prompt ? Math.round((100 * reused) / tokens.prompt) : 0;
  return html`<p class="totals">
    <strong>${share}%</strong> of ${number(tokens.prompt)} prompt tokens were reused since the server started ·
    ${` ${number(tokens.evaluated)} evaluated · ${active} running, ${waiting} waiting`}
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

function movesOf({ disk, evicted }) {
  const moves = [`${bytes(disk.read_bytes)} read from disk`, `${bytes(disk.written_bytes)} written`];
  if (disk.pending_chunks) moves.push(`${disk.pending_chunks} chunks are being written`);
  const gone = Object.values(evicted).reduce((sum, count) => sum + count, 0);
  if (gone) moves.push(`${number(gone)} chunks evicted`);
  return moves.join(" · ");
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

function Entries({ beat }) {
  const [listed, setListed] = useState(null);
  const [problem, setProblem] = useState("");
  const due = useRef(0);
  const refresh = () =>
    call("/v1/cache?limit=50").then((told) => (setListed(told), setProblem("")), (error) => setProblem(error.message));
  useEffect(() => {
    const timer = setTimeout(() => ((due.current = Date.now() + REFRESHED_MS), refresh()), Math.max(due.current - Date.now(), 0));
    return () => clearTimeout(timer);
  }, [beat]);
  const act = (action) => action.then(refresh, (error) => setProblem(error.message));
  const pin = (entry) => act(call(`/v1/cache/${entry.pinned ? "unpin" : "pin"}`, { method: "POST", body: { id: entry.id } }));
  const remove = (entry) => act(call(`/v1/cache/${encodeURIComponent(entry.id)}`, { method: "DELETE" }));
  if (problem) return html`<p class="error" role="alert">${problem}</p>`;
  return (
    listed &&
    html`<div class="wide" tabindex="0" role="region" aria-label="Kept conversations and prefixes">
      <table>
        <caption>${number(listed.totals.entries)} conversations and prefixes are kept</caption>
        <thead><tr><th scope="col">Begins with</th><th scope="col">Tokens</th><th scope="col">In</th><th scope="col">Used</th><th scope="col">Hits</th><th scope="col"><span class="spoken">Actions</span></th></tr></thead>
        <tbody>
          ${listed.data.map(
            (entry) => html`<tr key=${entry.id}>
              <th scope="row">${entry.head || entry.id}</th>
              <td>${number(entry.tokens)}</td>
              <td><span class=${`swatch tier ${entry.tier}`}></span>${NAMES[entry.tier] ?? entry.tier}</td>
              <td>${ago(entry.last_used_s)}</td>
              <td>${entry.hits}</td>
              <td>
                <button aria-pressed=${entry.pinned} onClick=${() => pin(entry)}>${entry.pinned ? "Pinned" : "Pin"}</button>
                <button aria-label=${`Remove ${entry.head || entry.id}`} onClick=${() => remove(entry)}>Remove</button>
              </td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>`
  );
}
