// The flow: sources, topics, views, targets, and what goes from one to the next.
//
// `flowOf` makes nodes and edges of a status, `placed` gives each its place (four columns, or one
// below the other where the page is narrow), `Graph` draws. What stays keeps its element, so that
// focus and motion go on.
import { ago, count, plural, short, svg } from "/web/format.js";

const TOPICS_MOST = 14;
const HEIGHT = 54;
const GAP = 12;
const LAYERS = ["Sources", "Topics", "Views", "Targets"];

const last = (name) => name.slice(name.lastIndexOf(".") + 1);
/** Headrace's own: `_verified`, `shop._commits`; a captured table `shop.public._t` is not. */
const inner = (name) => /^([^.]*\.)?_[^.]*$/.test(name);

export function flowOf(status) {
  const now = Date.parse(status.at ?? new Date().toISOString());
  const nodes = new Map();
  const edges = [];
  const rates = new Map((status.topics ?? []).map((topic) => [topic.name, topic.rate]));
  const sizes = new Map((status.topics ?? []).map((topic) => [topic.name, plural(topic.rows, topic.kind === "events" ? "row" : "change")]));
  const views = new Map();
  for (const pipeline of status.pipelines ?? [])
    for (const view of pipeline.views ?? []) if (view.state !== "ended") views.set(view.topic, { pipeline, view });
  const add = (node) => (nodes.set(node.id, node), node);
  const partOf = (name) => (status.parts ?? []).find((part) => part.name === name);
  const health = (part, state) => (part && part.state !== "running" ? (part.state === "starting" ? "wait" : "bad") : state);
  const verified = status.verified ?? [];

  for (const capture of status.captures ?? []) {
    const part = partOf(`capture/${capture.name}`);
    const fresh = capture.last_commit ? `last commit ${ago(capture.last_commit, now)}` : "no commits yet";
    add({
      id: `source/${capture.name}`, layer: 0, title: capture.name, full: `capture ${capture.name}`,
      sub: part && part.state !== "running" ? part.state : fresh,
      state: health(part, ["running", "stopped"].includes(capture.state) || !capture.state ? "ok" : "bad"),
    });
  }
  const captured = new Map();
  for (const capture of status.captures ?? [])
    for (const [table, one] of Object.entries(capture.tables ?? {})) captured.set(one.topic, { capture, table, one });
  const wanted = new Set(captured.keys());
  for (const pipeline of status.pipelines ?? []) for (const topic of Object.values(pipeline.inputs ?? {})) wanted.add(topic);
  for (const topic of status.topics ?? []) if (!inner(topic.name) && !views.has(topic.name)) wanted.add(topic.name);
  const used = new Set([
    ...(status.pipelines ?? []).flatMap((pipeline) => Object.values(pipeline.inputs ?? {})),
    ...(status.followers ?? []).flatMap((follower) => follower.topics ?? []),
  ]);
  const topics = [...wanted].filter((name) => name && !views.has(name)).sort((a, b) => used.has(b) - used.has(a) || (a < b ? -1 : 1));
  for (const name of topics.slice(0, TOPICS_MOST)) {
    const of = captured.get(name);
    const building = of && of.one.status && !["live", "done", "complete", "streaming"].includes(of.one.status);
    add({
      id: `topic/${name}`, layer: 1, title: last(name), full: name, topic: name, rate: rates.get(name),
      sub: building ? `${of.one.status} ${of.one.reason ?? ""}` : sizes.get(name) ?? "not there yet",
      state: building ? "wait" : "ok",
      seal: sealOf(verified.filter((one) => one.against === "source" && (one.name === name || one.table === name)), now),
    });
    if (of) edges.push([`source/${of.capture.name}`, `topic/${name}`]);
  }
  const hidden = topics.length - TOPICS_MOST;
  if (hidden > 0) add({ id: "more", layer: 1, title: `and ${count(hidden)} more`, full: "more topics", sub: "", state: "none" });

  for (const [name, { pipeline, view }] of views) {
    const part = partOf("pipelines");
    const behind = pipeline.behind ?? 0;
    const state = pipeline.error ? "bad" : pipeline.state && pipeline.state !== "live" ? "wait" : "ok";
    const seal = sealOf(verified.filter((one) => one.against === "batch" && one.name === name), now);
    add({
      id: `view/${name}`, layer: 2, title: view.name ?? last(name), full: name, topic: name, rate: rates.get(name), seal,
      sub: state === "wait" ? pipeline.state : behind ? `${plural(behind, "row")} behind` : "up to date",
      state: health(part, state === "ok" && behind > 1000 ? "wait" : state),
    });
    for (const read of readsOf(pipeline, view)) {
      const of = pipeline.inputs?.[read];
      edges.push([of ? `topic/${of}` : `view/${pipeline.name}.${read}`, `view/${name}`]);
    }
  }
  for (const follower of status.followers ?? []) {
    const part = partOf(`follower/${follower.name}`);
    const behind = follower.behind ?? 0;
    add({
      id: `target/${follower.name}`, layer: 3, title: targetName(follower), full: `${follower.name}: ${follower.target ?? ""}`,
      sub: follower.error ? (follower.state === "stopped" ? "stopped" : "away") : follower.through === null || follower.through === undefined ? "loading" : behind ? `${plural(behind, "position")} behind` : "up to date",
      state: health(part, follower.error ? "bad" : "ok"),
      seal: sealOf(verified.filter((one) => one.name === follower.name && one.against !== "source"), now),
    });
    for (const topic of follower.topics ?? [])
      edges.push([views.has(topic) ? `view/${topic}` : `topic/${topic}`, `target/${follower.name}`]);
  }
  return { nodes, edges: edges.filter(([from, to]) => nodes.has(from) && nodes.has(to)) };
}

/** What a view reads; SQL is not taken apart: what it mentions. */
function readsOf(pipeline, view) {
  if (view.reads?.length || !view.definition) return view.reads ?? [];
  const words = new Set(view.definition.match(/\w+/g));
  const others = (pipeline.views ?? []).map((one) => one.name).filter((name) => name !== view.name);
  return [...Object.keys(pipeline.inputs ?? {}), ...others].filter((name) => words.has(name));
}

export function targetName(follower) {
  const target = follower.target ?? follower.name;
  const base = /\/([^/?#,]+)(?:[?#,].*)?$/.exec(target);
  return base ? base[1] : target.split(",")[0];
}

/** What was proved last of something: null if nothing was. */
export function sealOf(found, now) {
  if (!found.length) return null;
  const differing = found.reduce((sum, one) => sum + (one.differing ?? 0), 0);
  const rows = found.reduce((sum, one) => sum + (one.rows ?? 0), 0);
  const oldest = found.reduce((a, b) => (a.at < b.at ? a : b));
  const through = Math.min(...found.map((one) => one.through));
  const words = differing
    ? `${plural(differing, "row")} differ`
    : `${plural(rows, "row")} verified through ${count(through)}, ${ago(oldest.at, now)}`;
  return { ok: !differing, words, rows, through, at: oldest.at };
}

/** An edge over a layer goes through a place of its own there; those to one node share it. */
function withVias(flow) {
  const nodes = new Map(flow.nodes);
  const edges = [];
  const routes = flow.edges.map(([from, to]) => {
    const route = [from];
    for (let layer = nodes.get(from).layer + 1; layer < nodes.get(to).layer; layer += 1) {
      const id = `via/${layer}/${to}`;
      nodes.set(id, { id, layer, via: true });
      route.push(id);
    }
    route.push(to);
    for (let i = 1; i < route.length; i += 1) edges.push([route[i - 1], route[i]]);
    return route;
  });
  return { nodes, edges, routes };
}

/** Put each layer into the order that crosses fewest edges: each node near the mean of its inputs. */
function ordered(flow) {
  const layers = LAYERS.map((_, layer) => [...flow.nodes.values()].filter((node) => node.layer === layer));
  const rank = new Map();
  for (const layer of layers) {
    const mean = (node) => {
      // A view of a view stands behind it, in the same layer.
      const from = flow.edges.filter(([, to]) => to === node.id).map(([of]) => rank.get(of) ?? mean(flow.nodes.get(of)) + 0.001);
      return from.length ? from.reduce((a, b) => a + b, 0) / from.length : 0;
    };
    const keyed = layer.map((node, i) => [mean(node), i, node]).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    layer.splice(0, layer.length, ...keyed.map(([, , node]) => node));
    layer.forEach((node, i) => rank.set(node.id, layer.length > 1 ? i / (layer.length - 1) : 0.5));
  }
  return layers.map((nodes, i) => ({ title: LAYERS[i], nodes })).filter((layer) => layer.nodes.length);
}

const heightOf = (nodes) => nodes.reduce((sum, node) => sum + (node.via ? 10 : HEIGHT) + GAP, -GAP);

export function placed(plain, width) {
  const wide = width >= 620;
  const flow = wide ? withVias(plain) : { ...plain, routes: plain.edges };
  const layers = ordered(flow);
  const at = new Map();
  const titles = [];
  if (!layers.length) return { at, titles, edges: [], height: 0 };
  let height;
  if (wide) {
    const gap = Math.max(36, Math.min(90, width * 0.07));
    const w = Math.min(250, (width - gap * (layers.length - 1)) / layers.length);
    const step = layers.length > 1 ? Math.min((width - w) / (layers.length - 1), w + 160) : 0;
    const most = Math.max(...layers.map((layer) => heightOf(layer.nodes)));
    height = 28 + most;
    layers.forEach((layer, column) => {
      titles.push({ title: layer.title, x: column * step, y: 12 });
      let y = 26 + (most - heightOf(layer.nodes)) / 2;
      for (const node of layer.nodes) {
        const h = node.via ? 10 : HEIGHT;
        at.set(node.id, { x: column * step, y, w, middle: y + h / 2 });
        y += h + GAP;
      }
    });
  } else {
    let y = 0;
    const inset = flow.edges.length ? 30 : 1;
    for (const layer of layers) {
      titles.push({ title: layer.title, x: inset, y: y + 12 });
      y += 22;
      for (const node of layer.nodes) {
        at.set(node.id, { x: inset, y, w: width - inset - 1, middle: y + HEIGHT / 2 });
        y += HEIGHT + 8;
      }
      y += 8;
    }
    height = y;
  }
  const edges = flow.routes.map((route) => {
    const [from, to] = [route[0], route[route.length - 1]];
    const [a, b] = [at.get(from), at.get(to)];
    if (!wide) {
      const out = Math.max(4, 26 - Math.abs(b.middle - a.middle) / 30) - 8;
      return { from, to, path: `M${a.x},${a.middle} C${out},${a.middle} ${out},${b.middle} ${b.x},${b.middle}` };
    }
    let path = "";
    for (let i = 1; i < route.length; i += 1) {
      const [one, two] = [at.get(route[i - 1]), at.get(route[i])];
      const beside = one.x === two.x; // in one layer: around the left
      const x = beside ? one.x : one.x + one.w;
      const bend = beside ? -26 : (two.x - x) / 2;
      path += `${i > 1 ? "L" : "M"}${x},${one.middle} C${x + bend},${one.middle} ${two.x - (beside ? -bend : bend)},${two.middle} ${two.x},${two.middle} `;
    }
    return { from, to, path };
  });
  return { at, titles, edges, height };
}

const pen = document.createElement("canvas").getContext("2d");

function fitted(text, width, font) {
  pen.font = font;
  if (pen.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && pen.measureText(text.slice(0, end) + "…").width > width) end -= 1;
  return text.slice(0, end) + "…";
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes))
    if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export class Graph {
  constructor(box, choose) {
    this.box = box;
    this.choose = choose;
    this.nodes = new Map();
    this.edges = new Map();
    this.root = svg("svg", { role: "group", "aria-label": "Flow from sources to targets" });
    this.under = svg("g", { class: "edges" });
    this.over = svg("g");
    this.titles = svg("g");
    this.root.append(this.under, this.titles, this.over);
    new ResizeObserver(() => this.flow && this.draw()).observe(box);
  }

  show(status, chosen) {
    this.flow = flowOf(status);
    this.chosen = chosen;
    this.draw();
  }

  draw() {
    if (!this.flow.nodes.size) {
      this.root.remove();
      if (!this.box.firstChild) {
        const p = document.createElement("p");
        p.className = "empty";
        p.textContent = "Nothing flows yet: topics appear here as soon as something is captured or appended.";
        this.box.append(p);
      }
      return;
    }
    if (this.root.parentNode !== this.box) this.box.replaceChildren(this.root);
    const width = Math.max(280, Math.floor(this.box.clientWidth));
    const { at, titles, edges, height } = placed(this.flow, width);
    set(this.root, { width, height, viewBox: `0 0 ${width} ${height}` });
    this.titles.replaceChildren(...titles.map((one) => svg("text", { x: one.x, y: one.y, class: "layer" }, one.title)));
    const family = getComputedStyle(this.box).fontFamily;
    const keep = new Set();
    for (const node of this.flow.nodes.values()) {
      keep.add(node.id);
      this.node(node, at.get(node.id), family);
    }
    for (const [id, drawn] of this.nodes) if (!keep.has(id)) (drawn.g.remove(), this.nodes.delete(id));
    const lines = new Set();
    for (const edge of edges) {
      const id = `${edge.from} ${edge.to}`;
      lines.add(id);
      let path = this.edges.get(id);
      if (!path) {
        path = svg("path", { fill: "none" });
        this.edges.set(id, path);
        this.under.append(path);
      }
      const flows = (this.flow.nodes.get(edge.from).rate ?? this.flow.nodes.get(edge.to).rate ?? 0) > 0;
      set(path, { d: edge.path, class: flows ? "edge flows" : "edge" });
    }
    for (const [id, path] of this.edges) if (!lines.has(id)) (path.remove(), this.edges.delete(id));
  }

  node(node, place, family) {
    let drawn = this.nodes.get(node.id);
    if (!drawn) {
      const parts = {
        hint: svg("title"), back: svg("rect", { rx: 9, class: "back" }), dot: svg("circle", { r: 4, class: "state" }),
        name: svg("text", { class: "name" }), sub: svg("text", { class: "sub" }), rate: svg("text", { class: "rate" }),
        seal: svg("text", { class: "seal" }),
      };
      const g = svg("g", {}, ...Object.values(parts));
      if (node.topic) {
        const choose = () => this.choose(node.topic);
        g.setAttribute("tabindex", "0");
        g.setAttribute("role", "button");
        g.addEventListener("click", choose);
        g.addEventListener("keydown", (event) => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          choose();
        });
      }
      drawn = { g, ...parts };
      this.nodes.set(node.id, drawn);
      this.over.append(g);
    }
    const { g, back, dot, name, sub, rate, seal, hint } = drawn;
    const pace = node.rate > 0 ? `${short(node.rate)}/s` : "";
    const words = node.seal ? ` ${node.seal.words}` : "";
    set(g, {
      transform: `translate(${place.x},${place.y})`, "data-state": node.state,
      class: `node layer-${node.layer}${node.topic && node.topic === this.chosen ? " chosen" : ""}${node.topic ? " open" : ""}`,
      "aria-label": `${node.full}: ${node.sub}${pace ? `, ${pace}` : ""}${words}`,
    });
    set(back, { width: place.w, height: HEIGHT });
    set(dot, { cx: 15, cy: 19 });
    const put = (element, value) => element.textContent !== value && (element.textContent = value);
    put(hint, `${node.full}${words}`);
    const room = place.w >= 190; // else the sign alone
    const sealed = node.seal ? (node.seal.ok ? "✓" : "✗") + (room ? (node.seal.ok ? " verified" : " differs") : "") : "";
    pen.font = `600 11px ${family}`;
    const right = Math.max(sealed ? pen.measureText(sealed).width + 8 : 0, 0);
    put(name, fitted(node.title, place.w - 40 - right, `600 13.5px ${family}`));
    set(name, { x: 27, y: 23.5 });
    put(seal, sealed);
    set(seal, { x: place.w - 12, y: 23, class: `seal ${node.seal?.ok === false ? "bad" : "good"}` });
    put(rate, pace);
    set(rate, { x: place.w - 12, y: 42 });
    pen.font = `12px ${family}`;
    put(sub, fitted(node.sub, place.w - 40 - pen.measureText(pace).width, `12px ${family}`));
    set(sub, { x: 27, y: 42 });
  }
}
