// A few colours for Python and SQL: enough to read, nothing to configure.
import { el } from "/web/format.js";

const TOKENS = /(#[^\n]*)|("""[\s\S]*?"""|'''[\s\S]*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(@[\w.]+)|\b(def|return|import|from|as|lambda|for|in|if|else|and|or|not|None|True|False|is|with)\b|\b(\d[\d_.]*)\b/g;
const SQL = /\b(select|from|where|group|by|order|join|left|right|outer|inner|on|as|with|having|union|all|distinct|sum|count|min|max|avg|case|when|then|end|and|or|not|in|is|null|over|partition|limit)\b/gi;

function plain(text) {
  return document.createTextNode(text);
}

function sql(text, kind) {
  const parts = [];
  let last = 0;
  for (const found of text.matchAll(SQL)) {
    parts.push(el("span", { class: kind }, text.slice(last, found.index)), el("span", { class: "key" }, found[0]));
    last = found.index + found[0].length;
  }
  parts.push(el("span", { class: kind }, text.slice(last)));
  return parts;
}

export function highlighted(source) {
  if (/^\s*(select|with)\b/i.test(source)) return sql(source, "plain");
  const parts = [];
  let last = 0;
  for (const found of source.matchAll(TOKENS)) {
    parts.push(plain(source.slice(last, found.index)));
    const [whole, comment, string, decorator, keyword] = found;
    if (comment) parts.push(el("span", { class: "com" }, whole));
    else if (string) parts.push(...(/\bselect\b/i.test(whole) ? sql(whole, "str") : [el("span", { class: "str" }, whole)]));
    else if (decorator) parts.push(el("span", { class: "dec" }, whole));
    else if (keyword) parts.push(el("span", { class: "key" }, whole));
    else parts.push(el("span", { class: "num" }, whole));
    last = found.index + whole.length;
  }
  parts.push(plain(source.slice(last)));
  return parts;
}
