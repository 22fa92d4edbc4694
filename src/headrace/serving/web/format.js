// Numbers and times for people, and the few lines that make elements.

const whole = new Intl.NumberFormat("en");

export const count = (n) => (n === null || n === undefined ? "–" : whole.format(n));

export function plural(n, one, many = one + "s") {
  return `${count(n)} ${n === 1 ? one : many}`;
}

export function short(n) {
  if (n === null || n === undefined) return "–";
  if (Math.abs(n) < 10 && n % 1) return n.toFixed(1);
  if (Math.abs(n) < 100_000) return count(Math.round(n));
  return Math.abs(n) < 1e6 ? `${Math.round(n / 1e3)} k` : `${(n / 1e6).toFixed(1)} M`;
}

export function span(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export function ago(time, now) {
  if (!time) return "";
  const seconds = (now - Date.parse(time)) / 1000;
  return seconds < 1 ? "just now" : `${span(seconds)} ago`;
}

export function millis(ms) {
  if (ms === null || ms === undefined) return "…";
  if (ms < 1) return "<1 ms";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return ms < 100_000 ? `${(ms / 1000).toFixed(1)} s` : span(ms / 1000);
}

export function clock(time) {
  const at = new Date(time);
  const two = (n) => String(n).padStart(2, "0");
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

export function cell(value) {
  if (value === null || value === undefined) return "null";
  if (typeof value === "object") return JSON.stringify(value);
  return String(value);
}

function give(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function el(tag, attributes = {}, ...children) {
  return give(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return give(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

/** Keep the children of `box` in step with `items`: those that stay keep focus and animations. */
export function keyed(box, items, keyOf, make, update) {
  const there = new Map([...box.children].map((child) => [child.dataset.key, child]));
  let before = null;
  for (const item of items) {
    const key = keyOf(item);
    let child = there.get(key);
    if (child) there.delete(key);
    else {
      child = make(item);
      child.dataset.key = key;
    }
    update(child, item);
    const place = before ? before.nextElementSibling : box.firstElementChild;
    if (place !== child) box.insertBefore(child, place);
    before = child;
  }
  for (const child of there.values()) child.remove();
}
