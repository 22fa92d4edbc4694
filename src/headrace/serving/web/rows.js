// The rows of a topic, live: the feed's snapshot, then its changes, entry by entry.
//
// A change is shown when its entry is whole, so that no reader ever sees half a transaction. With a
// key a row is known by it; without, by itself, and copies are counted. Cells that changed flash.
import { cell, count, el, plural } from "/web/format.js";

const KEEP_MOST = 5000; // more rows than this are not kept in the page
const SHOW_MOST = 200;

export class LiveRows {
  constructor(box, note) {
    this.box = box;
    this.note = note;
    this.source = null;
    this.name = null;
  }

  open(name, key, columns) {
    if (name === this.name) return;
    this.close();
    this.name = name;
    this.key = key;
    this.columns = columns;
    this.start("rows");
  }

  start(from) {
    this.source?.close();
    this.from = from;
    this.rows = new Map();
    this.waiting = [];
    this.flashes = new Map();
    this.state = "loading";
    this.table = null;
    this.draw();
    const address = `/v1/feed/${encodeURIComponent(this.name)}?start=${from}`;
    const source = (this.source = new EventSource(address));
    const on = (event, handle) =>
      source.addEventListener(event, (message) => {
        if (source !== this.source) return;
        handle(JSON.parse(message.data));
        this.soon();
      });
    on("snapshot", (data) => {
      for (const row of data.rows) this.put(row, 1);
      if (this.rows.size > KEEP_MOST) this.start("now");
    });
    on("live", () => (this.state = "live"));
    on("changes", (data) => {
      this.state = "live";
      this.waiting.push(...data.changes);
      if (data.last) this.take();
    });
    on("problem", (data) => (this.state = data.detail || data.title));
    source.onopen = () => {
      if (this.from === "now") this.state = "live";
      this.soon();
    };
    source.onerror = () => {
      if (source !== this.source) return;
      this.state = "away";
      this.soon();
      // Not tried again by the browser: the token is of another log, or the topic is gone.
      if (source.readyState === EventSource.CLOSED) setTimeout(() => source === this.source && this.start("rows"), 2000);
    };
  }

  close() {
    this.source?.close();
    this.source = null;
    this.name = null;
  }

  identity(row) {
    return JSON.stringify(this.key.length ? this.key.map((name) => row[name]) : row);
  }

  put(row, weight) {
    const key = this.identity(row);
    const copies = this.key.length ? Math.max(0, weight) : (this.rows.get(key)?.copies ?? 0) + weight;
    if (copies > 0) this.rows.set(key, { row, copies });
    else this.rows.delete(key);
  }

  take() {
    const before = new Map();
    for (const { row } of this.waiting) {
      const key = this.identity(row);
      if (!before.has(key)) before.set(key, this.rows.get(key)?.row);
    }
    // The rows that go come first: an update is one of each.
    for (const one of this.waiting) if (one.weight < 0 || one.op === "d") this.put(one.row, -1);
    for (const one of this.waiting) if (one.weight > 0 && one.op !== "d") this.put(one.row, one.weight);
    this.waiting = [];
    for (const [key, old] of before) {
      const now = this.rows.get(key)?.row;
      if (!now) continue;
      const names = Object.keys(now).filter((name) => !old || cell(old[name]) !== cell(now[name]));
      this.flashes.set(key, new Set([...(this.flashes.get(key) ?? []), ...names]));
    }
    while (this.rows.size > KEEP_MOST) this.rows.delete(this.rows.keys().next().value);
  }

  soon() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  said() {
    if (this.state === "loading") return "reading…";
    if (this.state === "away") return "not connected, trying again";
    if (this.state !== "live") return this.state;
    if (this.from === "now") return "too many rows to show all: those that change";
    const shown = this.rows.size > SHOW_MOST ? `the first ${SHOW_MOST} of ` : "";
    return `${shown}${plural(this.rows.size, "row")}, live`;
  }

  draw() {
    this.note.textContent = this.name ? this.said() : "";
    if (!this.name) {
      this.box.replaceChildren(el("p", { class: "empty" }, "Views appear here once a pipeline has committed."));
      return;
    }
    if (!this.rows.size) {
      this.table = null;
      const why = this.state === "live" ? "No rows yet. They appear here as they come." : "";
      this.box.replaceChildren(el("p", { class: "empty" }, why));
      return;
    }
    const entries = [...this.rows.entries()];
    entries.sort(([, a], [, b]) => compare(a.row, b.row, this.key.length ? this.key : this.columns));
    const shown = entries.slice(0, SHOW_MOST);
    const columns = this.columns.length ? this.columns : Object.keys(shown[0][1].row).filter((name) => !name.startsWith("_"));
    const signature = columns.join("\u0000");
    if (!this.table || this.table.signature !== signature) this.build(columns, signature);
    const body = this.table.body;
    const there = new Map([...body.children].map((line) => [line.dataset.key, line]));
    let before = null;
    for (const [key, { row, copies }] of shown) {
      let line = there.get(key);
      if (line) there.delete(key);
      else {
        line = el("tr", {}, ...columns.map(() => el("td")));
        line.dataset.key = key;
      }
      columns.forEach((name, i) => this.fill(line.children[i], row[name], this.flashes.get(key)?.has(name)));
      if (copies > 1) line.children[0].textContent += ` × ${count(copies)}`;
      const place = before ? before.nextElementSibling : body.firstElementChild;
      if (place !== line) body.insertBefore(line, place);
      before = line;
    }
    for (const line of there.values()) line.remove();
    this.flashes.clear();
  }

  build(columns, signature) {
    const body = el("tbody");
    const [{ row }] = this.rows.values();
    const head = columns.map((name) =>
      el("th", { scope: "col", class: `${this.key.includes(name) ? "is-key" : ""} ${numeric(row[name]) ? "number" : ""}` }, name));
    this.table = { body, signature };
    this.box.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...head)), body));
  }

  fill(place, value, flash) {
    const shown = cell(value);
    if (place.textContent !== shown) place.textContent = shown;
    place.className = value === null ? "null" : numeric(value) ? "number" : "";
    if (flash) {
      place.getAnimations().forEach((one) => one.cancel());
      place.animate([{ backgroundColor: "var(--flash)" }, { backgroundColor: "transparent" }], {
        duration: 1400,
        easing: "ease-out",
      });
    }
  }
}

function numeric(value) {
  return typeof value === "number" || (typeof value === "string" && /^-?\d+(\.\d+)?$/.test(value));
}

function compare(a, b, names) {
  for (const name of names) {
    const x = a[name];
    const y = b[name];
    if (x === y) continue;
    if (x === null || y === null) return x === null ? -1 : 1;
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x) < String(y) ? -1 : 1;
    if (order) return order;
  }
  return 0;
}
