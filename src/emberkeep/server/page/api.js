// Talks to the server that this page came from.

const NAME = "emberkeep.key";

export const key = {
  get: () => sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME) ?? "",
  set(value, isKept) {
    key.forget();
    (isKept ? localStorage : sessionStorage).setItem(NAME, value);
  },
  forget() {
    sessionStorage.removeItem(NAME);
    localStorage.removeItem(NAME);
  },
};

export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The replica of a cluster that the page looks at; empty where there is one server. */
let replica = "";
export const lookAt = (name) => (replica = name);

/** A path that is about one of several models; `model` empty: about the default one. */
export const ofModel = (path, model) => ofReplica(withField(path, "model", model));

/** A path whose answer is about one replica, and not about whoever answers. */
export const ofReplica = (path) => withField(path, "replica", replica);

const withField = (path, name, value) =>
  value ? `${path}${path.includes("?") ? "&" : "?"}${name}=${encodeURIComponent(value)}` : path;

/** The answer to a request, as JSON; null where it has none. Throws ApiError. */
export async function call(path, { method = "GET", body, signal } = {}) {
  const response = await request(path, { method, body, signal });
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

/** What the server says of itself, also while it loads its model; empty where no server answers. */
export const health = () => fetch("/health").then((response) => response.json()).catch(() => ({}));

/** The answer as it is, for a file. Throws ApiError. */
export async function blobOf(path) {
  const response = await request(path, { method: "GET" });
  return response.blob().catch(() => {
    throw new ApiError("The answer broke off: try again.");
  });
}

/** What a server tells line by line, until it has said everything. Throws ApiError, also for an error in a line. */
export async function* lines(path, body, signal) {
  const response = await request(path, { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    const whole = (rest + (value ?? "")).split("\n");
    rest = done ? "" : whole.pop();
    for (const line of whole.filter((one) => one.trim())) {
      const told = JSON.parse(line);
      if (told.error) throw errorOf(told, response.status);
      yield told;
    }
    if (done) return;
  }
}

/** The events of a stream, as `{name, data}`, until the server has said everything. Throws ApiError. */
export async function* stream(path, body, signal) {
  const response = await request(path, { method: body === undefined ? "GET" : "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done && body === undefined) return;
    if (done) throw new ApiError("The answer broke off: ask again.");
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame.trim() === "data: [DONE]") return;
      const event = parseFrame(frame);
      if (event === null) continue;
      if (event.data.error) throw new ApiError(event.data.error.message, response.status);
      yield event;
    }
  }
}

async function request(path, { method, body, signal }) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer: is it still running?");
  }
  if (response.ok) return response;
  throw errorOf(await response.json().catch(() => ({})), response.status);
}

/** Ollama's paths tell a sentence, all others OpenAI's object. */
function errorOf({ error }, status) {
  const message = typeof error === "string" ? error : error?.message;
  return new ApiError(message ?? `The server answered ${status}.`, status, error?.code);
}

/** Null for comments, and for the word that ends a stream. */
export function parseFrame(frame) {
  let name = "message";
  const data = [];
  for (const line of frame.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  const text = data.join("\n");
  return text === "" || text === "[DONE]" ? null : { name, data: JSON.parse(text) };
}
