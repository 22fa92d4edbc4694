// The page: one stream of status, one feed of rows, and what they make of the document.
import { highlighted } from "/web/code.js";
import { ago, clock, count, el, keyed, millis, plural, short, span, text } from "/web/format.js";
import { Graph, sealOf, targetName } from "/web/graph.js";
import { LiveRows } from "/web/rows.js";

const by = (id) => document.getElementById(id);
const rows = new LiveRows(by("rows"), by("rows-note"));
const graph = new Graph(by("graph"), choose);
let status = {};
let chosen = null; // the topic whose rows are shown; null: the first view there is
let heard = 0;

// --- the stream --------------------------------------------------------------------------------

let stream = null;

function connect() {
  stream?.close();
  stream = new EventSource("/v1/events");
  stream.addEventListener("status", (message) => {
    heard = Date.now();
    status = JSON.parse(message.data);
    connected(true);
    show();
  });
  stream.addEventListener("problem", (message) => {
    heard = Date.now();
    const data = JSON.parse(message.data);
    connected(true);
    warn(`${data.detail || data.title}${data.fix ? `. ${data.fix}` : ""}`);
  });
  stream.onerror = () => connected(false);
}

function connected(yes) {
  const pill = by("connection");
  pill.className = `pill ${yes ? "good" : "bad"}`;
  text(pill.lastElementChild, yes ? "live" : "not connected");
  document.body.classList.toggle("stale", !yes);
  warn(yes ? "" : "The connection is lost. What you see is the last that was known; it is tried again every second.");
}

function warn(words) {
  const banner = by("banner");
  banner.hidden = !words;
  text(banner, words);
}

// A browser gives up after some errors, and a dead connection may look open: begin anew by hand.
setInterval(() => {
  if (stream.readyState === EventSource.CLOSED || (heard && Date.now() - heard > 15000)) {
    heard = Date.now();
    connected(false);
    connect();
  }
}, 2000);

// --- sections ----------------------------------------------------------------------------------

function show() {
  const now = Date.parse(status.at ?? new Date().toISOString());
  text(by("project"), status.project ?? "");
  document.title = status.project ? `${status.project} · Headrace` : "Headrace";
  text(by("folder"), status.folder ?? "");
  text(by("position"), count(status.position));
  const inputs = (status.topics ?? []).filter((topic) => !/(^|\.)_/.test(topic.name));
  const rates = inputs.map((topic) => topic.rate).filter((rate) => rate !== null && rate !== undefined);
  text(by("rate"), rates.length ? short(rates.reduce((a, b) => a + b, 0)) : "–");
  showChecks();
  choices();
  graph.show(status, chosen ?? shownTopic()?.name);
  text(by("flow-note"), flowNote());
  showTargets(now);
  showDefinition();
  showChanges();
  showParts(now);
}

function flowNote() {
  const pipelines = (status.pipelines ?? []).filter((one) => (one.views ?? []).length);
  const still = pipelines.find((one) => one.state && one.state !== "live");
  if (!pipelines.length || still) return still ? `${still.name}: ${still.state}` : "";
  const behind = Math.max(0, ...pipelines.map((one) => one.behind ?? 0));
  const arrived = (status.changes ?? []).filter((one) => one.hops.every((hop) => hop.ms !== null)).map((one) => one.ms).sort((a, b) => a - b);
  const took = arrived.length ? ` · ${millis(arrived[arrived.length >> 1])} from commit to ${(status.followers ?? []).length ? "target" : "view"}` : "";
  return (behind ? `views are ${plural(behind, "row")} behind` : "views are up to date") + took;
}

function showChecks() {
  const checks = status.checks ?? [];
  by("checks").hidden = !checks.length;
  keyed(
    by("checks"), checks, (check) => check.label,
    () => el("p", { class: "check" }, el("span", { class: "sign", "aria-hidden": "true" }), el("span")),
    (box, check) => {
      box.className = `check ${check.ok === true ? "good" : check.ok === false ? "bad" : "wait"}`;
      text(box.firstElementChild, check.ok === true ? "✓" : check.ok === false ? "✗" : "…");
      text(box.lastElementChild, check.text);
    },
  );
}

function showTargets(now) {
  keyed(
    by("targets"), status.followers ?? [], (one) => one.name,
    (one) => el("li", { class: "target" },
      el("span", { class: "badge" }), el("b"), el("span", { class: "facts" }),
      el("button", { type: "button", class: "quiet", onclick: () => post(`/v1/verify/${one.name}`, `verifying ${one.name}`) }, "Verify now")),
    (box, one) => {
      const [badge, name, facts, button] = box.children;
      const seal = sealOf((status.verified ?? []).filter((v) => v.name === one.name && v.against !== "source"), now);
      badge.className = `badge ${seal ? (seal.ok ? "good" : "bad") : "wait"}`;
      text(badge, seal ? (seal.ok ? `✓ ${seal.words}` : `✗ ${seal.words}`) : "not verified yet");
      text(name, targetName(one));
      const said = [`through ${count(one.through)}`];
      if (one.aside) said.push(`${plural(one.aside, "row")} set aside`);
      if (one.error) said.push(typeof one.error === "string" ? one.error : one.error.fact);
      text(facts, said.join(" · "));
      const running = (status.verifying ?? []).find((v) => v.name === one.name);
      button.disabled = running?.state === "running";
      text(button, button.disabled ? "verifying…" : "Verify now");
      button.title = running?.error?.detail ?? "";
    },
  );
}

// --- rows and definition -----------------------------------------------------------------------

function viewsOf() {
  return (status.pipelines ?? []).flatMap((pipeline) =>
    (pipeline.views ?? []).filter((view) => view.state !== "ended").map((view) => ({
      name: view.topic, key: view.key ?? [], columns: Object.keys(view.columns ?? {}), view, pipeline,
    })));
}

function topicsOf() {
  const views = new Set(viewsOf().map((one) => one.name));
  return (status.topics ?? []).filter((topic) => !views.has(topic.name) && !/(^|\.)_/.test(topic.name))
    .map((topic) => ({ name: topic.name, key: topic.key ?? [], columns: [] }));
}

function shownTopic() {
  const all = [...viewsOf(), ...topicsOf()];
  return all.find((one) => one.name === chosen) ?? all[0];
}

function choices() {
  const select = by("choice");
  const groups = [["Views", viewsOf()], ["Topics", topicsOf()]].filter(([, list]) => list.length);
  const mark = JSON.stringify(groups.map(([name, list]) => [name, list.map((one) => one.name)]));
  if (select.dataset.mark !== mark) {
    select.dataset.mark = mark;
    select.replaceChildren(...groups.map(([name, list]) =>
      el("optgroup", { label: name }, ...list.map((one) => el("option", { value: one.name }, one.name)))));
  }
  select.parentElement.hidden = !groups.length;
  const now = shownTopic();
  if (now && select.value !== now.name) select.value = now.name;
  if (now) rows.open(now.name, now.key, now.columns);
  else rows.draw();
}

function choose(topic) {
  chosen = topic;
  show();
}

by("choice").addEventListener("change", (event) => choose(event.target.value));

let drawnCode = null;
const known = new Map(); // definitions, which are not told while the pipelines are down

function showDefinition() {
  const now = shownTopic();
  if (now?.view?.definition) known.set(now.name, [now.view.definition, now.pipeline.file ?? ""]);
  const [source, file] = known.get(now?.name) ?? ["", ""];
  text(by("code-note"), file.slice(file.lastIndexOf("/") + 1));
  const mark = `${now?.name} ${source}`;
  if (drawnCode === mark) return;
  drawnCode = mark;
  if (source) by("code").replaceChildren(...highlighted(source));
  else {
    const why = !now ? "A view is a plain PySpark function. Its text stands here."
      : now.view ? "The text of this view is known once its pipeline runs."
      : "A topic: it holds what was captured or appended. Choose a view to see its definition.";
    by("code").replaceChildren(el("span", { class: "empty" }, why));
  }
}

// --- last changes ------------------------------------------------------------------------------

function showChanges() {
  const list = (status.changes ?? []).slice(0, 12);
  const most = Math.max(1, ...list.map((one) => one.ms ?? 0));
  if (!list.length) {
    if (!by("changes").querySelector(".empty"))
      by("changes").replaceChildren(el("li", { class: "empty" }, "No transactions yet. Each one appears here with the time it took."));
    return;
  }
  by("changes").querySelector(".empty")?.remove();
  keyed(
    by("changes"), list, (one) => `${one.capture}/${one.position}/${one.xid}`,
    (one) => el("li", { class: "change" },
      el("time", {}, clock(one.committed)), el("span", { class: "what" }),
      el("span", { class: "bar", "aria-hidden": "true" }), el("span", { class: "took" })),
    (box, one) => {
      const [, what, bar, took] = box.children;
      text(what, `${one.capture} ${one.xid} · ${plural(one.rows, "row")}`);
      keyed(bar, one.hops, (hop) => hop.hop, (hop) => el("i", { class: `hop ${hop.hop}` }), (piece, hop) => {
        piece.style.width = `${hop.ms === null ? 0 : Math.max(0.8, (100 * hop.ms) / most)}%`;
        piece.title = `${hop.hop} ${millis(hop.ms)}`;
      });
      const pending = one.hops.some((hop) => hop.ms === null);
      text(took, `${millis(one.ms)}${pending ? " …" : ""}`);
      box.title = one.hops.map((hop) => `${hop.hop} ${millis(hop.ms)}`).join(" · ");
    },
  );
}

// --- parts -------------------------------------------------------------------------------------

const MOOD = { running: "ok", done: "ok", starting: "wait", waiting: "wait", failing: "bad", stopped: "bad" };

function showParts(now) {
  const parts = status.parts ?? [];
  const supervised = status.supervisor && status.supervisor.state !== "stopped";
  text(by("parts-note"), parts.length && !supervised ? "nobody supervises them: start headrace run" : "");
  if (!parts.length) {
    if (!by("parts").querySelector(".empty"))
      by("parts").replaceChildren(el("li", { class: "empty" }, "No parts run. Start them: headrace run"));
    return;
  }
  by("parts").querySelector(".empty")?.remove();
  keyed(
    by("parts"), parts, (part) => part.name,
    (part) => el("li", { class: "part" },
      el("i", { class: "dot", "aria-hidden": "true" }), el("b", {}, part.name), el("span", { class: "facts" }),
      el("button", { type: "button", class: "kill" }, "Kill"), el("p", { class: "error" })),
    (box, part) => {
      const [, , facts, button, error] = box.children;
      box.dataset.mood = MOOD[part.state] ?? "none";
      const said = [part.state];
      if (part.state === "running" && part.since) said.push(`for ${span((now - Date.parse(part.since)) / 1000)}`);
      if (part.next_try) said.push(`again in ${span(Math.max(0, (Date.parse(part.next_try) - now) / 1000))}`);
      if (part.pid) said.push(`pid ${part.pid}`);
      said.push(part.restarts === 1 ? "1 restart" : `${count(part.restarts ?? 0)} restarts`);
      if (part.note) said.push(part.note);
      text(facts, said.join(" · "));
      const dead = !part.pid;
      text(button, dead ? "Start" : "Kill");
      button.className = dead ? "quiet" : "kill";
      button.setAttribute("aria-label", `${dead ? "Start" : "Kill"} ${part.name}`);
      button.disabled = !supervised;
      button.onclick = () => post(`/v1/parts/${part.name}/${dead ? "restart" : "kill"}`, `${dead ? "starting" : "killed"} ${part.name}`);
      const failed = part.error && !["running", "starting"].includes(part.state) ? part.error : null;
      const told = failed ? [failed.code, failed.fact, failed.fix && `fix: ${failed.fix}`].filter(Boolean).join(" · ") : "";
      error.hidden = !told;
      text(error, told);
    },
  );
}

async function post(path, done) {
  try {
    const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" });
    const data = await answer.json();
    toast(answer.ok ? done : `${data.detail}. ${data.fix ?? ""}`, !answer.ok);
  } catch {
    if (path === "/v1/parts/page/kill") toast(done); // it cannot answer any more
    else toast("The server did not answer.", true);
  }
}

let fading = 0;

function toast(words, bad = false) {
  const box = by("toast");
  box.hidden = false;
  box.className = bad ? "toast bad" : "toast";
  text(box, words);
  clearTimeout(fading);
  fading = setTimeout(() => (box.hidden = true), bad ? 8000 : 3000);
}

// --- colours -----------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];

function theme(next) {
  const root = document.documentElement;
  let now = root.dataset.theme ?? "auto";
  if (next) {
    now = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    if (now === "auto") delete root.dataset.theme;
    else root.dataset.theme = now;
    try {
      localStorage.setItem("headrace-theme", now);
    } catch { /* not kept */ }
  }
  text(by("theme"), { auto: "Auto", light: "Light", dark: "Dark" }[now]);
  by("theme").setAttribute("aria-label", `Colours: ${now}. Change them`);
}

by("theme").addEventListener("click", () => theme(true));
theme(false);
rows.draw();
connect();
