// What `emberkeep bench` has measured on the server's machine: pictures, tables, and one result beside another.

import { call } from "./api.js";
import { ago, bytes, number } from "./words.js";
import { html, useEffect, useState } from "./vendor/preact-htm.js";

export function View() {
  const [kept, setKept] = useState(null);
  const [chosen, setChosen] = useState("");
  const [problem, setProblem] = useState("");
  useEffect(() => {
    call("/v1/benchmarks").then(
      ({ data }) => (setKept(data), setChosen(data[0]?.id ?? "")),
      (error) => setProblem(error.message),
    );
  }, []);
  const one = kept?.find(({ id }) => id === chosen);
  return html`<section class="view benchmarks" aria-label="Benchmarks">
    <h1>Benchmarks</h1>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${kept?.length === 0 && html`<${Nothing} />`}
    ${kept?.length > 0 &&
    html`<div class="beside">
      <${List} kept=${kept} chosen=${chosen} onChoose=${setChosen} />
      <${Result} key=${chosen} id=${chosen} others=${kept.filter(({ id, name }) => id !== chosen && name === one.name)} />
    </div>`}
  </section>`;
}

function Nothing() {
  return html`<p>Nothing has been measured here yet. On the server's machine,</p>
    <pre>emberkeep bench all --quick</pre>
    <p>
      measures how fast it is with stored state, and what it finds shows here. Without <code>--quick</code> it takes
      longer, and its figures are worth more. The machine should have nothing else to do meanwhile.
    </p>`;
}

function List({ kept, chosen, onChoose }) {
  return html`<nav aria-label="Results">
    <ul>
      ${kept.map(
        ({ id, name, when, model }) => html`<li key=${id}>
          <button aria-current=${id === chosen ? "true" : undefined} onClick=${() => onChoose(id)}>
            <strong>${name}</strong> <span class="note">${since(when)}${model?.file && html`<br />${model.file}`}</span>
          </button>
        </li>`,
      )}
    </ul>
  </nav>`;
}

const since = (when) => ago((Date.now() - Date.parse(when)) / 1000);

/** Undefined until it is there; `onProblem` gets a sentence. */
function useResult(id, onProblem) {
  const [told, setTold] = useState();
  useEffect(() => {
    let isOver = false;
    setTold(undefined);
    if (id) call(`/v1/benchmarks/${encodeURIComponent(id)}`).then((found) => isOver || setTold(found), (error) => onProblem(error.message));
    return () => (isOver = true);
  }, [id]);
  return told;
}

function Result({ id, others }) {
  const [problem, setProblem] = useState("");
  const [beside, setBeside] = useState("");
  const result = useResult(id, setProblem);
  const other = useResult(beside, setProblem);
  return html`<article>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${result &&
    html`<h2>${result.name}</h2>
      <p class="note">${whereOf(result).join(" · ")}</p>
      ${others.length > 0 && html`<${Beside} others=${others} beside=${beside} onBeside=${setBeside} />`}
      ${result.pictures.map((picture) => html`<${Pictures} key=${picture.title} ...${{ picture, result, other }} />`)}
      ${result.tables.map((table) => html`<${Table} key=${table.title} table=${table} other=${other?.tables.find(({ title }) => title === table.title)} />`)}
      ${result.notes.map((note) => html`<p>${note}</p>`)}
      <${Where} result=${result} />`}
  </article>`;
}

function Beside({ others, beside, onBeside }) {
  return html`<label class="choice">Compare with
    <select value=${beside} onChange=${(event) => onBeside(event.target.value)}>
      <option value="">nothing</option>
      ${others.map(({ id, when, model }) => html`<option value=${id}>${[new Date(when).toLocaleString(), model?.file].filter(Boolean).join(", ")}</option>`)}
    </select>
  </label>`;
}

function whereOf({ when, model, machine, emberkeep }) {
  return [
    new Date(when).toLocaleString(),
    model?.file,
    machine.cpu,
    machine.cores && `${machine.cores} cores`,
    emberkeep && `Emberkeep ${emberkeep}`,
  ].filter(Boolean);
}

// ── pictures ──

/** One of this result, and below it the same of the other one. */
function Pictures({ picture, result, other }) {
  const same = other?.pictures.find(({ title }) => title === picture.title);
  const shown = same ? [[picture, result], [same, other]] : [[picture, null]];
  return shown.map(
    ([one, from]) => html`<figure key=${from?.id} tabindex="0">
      ${from && html`<figcaption>${new Date(from.when).toLocaleString()}</figcaption>`}
      <${Picture} picture=${one} />
    </figure>`,
  );
}

/** As an image, in which no script can run. */
function Picture({ picture }) {
  const [address, setAddress] = useState("");
  useEffect(() => {
    const made = URL.createObjectURL(new Blob([picture.svg], { type: "image/svg+xml" }));
    setAddress(made);
    return () => URL.revokeObjectURL(made);
  }, [picture]);
  return address && html`<img src=${address} alt=${`${picture.title}: a picture of what the table says`} />`;
}

// ── tables ──

function Table({ table, other }) {
  const columns = [...new Set(table.rows.flatMap((row) => Object.keys(row)))].filter((name) => name !== "label");
  const rowBeside = (label) => other?.rows.find((row) => row.label === label);
  return html`<div class="wide" tabindex="0" role="region" aria-label=${table.title}>
    <table>
      <caption>${table.title}</caption>
      <thead><tr><th scope="col"><span class="spoken">What</span></th>${columns.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
      <tbody>
        ${table.rows.map(
          (row) => html`<tr>
            <th scope="row">${row.label}</th>
            ${columns.map((name) => html`<td>${readable(row[name])}<${Compared} value=${row[name]} other=${rowBeside(row.label)?.[name]} /></td>`)}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** What the other result has in the same place, and how much more or less that is. */
function Compared({ value, other }) {
  if (value === undefined || other === undefined) return null;
  const [mine, theirs] = [middle(value), middle(other)];
  const percent = mine !== null && theirs ? Math.round(100 * (mine / theirs - 1)) : 0;
  const change = percent ? ` (${percent < 0 ? "−" : "+"}${number(Math.abs(percent))}%)` : "";
  return html`<span class="other">${readable(other)}${change}</span>`;
}

const middle = (value) => (typeof value === "number" ? value : (value?.median ?? null));

/** `41.2 ms (39.8–44.0)`: median, then the lowest and the highest sample. */
function readable(value) {
  if (value === undefined) return "";
  if (typeof value === "number") return number(value);
  if (typeof value === "string") return value;
  const [median, low, high] = [value.median, value.low, value.high].map(short);
  const unit = value.unit === "" || value.unit === "×" ? value.unit : ` ${value.unit}`;
  return `${median}${unit}${low === high ? "" : ` (${low}–${high})`}`;
}

/** About three digits that mean something. */
function short(value) {
  const size = Math.abs(value);
  if (size >= 100) return number(Math.round(value));
  return value.toFixed(size >= 10 ? 1 : size < 2 ? 3 : 2);
}

// ── where ──

function Where({ result }) {
  const { machine, versions, model, command } = result;
  const told = [
    ["Command", command.join(" ")],
    ["Model", model?.file && `${model.file}${model.bytes ? `, ${bytes(model.bytes)}` : ""}`],
    ...Object.entries(machine).map(([name, value]) => [name, name.endsWith("_bytes") ? bytes(value) : value]),
    ...Object.entries(versions),
  ];
  return html`<details>
    <summary>Where it was measured</summary>
    <dl class="facts">
      ${told
        .filter(([, value]) => value)
        .map(([name, value]) => html`<dt>${name.replace(/_bytes$/, "").replaceAll("_", " ")}</dt><dd>${[value].flat().join(", ")}</dd>`)}
    </dl>
  </details>`;
}
