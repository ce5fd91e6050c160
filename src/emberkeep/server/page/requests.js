// Requests as a timeline: who waited, was loaded, evaluated and sampled when, and in which slot.

import { call, ofReplica } from "./api.js";
import { REASONS, TIERS, reusedOf, share } from "./cost.js";
import { allKept } from "./kept.js";
import { usePulse } from "./pulse.js";
import { ago, milliseconds, number } from "./words.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const WINDOWS = [
  [30, "30 seconds"],
  [120, "2 minutes"],
  [600, "10 minutes"],
  [3600, "1 hour"],
];
const REFRESHED_MS = 1000;
const TICK_MS = 500;
const LANE = 30;
const WIDTH = 1000;
const PHASES = [
  ["queue", "waiting", "asked_at", "started_at"],
  ["load", "loading stored state", "started_at", "loaded_at"],
  ["prefill", "prefill", "loaded_at", "first_token_at"],
  ["decode", "decoding", "first_token_at", "ended_at"],
];
const LISTED = 50;

/** Every request that the server remembers, the newest first, and how far its clock is ahead of ours. */
function useRequests() {
  const { now, problem } = usePulse();
  const [told, setTold] = useState({ data: [], ahead: 0 });
  const [trouble, setTrouble] = useState("");
  const due = useRef(0);
  const running = now?.running ?? [];
  const beat = now && `${now.tokens.prompt} ${running.map((one) => one.id).join()}`;
  useEffect(() => {
    if (beat === null) return;
    const fetchAll = async () => {
      due.current = Date.now() + REFRESHED_MS;
      try {
        const { data, now: at } = await call(ofReplica("/v1/requests?limit=200"));
        setTold({ data, ahead: at - Date.now() / 1000 });
        setTrouble("");
      } catch (error) {
        setTrouble(error.message);
      }
    };
    const timer = setTimeout(fetchAll, Math.max(due.current - Date.now(), 0));
    return () => clearTimeout(timer);
  }, [beat]);
  const live = new Map(running.map((one) => [keyOf(one), one]));
  const known = told.data.map((one) => (one.ended_at ? one : (live.get(keyOf(one)) ?? one)));
  const fresh = running.filter((one) => !told.data.some((each) => keyOf(each) === keyOf(one)));
  return { requests: [...fresh, ...known], ahead: told.ahead, problem: trouble || problem };
}

const keyOf = ({ model, id }) => `${model} ${id}`;

export function View() {
  const { requests, ahead, problem } = useRequests();
  const [seconds, setSeconds] = useState(120);
  const [chosen, setChosen] = useState(null);
  const isRunning = requests.some((one) => !one.ended_at);
  useTick(isRunning);
  const now = Date.now() / 1000 + ahead;
  const titles = useTitles(requests);
  const nameOf = (one) => titles.get(one.conversation_id) || one.conversation_id || `${one.kind} ${one.id}`;
  const detailed = requests.find((one) => keyOf(one) === chosen);
  return html`<section class="view requests" aria-label="Requests">
    <h1>Requests</h1>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <div class="tools">
      <${Legend} />
      <label>Shown <select value=${seconds} onChange=${(e) => setSeconds(Number(e.target.value))}>
        ${WINDOWS.map(([value, words]) => html`<option value=${value}>${words}</option>`)}
      </select></label>
    </div>
    <${Picture} ...${{ requests, now, seconds, chosen, nameOf }} onChoose=${setChosen} />
    ${requests.length === 0 && html`<p class="note">Ask something: every request will show here.</p>`}
    ${requests.length > 0 && html`<${List} ...${{ requests, now, chosen, nameOf }} onChoose=${setChosen} />`}
    ${detailed && html`<${Details} request=${detailed} now=${now} name=${nameOf(detailed)} onClose=${() => setChosen(null)} />`}
  </section>`;
}

/** Of the conversations that this browser keeps, by their ids. */
function useTitles(requests) {
  const [titles, setTitles] = useState(new Map());
  const ids = [...new Set(requests.map((one) => one.conversation_id))].join();
  useEffect(() => {
    const read = (kept) => setTitles(new Map(kept.map(({ id, title }) => [id, title])));
    allKept().then(read, () => undefined); // without a place to keep them there are none
  }, [ids]);
  return titles;
}

/** Draws again twice a second: time goes on. */
function useTick(isOn) {
  const [, tick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => tick((count) => count + 1), isOn ? TICK_MS : 5 * TICK_MS);
    return () => clearInterval(timer);
  }, [isOn]);
}

function Legend() {
  return html`<ul class="legend">
    ${PHASES.map(([name, words]) => html`<li><span class=${`swatch phase ${name}`}></span>${words}</li>`)}
  </ul>`;
}

/** What of its phases has begun: [name, from, to], in seconds. It need not have waited, or loaded anything. */
function phasesOf(request, now) {
  const times = { ...request, loaded_at: request.loaded_at ?? request.started_at };
  const end = request.ended_at ?? now;
  return PHASES.flatMap(([name, , from, to]) => (times[from] === null ? [] : [[name, times[from], times[to] ?? end]])).filter(
    ([name, from, to]) => to > from || name === "prefill" || name === "decode",
  );
}

function Picture({ requests, now, seconds, chosen, nameOf, onChoose }) {
  const begin = now - seconds;
  const shown = requests.filter((one) => (one.ended_at ?? now) > begin);
  const waiting = shown.filter((one) => one.slot === null);
  const isOne = new Set(shown.map((one) => one.model)).size < 2;
  const slotOf = (one) => (isOne ? `Slot ${one.slot}` : `${one.model}, ${one.slot}`);
  const slots = [...new Set(shown.filter((one) => one.slot !== null).map(slotOf))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const lanes = [...slots, ...(waiting.length ? ["No slot"] : [])];
  const height = Math.max(lanes.length, 1) * LANE;
  const across = (at) => (WIDTH * (Math.max(at, begin) - begin)) / seconds;
  const laneOf = (one) => (one.slot === null ? slots.length : slots.indexOf(slotOf(one)));
  const said = `${shown.length} requests in ${slots.length} slots in the last ${seconds} seconds; the table below lists them`;
  return html`<figure>
    <div class="lanes">
      <ul aria-hidden="true">${lanes.map((words) => html`<li title=${words}>${words}</li>`)}</ul>
      <svg viewBox=${`0 0 ${WIDTH} ${height}`} preserveAspectRatio="none" role="img" aria-label=${said} style=${{ height: `${height}px` }}>
        ${lanes.map((_, lane) => html`<rect class="lane" x="0" y=${lane * LANE + 2} width=${WIDTH} height=${LANE - 4} />`)}
        ${shown.map(
          (one) => html`<g key=${keyOf(one)} class=${keyOf(one) === chosen ? "chosen" : ""} onClick=${() => onChoose(keyOf(one))}>
            <title>${`${nameOf(one)}: ${sentenceOf(one, now)}`}</title>
            ${phasesOf(one, now).map(([name, from, to]) => {
              const inset = name === "queue" ? 12 : 5;
              const width = Math.max(across(to) - across(from), 1.5);
              return html`<rect class=${`phase ${name}`} x=${across(from)} y=${laneOf(one) * LANE + inset} width=${width} height=${LANE - 2 * inset} />`;
            })}
          </g>`,
        )}
      </svg>
    </div>
    <figcaption>${`${WINDOWS.find(([value]) => value === seconds)[1]} ago`}<span>now</span></figcaption>
  </figure>`;
}

function sentenceOf(request, now) {
  const spans = phasesOf(request, now).map(([name, from, to]) => `${name} ${milliseconds(1000 * (to - from))}`);
  const tokens = `${number(request.prompt_tokens)} tokens, ${share(reusedOf(request), request.prompt_tokens)} reused`;
  return `${tokens}; ${spans.join(", ")}`;
}

function List({ requests, now, chosen, nameOf, onChoose }) {
  const duration = (request, wanted) => {
    const found = phasesOf(request, now).find(([name]) => name === wanted);
    return found ? milliseconds(1000 * (found[2] - found[1])) : "–";
  };
  return html`<div class="wide" tabindex="0" role="region" aria-label="Requests, the latest first">
    <table>
      <caption>${requests.length > LISTED ? `The latest ${LISTED} of ${number(requests.length)}` : "The latest first"}</caption>
      <thead><tr>
        <th scope="col">Request</th><th scope="col">Reused</th><th scope="col">Prompt</th><th scope="col">State</th><th scope="col">Asked</th>
        ${PHASES.map(([name]) => html`<th scope="col">${name[0].toUpperCase() + name.slice(1)}</th>`)}
        <th scope="col">Answer</th>
      </tr></thead>
      <tbody>
        ${requests.slice(0, LISTED).map(
          (one) => html`<tr key=${keyOf(one)} class=${keyOf(one) === chosen ? "chosen" : ""}>
            <th scope="row"><button class="link" aria-haspopup="dialog" onClick=${() => onChoose(keyOf(one))}>${nameOf(one)}</button></th>
            <td>${share(reusedOf(one), one.prompt_tokens)}</td>
            <td>${number(one.prompt_tokens)}</td>
            <td>${one.state}</td>
            <td>${ago(Math.max(now - one.asked_at, 0))}</td>
            ${PHASES.map(([name]) => html`<td>${duration(one, name)}</td>`)}
            <td>${number(one.completion_tokens)}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

function Details({ request, now, name, onClose }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  const evaluated = request.prompt_tokens - reusedOf(request);
  const tokens = { ...request.reused, moved: request.moved_tokens, evaluated };
  const facts = [
    ["State", request.ended_at ? request.state : `${request.state}, since ${milliseconds(1000 * Math.max(now - request.asked_at, 0))}`],
    ["Model", request.model],
    ["User", request.user ?? "–"],
    ["Slot", request.slot ?? "–"],
    ["In the engine", `${number(request.computed_tokens)} of ${number(request.prompt_tokens)} prompt tokens`],
    ["Answer", `${number(request.completion_tokens)} tokens`],
    ...phasesOf(request, now).map(([name, from, to]) => [name[0].toUpperCase() + name.slice(1), milliseconds(1000 * (to - from))]),
    ["Not more was reused", REASONS[request.reason] ?? (reusedOf(request) ? "there was no more" : "it was new")],
    ...(request.divergence === null ? [] : [["It left stored text", `at token ${number(request.divergence)}`]]),
  ];
  return html`<dialog ref=${dialog} class="prompt" aria-labelledby="request-title" onClose=${onClose}>
    <header>
      <h2 id="request-title">${name}</h2>
      <button aria-label="Close" onClick=${() => dialog.current.close()}>×</button>
    </header>
    <div class="strip" role="img" aria-label="The prompt, by where its state came from">
      ${request.sources.map((part) => html`<span class=${`tier ${part.from}`} style=${{ flexGrow: part.tokens }}></span>`)}
    </div>
    <ul class="legend">
      ${TIERS.filter(([tier]) => tokens[tier] > 0).map(
        ([tier, words]) => html`<li><span class=${`swatch tier ${tier}`}></span>${number(tokens[tier])} ${words}</li>`,
      )}
    </ul>
    <dl class="facts">${facts.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>
  </dialog>`;
}
