// Markdown as models write it: headings, lists, quotes, code, emphasis, links. Elements are made one by one and what the
// model wrote only ever becomes text, so nothing in it can be markup or code. Every piece of text is known by its place in
// the source: `leaf(start, end)` gives the nodes that show it, so that tokens keep their colours.

import { copyButton, h } from "./dom.js";

const FENCE = /^\s*(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}(?:-[ \t]*){3,}$|^ {0,3}(?:\*[ \t]*){3,}$|^ {0,3}(?:_[ \t]*){3,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const INDENTED = /^[ \t]{2,}\S/;
const DEEPEST = 8;

const begins = (text) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(text));

function linesOf(source) {
  const lines = [];
  for (let start = 0; start <= source.length;) {
    const found = source.indexOf("\n", start), end = found < 0 ? source.length : found;
    lines.push({ start, end, text: source.slice(start, end) });
    start = end + 1;
  }
  return lines;
}

// The blocks of a text, each with its place: a text that has grown begins with the blocks it had, but for the last.
export function parse(source) {
  const lines = linesOf(source), blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].text.trim()) { at++; continue; }
    const first = at, { text, start } = lines[at];
    const block = { start };
    const fence = FENCE.exec(text);
    const whole = (kind, inside) => { block.kind = kind; while (at < lines.length && inside(lines[at].text)) at++; block.lines = lines.slice(first, at); };
    if (fence) {
      Object.assign(block, { kind: "code", language: fence[2].trim() });
      const closes = (line) => line.trim().length >= fence[1].length && line.trim() === fence[1][0].repeat(line.trim().length);
      at++;
      while (at < lines.length && !closes(lines[at].text)) at++;
      block.body = at > first + 1 ? [lines[first + 1].start, lines[at - 1].end] : [lines[first].end, lines[first].end];
      at = Math.min(at + 1, lines.length);
    } else if (RULE.test(text)) {
      Object.assign(block, { kind: "rule" });
      at++;
    } else if (HEADING.test(text)) {
      const [mark, hashes] = HEADING.exec(text);
      Object.assign(block, { kind: "heading", level: hashes.length, body: [start + mark.length, start + text.replace(/[ \t]#+[ \t]*$/, "").trimEnd().length] });
      at++;
    } else if (QUOTE.test(text)) {
      whole("quote", (line) => QUOTE.test(line));
    } else if (ITEM.test(text)) {
      block.kind = "list";
      block.items = [];
      at = items(lines, at, block.items);
    } else {
      at++;
      whole("paragraph", (line) => line.trim() && !begins(line));
    }
    block.end = lines[at - 1].end;
    blocks.push(block);
  }
  return blocks;
}

// An item is its line and the indented ones below it; a blank line ends the list unless it goes on behind it.
function items(lines, at, found) {
  while (at < lines.length) {
    const { text, start, end } = lines[at], item = ITEM.exec(text);
    if (item && !RULE.test(text)) found.push({ indent: item[1].replace(/\t/g, "    ").length, number: parseInt(item[2], 10), ranges: [[start + item[0].length, end]] });
    else if (INDENTED.test(text) && !FENCE.test(text)) found.at(-1).ranges.push([start + text.search(/\S/), end]);
    else if (text.trim()) break;
    else {
      let next = at;
      while (next < lines.length && !lines[next].text.trim()) next++;
      if (next === lines.length || FENCE.test(lines[next].text) || !(ITEM.test(lines[next].text) || INDENTED.test(lines[next].text))) break;
      at = next;
      continue;
    }
    at++;
  }
  return at;
}

export function draw(block, source, leaf) {
  const text = ([start, end]) => inline(source, start, end, leaf, 0);
  const several = (ranges) => ranges.flatMap((range, i) => i ? ["\n", ...text(range)] : text(range));
  switch (block.kind) {
    case "code": return h("div", { class: "code" },
      h("div", { class: "code-head" }, h("span", { class: "soft small" }, block.language), copyButton(() => source.slice(...block.body), "Copy code")),
      h("pre", { tabindex: "0" }, h("code", {}, leaf(...block.body))));
    case "rule": return h("hr");
    case "heading": return h(`h${Math.min(block.level + 2, 6)}`, {}, text(block.body));
    case "quote": return h("blockquote", {}, several(block.lines.map((line) => [line.start + QUOTE.exec(line.text)[0].length, line.end])));
    case "list": return list(block.items, several);
    default: return h("p", {}, text([block.start, block.end]));
  }
}

function list(items, several) {
  const root = h("div", { class: "list" }), open = [];
  for (const item of items) {
    const ordered = !Number.isNaN(item.number);
    while (open.length && open.at(-1).indent > item.indent) open.pop();
    if (open.length && open.at(-1).indent === item.indent && open.at(-1).ordered !== ordered) open.pop();
    const here = open.at(-1);
    if (!here || (item.indent > here.indent + 1 && open.length < DEEPEST)) {
      const node = h(ordered ? "ol" : "ul", ordered ? { start: `${item.number}` } : {});
      (here?.node.lastChild ?? root).append(node);
      open.push({ indent: item.indent, ordered, node });
    }
    open.at(-1).node.append(h("li", {}, several(item.ranges)));
  }
  return root;
}

function inline(source, start, end, leaf, depth) {
  const nodes = [], known = new Map();
  let written = start;
  const inside = (from, to) => inline(source, from, to, leaf, depth + 1);
  for (let at = start; at < end;) {
    const found = depth < DEEPEST ? spanAt(source, at, start, end, known) : null;
    if (!found) { at++; continue; }
    if (at > written) nodes.push(...leaf(written, at));
    const [name, attributes, from, to] = found.node;
    const content = found.literal ? leaf(from, to) : inside(from, to);
    if (name) nodes.push(h(name, attributes, content));
    else nodes.push(...content);
    written = at = found.end;
  }
  if (end > written) nodes.push(...leaf(written, end));
  return nodes;
}

// What begins at a place: { node: [element, attributes, start, end of its text], end, literal } or null. Where the
// next mark of a kind is, is `known` once it was looked for: nothing is read again for every mark that stays open.
function spanAt(source, at, start, end, known) {
  const mark = source[at];
  const search = (what, from, fits = () => true) => {
    let found = known.get(what) ?? -1;
    if (found < from) {
      do found = source.indexOf(what, Math.max(found + 1, from));
      while (found >= 0 && found + what.length <= end && !fits(found));
      if (found < 0 || found + what.length > end) found = Infinity;
      known.set(what, found);
    }
    return found === Infinity ? -1 : found;
  };
  if (mark === "\\") return at + 1 < end && /[!-/:-@[-`{-~]/.test(source[at + 1]) ? { node: [null, {}, at + 1, at + 2], end: at + 2, literal: true } : null;
  if (mark === "`") return code(source, at, end, search);
  if (mark === "*" || mark === "_") return emphasis(source, at, start, end, search);
  if (mark === "[") {
    const close = search("](", at), stop = close < 0 ? -1 : search(")", close);
    const href = stop < 0 ? null : webAddress(source.slice(close + 2, stop));
    return href && { node: ["a", { href, rel: "noopener noreferrer", target: "_blank" }, at + 1, close], end: stop + 1 };
  }
  if (mark === "h" && (at === start || !/\w/.test(source[at - 1]))) {
    const found = /^https?:\/\/[^\s<>"'`()[\]]+/.exec(source.slice(at, Math.min(end, at + 2000)))?.[0].replace(/[.,;:!?*_]+$/, "");
    const href = found && webAddress(found);
    return href ? { node: ["a", { href, rel: "noopener noreferrer", target: "_blank" }, at, at + found.length], end: at + found.length, literal: true } : null;
  }
  return null;
}

function code(source, at, end, search) {
  let inner = at;
  while (inner < end && source[inner] === "`") inner++;
  const run = source.slice(at, inner);
  const close = search(run, inner, (found) => source[found - 1] !== "`" && source[found + run.length] !== "`");
  if (close < 0) return { node: [null, {}, at, inner], end: inner, literal: true };
  const padded = close - inner > 2 && source[inner] === " " && source[close - 1] === " ";
  return { node: ["code", {}, inner + (padded ? 1 : 0), close - (padded ? 1 : 0)], end: close + run.length, literal: true };
}

function emphasis(source, at, start, end, search) {
  const letter = source[at], double = source[at + 1] === letter, run = letter.repeat(double ? 2 : 1), from = at + run.length;
  const word = (place) => place >= start && place < end && /[\p{L}\p{N}]/u.test(source[place]);
  if (from >= end || /\s/.test(source[from]) || (letter === "_" && word(at - 1))) return null;
  let close = search(run, from + 1, (found) => !/\s/.test(source[found - 1]) && !(letter === "_" && word(found + run.length))
    && (double || (source[found - 1] !== letter && (found + 1 >= end || source[found + 1] !== letter))));
  if (close < 0) return null;
  while (double && close + 2 < end && source[close + 2] === letter) close++;
  return { node: [double ? "strong" : "em", {}, from, close], end: close + run.length };
}

// Only what leads to the web; everything else stays text.
function webAddress(text) {
  try {
    const url = new URL(text.length < 2000 && !/\s/.test(text) ? text : "");
    return ["http:", "https:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}
