// Tools that the server runs by itself, and the MCP servers that some of them come from.

import { call } from "./api.js";
import { html, useEffect, useState } from "./vendor/preact-htm.js";

const MODES = {
  runs: "runs when a model calls it",
  asks: "asks you first",
  off: "off",
};

export function View() {
  const [told, setTold] = useState(null);
  const [problem, setProblem] = useState("");
  const [query, setQuery] = useState("");
  const refresh = () => call("/v1/tools").then((fresh) => (setTold(fresh), setProblem("")), (error) => setProblem(error.message));
  useEffect(() => void refresh(), []);
  const fits = ({ name, group, description }) => `${name} ${group} ${description}`.toLowerCase().includes(query.toLowerCase());
  return html`<section class="view" aria-label="Tools">
    <h1>Tools</h1>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${told && !told.enabled && html`<${HowToBegin} />`}
    ${told?.enabled && told.data.length === 0 && html`<p class="note">No model is loaded: the tools are listed when one is.</p>`}
    ${told?.servers.length > 0 && html`<${Servers} servers=${told.servers} onRefresh=${refresh} />`}
    ${told?.enabled && html`<input type="search" aria-label="Search tools" placeholder="Search" value=${query} onInput=${(e) => setQuery(e.target.value)} />`}
    ${told?.enabled && groupsOf(told.data.filter(fits)).map(([group, tools]) => html`<${Group} key=${group} group=${group} tools=${tools} />`)}
  </section>`;
}

function HowToBegin() {
  return html`<p>
      This server runs no tools by itself: clients bring their own. Start it with <code>--server-tools safe</code>, and models may read files below${" "}
      <code>--tools-root</code>, fetch pages, search the memory and ask other models, also in this page’s chat.
    </p>
    <p>With <code>--server-tools ask</code> they get the dangerous ones, too, such as writing files and running commands: each call waits until you allow it here.</p>`;
}

function groupsOf(tools) {
  const groups = new Map();
  for (const tool of tools) groups.set(tool.group, [...(groups.get(tool.group) ?? []), tool]);
  return [...groups];
}

function Group({ group, tools }) {
  return html`<h2>${group}</h2>
    <dl class="tools">
      ${tools.map(
        (tool) => html`<div key=${tool.name}>
          <dt><code>${tool.name}</code> <span class=${`badge ${tool.mode}`}>${MODES[tool.mode] ?? tool.mode}</span></dt>
          <dd>${tool.description}${tool.mode === "off" && tool.allowed_by && ` It is used with ${tool.allowed_by}.`}</dd>
        </div>`,
      )}
    </dl>`;
}

function Servers({ servers, onRefresh }) {
  return html`<div class="wide" tabindex="0" role="region" aria-label="MCP servers">
    <table>
      <caption>MCP servers <button class="link" onClick=${onRefresh}>look again</button></caption>
      <thead><tr><th scope="col">Server</th><th scope="col">State</th><th scope="col">Tools</th><th scope="col">To approve</th></tr></thead>
      <tbody>
        ${servers.map(
          (server) => html`<tr key=${server.name}>
            <th scope="row">${server.name}${server.about && ` (${server.about})`}</th>
            <td>${server.status}${server.reason && `: ${server.reason}`}</td>
            <td>${server.tools}</td>
            <td>${server.unapproved.length ? `${server.unapproved.join(", ")}: emberkeep mcp approve ${server.name}` : "–"}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}
