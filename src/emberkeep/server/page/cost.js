// Under an answer: where the state of its prompt came from, how long it took, and why no more was reused.

import { milliseconds, number } from "./words.js";
import { html } from "./vendor/preact-htm.js";

export const TIERS = [
  ["hot", "from the engine"],
  ["warm", "from RAM"],
  ["cold", "from disk"],
  ["remote", "from other hosts"],
  ["moved", "moved"],
  ["evaluated", "evaluated"],
];
export const REASONS = {
  diverged: "the text goes on differently than what is stored",
  edited_message: "an earlier message was edited",
  changed_tools: "the tools have changed",
  volatile_text: "something in the prompt changes with every call",
  evicted: "the rest was stored, but its room was needed",
  expired: "the rest was stored, but nobody had used it for too long",
  removed: "the rest was removed from the store",
  no_snapshot: "this model's state can be resumed at fewer places",
  corrupt: "a stored piece failed its checks",
  gone: "a stored piece has disappeared",
  cheaper_to_recompute: "evaluating was quicker than loading",
  disabled: "the cache was switched off for this request",
};

export function costOf({ usage, timings, emberkeep }) {
  if (!emberkeep?.reused || !usage) return null;
  const moved = emberkeep.moved_tokens ?? 0;
  const evaluated = Math.max(usage.prompt_tokens - reusedOf({ reused: emberkeep.reused, moved_tokens: moved }), 0);
  return {
    tokens: { ...emberkeep.reused, moved, evaluated },
    sources: emberkeep.sources,
    divergence: emberkeep.divergence,
    prompt: usage.prompt_tokens,
    completion: usage.completion_tokens,
    first: emberkeep.ttft_ms,
    saved: emberkeep.saved_ms ?? 0,
    speed: timings?.predicted_per_second,
    reason: REASONS[emberkeep.reason] ?? "",
    where: emberkeep.divergence?.where ?? "",
    isApproximate: emberkeep.approximate,
    out: emberkeep.evictions?.reduce((sum, one) => sum + one.messages, 0) ?? 0,
    recalled: emberkeep.recalled ?? 0,
  };
}

/** Tokens of a request's prompt that were not evaluated. */
export function reusedOf({ reused, moved_tokens }) {
  return reused.hot + reused.warm + reused.cold + reused.remote + moved_tokens;
}

/** Of an answer that was stopped: what the server remembers of its request. */
export function costOfRequest(request) {
  const { reused, moved_tokens, sources, reason, approximate, prompt_tokens, completion_tokens } = request;
  const first = request.first_token_at && 1000 * (request.first_token_at - request.asked_at);
  const emberkeep = { reused, moved_tokens, sources, reason, approximate, ttft_ms: first };
  return costOf({ usage: { prompt_tokens, completion_tokens }, emberkeep });
}

export function Cost({ cost, onShow }) {
  const used = TIERS.filter(([tier]) => cost.tokens[tier] > 0);
  const reused = cost.prompt - cost.tokens.evaluated;
  const label = used.map(([tier, words]) => `${number(cost.tokens[tier])} ${words}`).join(", ");
  return html`<div class="cost">
    <div class="bar" role="img" aria-label=${`Tokens of the prompt: ${label}`}>
      ${used.map(([tier]) => html`<span class=${`tier ${tier}`} style=${{ flexGrow: cost.tokens[tier] }}></span>`)}
    </div>
    <p>
      <strong>${share(reused, cost.prompt)} reused</strong> of ${number(cost.prompt)} tokens (${label})
      ${cost.saved >= 50 && html` · <strong>about ${milliseconds(cost.saved)} saved</strong>`}
      ${cost.first != null && html` · first token ${milliseconds(cost.first)}`}
      ${cost.speed > 0 && html` · ${cost.speed.toFixed(1)} tokens/s`}
      ${cost.isApproximate && html` · approximate`}
      ${cost.reason && html` · not more: ${cost.reason}${cost.where && ` (${cost.where})`}`}
      ${cost.out > 0 && html` · <a href="#/memory">${cost.out} messages left for the memory</a>`}
      ${cost.recalled > 0 && html` · <a href="#/memory">${cost.recalled} remembered</a>`}
      ${onShow && html` · <button class="link" onClick=${onShow}>show the prompt</button>`}
    </p>
  </div>`;
}

export function share(part, whole) {
  const percent = whole ? (100 * part) / whole : 0;
  return `${percent > 99 && part < whole ? ">99" : Math.round(percent)}%`;
}
