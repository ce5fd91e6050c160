// What a model writes, as HTML that can do nothing: no markup of its own, no images from elsewhere, plain links only.

import DOMPurify from "./vendor/purify.js";
import { Marked } from "./vendor/marked.js";

const LONGEST = 200_000; // characters that are read as Markdown
const TAGS = "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre span strong table tbody td th thead tr ul";
const RULES = {
  ALLOWED_TAGS: TAGS.split(" "),
  ALLOWED_ATTR: ["class", "href", "rel", "target", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["rel", "target", "start", "align"],
};

let highlighter = null;
let loading = null;

const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escapeHtml(text),
    image: ({ text, href }) => escapeHtml(`[image: ${text || href}]`),
    link({ href, tokens }) {
      const inside = this.parser.parseInline(tokens);
      return /^(?:https?|mailto):/i.test(href)
        ? `<a href="${escapeHtml(href)}" rel="noopener noreferrer nofollow" target="_blank">${inside}</a>`
        : inside;
    },
    code: ({ text, lang }) => `<pre><code class="hljs">${coloured(text, lang)}</code></pre>`,
  },
});

export function toHtml(text) {
  try {
    if (text.length <= LONGEST) return DOMPurify.sanitize(marked.parse(text), RULES);
  } catch {
    // Nested too deeply to be read.
  }
  return `<pre>${escapeHtml(text)}</pre>`;
}

/** Resolves once code is coloured; asked for when there is some. */
export function needsColours(text) {
  return highlighter === null && text.includes("```");
}

export function loadColours() {
  loading ??= import("./vendor/highlight.js").then((module) => (highlighter = module.default));
  return loading;
}

function coloured(text, lang) {
  const language = (lang ?? "").trim().split(/\s/, 1)[0].toLowerCase();
  if (!highlighter?.getLanguage(language)) return escapeHtml(text);
  return highlighter.highlight(text, { language, ignoreIllegals: true }).value;
}

export function escapeHtml(text) {
  const named = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (letter) => named[letter]);
}
