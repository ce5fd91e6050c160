// A conversation is a tree of messages: to edit one, or to ask again, adds a branch, and nothing is lost.

export const ROOT = "root";

/** `crypto.randomUUID` is missing on pages that came over plain http from another machine. */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(settings = {}) {
  const now = Date.now();
  const root = { id: ROOT, parent: null, children: [], chosen: 0 };
  return { id: newId(), title: "", created: now, updated: now, settings, nodes: { [ROOT]: root } };
}

/** Adds a message below another one and makes it the one that is shown. */
export function add(conversation, parent, message) {
  const node = { id: newId(), parent, children: [], chosen: 0, ...message };
  const above = conversation.nodes[parent];
  conversation.nodes[node.id] = node;
  above.children.push(node.id);
  above.chosen = above.children.length - 1;
  conversation.updated = Date.now();
  if (!conversation.title && node.role === "user") conversation.title = headOf(node.content || node.images?.[0]?.name || "");
  return node;
}

/** The messages that are shown, from the first on. */
export function shown(conversation) {
  const path = [];
  let node = conversation.nodes[ROOT];
  while (node.children.length) {
    node = conversation.nodes[node.children[node.chosen]];
    path.push(node);
  }
  return path;
}

/** What the model is sent: the system message and everything up to a node. */
export function messagesUpTo(conversation, id, settings) {
  const messages = [];
  for (let node = conversation.nodes[id]; node.id !== ROOT; node = conversation.nodes[node.parent]) {
    if (node.content || node.role === "user") messages.unshift({ role: node.role, content: contentOf(node) });
  }
  const system = settings.system?.trim();
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

function contentOf({ content, images }) {
  if (!images?.length) return content;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

/** A conversation as it was kept: what was being written when it was kept is over. */
export function restored(conversation) {
  for (const node of Object.values(conversation.nodes)) {
    if (node.isRunning) Object.assign(node, { isRunning: false, isStopped: true });
  }
  return conversation;
}

/** Two versions of one conversation, from two tabs: what either has is in it. */
export function merged(conversation, other) {
  const nodes = { ...other.nodes, ...conversation.nodes };
  for (const [id, node] of Object.entries(nodes)) {
    const more = other.nodes[id]?.children.filter((child) => !node.children.includes(child)) ?? [];
    if (more.length) nodes[id] = { ...node, children: [...node.children, ...more] };
  }
  return { ...conversation, nodes };
}

export function branchesOf(conversation, node) {
  const above = conversation.nodes[node.parent];
  return { count: above.children.length, index: above.children.indexOf(node.id) };
}

export function choose(conversation, node, step) {
  const above = conversation.nodes[node.parent];
  const count = above.children.length;
  above.chosen = (above.children.indexOf(node.id) + step + count) % count;
}

export function matches(conversation, query) {
  const wanted = query.toLowerCase();
  if (conversation.title.toLowerCase().includes(wanted)) return true;
  return Object.values(conversation.nodes).some((node) => node.content?.toLowerCase().includes(wanted));
}

/** As people read it. */
export function asMarkdown(conversation) {
  const parts = shown(conversation).map((node) => `## ${node.role === "user" ? "You" : "Model"}\n\n${bodyOf(node)}`);
  return `# ${conversation.title || "Conversation"}\n\n${parts.join("\n\n")}\n`;
}

function bodyOf({ content, images = [], tools = [] }) {
  const pictures = images.map(({ name }) => `[picture: ${name}]`);
  const calls = tools.map((tool) => `> ${tool.name}(${tool.arguments ?? ""})`);
  return [...pictures, ...calls, content].filter(Boolean).join("\n\n");
}

function headOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}
