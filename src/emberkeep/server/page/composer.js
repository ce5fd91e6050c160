// Where people write: a text, and pictures for models that can see.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST = 12 << 20; // characters of all pictures of a conversation: they go along with every message

/** How many characters of pictures may still be added to these messages. */
export function pictureRoom(messages) {
  return MOST - sizeOf(messages.flatMap(({ images }) => images ?? []));
}

const sizeOf = (images) => images.reduce((sum, { url }) => sum + url.length, 0);

/** `room`: for pictures, in characters. */
export function Composer({ room, isBusy, onSend, onStop }) {
  const [draft, setDraft] = useState("");
  const [images, setImages] = useState([]);
  const [problem, setProblem] = useState("");
  const field = useRef(null);
  const picker = useRef(null);
  useEffect(() => {
    if (!isBusy && [document.body, field.current].includes(document.activeElement)) field.current.focus();
  }, [isBusy]);
  const isEmpty = !draft.trim() && images.length === 0;
  const send = () => {
    if (isBusy || isEmpty) return;
    onSend(draft.trimEnd(), images);
    setDraft("");
    setImages([]);
  };
  const attach = async (files) => {
    try {
      const all = [...images, ...(await Promise.all([...files].map(readImage)))];
      if (sizeOf(all) > room) throw new Error(`The pictures of a conversation may have ${(MOST * 3) >> 22} MiB together: use smaller ones, or begin another.`);
      setImages(all);
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  const onPaste = (event) => {
    const files = [...event.clipboardData.files].filter(({ type }) => KINDS.includes(type));
    if (!files.length) return;
    event.preventDefault();
    attach(files);
  };
  const onDrop = (event) => {
    event.preventDefault();
    attach(event.dataTransfer.files);
  };
  return html`<form class="composer" onSubmit=${(event) => (event.preventDefault(), send())} onDragOver=${(event) => event.preventDefault()} onDrop=${onDrop}>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <${Pictures} images=${images} onRemove=${(index) => setImages(images.filter((_, at) => at !== index))} />
    <div class="row">
      <button type="button" class="attach" aria-label="Add pictures" title="Add pictures" onClick=${() => picker.current.click()}>+</button>
      <input ref=${picker} type="file" hidden multiple accept=${KINDS.join()} onChange=${(event) => (attach(event.target.files), (event.target.value = ""))} />
      <textarea
        ref=${field}
        aria-label="Your message"
        placeholder="Ask something; Enter sends it"
        rows=${Math.min(Math.max(draft.split("\n").length, 2), 10)}
        value=${draft}
        onInput=${(event) => setDraft(event.target.value)}
        onKeyDown=${onKeyDown}
        onPaste=${onPaste}
      ></textarea>
      ${isBusy
        ? html`<button class="main" type="button" onClick=${onStop}>Stop</button>`
        : html`<button class="main" type="submit" disabled=${isEmpty}>Send</button>`}
    </div>
  </form>`;
}

/** As data that a request can hold. Throws what a person is told. */
async function readImage(file) {
  if (!KINDS.includes(file.type)) throw new Error(`${file.name} is no picture that models read: use PNG, JPEG, WebP or GIF.`);
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
  return { url, name: file.name };
}

export function Pictures({ images, onRemove }) {
  if (!images?.length) return null;
  return html`<ul class="pictures">
    ${images.map(
      ({ url, name }, index) => html`<li key=${index}>
        <${Picture} url=${url} name=${name} />
        ${onRemove && html`<button type="button" aria-label=${`Remove ${name}`} onClick=${() => onRemove(index)}>×</button>`}
      </li>`,
    )}
  </ul>`;
}

/** Shown from a blob, the only source of pictures besides its server that the page may use. */
function Picture({ url, name }) {
  const [shown, setShown] = useState("");
  useEffect(() => {
    const [, kind, data] = /^data:([^;]+);base64,(.*)$/s.exec(url) ?? [];
    if (!KINDS.includes(kind)) return undefined;
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const address = URL.createObjectURL(new Blob([bytes], { type: kind }));
    setShown(address);
    return () => URL.revokeObjectURL(address);
  }, [url]);
  return shown && html`<img src=${shown} alt=${name} />`;
}
