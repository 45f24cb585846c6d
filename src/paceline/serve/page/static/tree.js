// One draft tree: guesses from left to right, what stood filled, and the model's own token at the end of the path.

import { s } from "./dom.js";
import { visible } from "./format.js";

const ROW = 34, GAP = 26, LETTER = 7.3, PILL = 24;

export function drawTree(event, texts) {
  const { draft, tokens, origins } = event;
  const label = (id) => { const text = visible(texts[id] ?? `#${id}`); return text.length > 14 ? `${text.slice(0, 13)}…` : text; };
  const accepted = new Set(draft.path);
  const nodes = [{ text: "⋯", parent: null, kind: "root", title: "what is written already" },
    ...draft.tokens.map((id, i) => ({ text: label(id), parent: draft.parents[i] + 1, kind: accepted.has(i) ? "accepted" : "rejected",
      title: `${draft.sources?.[i] ?? draft.drafter}: ${accepted.has(i) ? "accepted" : "rejected"}` }))];
  if (tokens.length > draft.path.length) {
    const origin = origins.at(-1) ?? "plain";
    nodes.push({ text: label(tokens.at(-1)), parent: draft.path.length ? draft.path.at(-1) + 1 : 0, kind: origin, title: { bonus: "bonus: the model's own token", corrected: "correction: the model's own token" }[origin] ?? origin });
  }
  place(nodes);
  const width = Math.max(...nodes.map((node) => node.x + node.width)) + 8;
  const height = Math.max(...nodes.map((node) => node.y)) + PILL / 2 + 8;
  const onPath = (node) => ["accepted", "bonus", "corrected"].includes(node.kind);
  const edges = nodes.filter((node) => node.parent !== null).map((node) => {
    const from = nodes[node.parent], x = from.x + from.width, bend = (node.x - x) / 2;
    return s("path", { class: `edge ${onPath(node) ? `stood of-${node.kind}` : ""}`, d: `M${x},${from.y} C${x + bend},${from.y} ${node.x - bend},${node.y} ${node.x},${node.y}` });
  });
  const pills = nodes.map((node) => s("g", { class: `node ${node.kind} of-${node.kind}`, transform: `translate(${node.x},${node.y})` },
    s("title", {}, node.title),
    s("rect", { y: -PILL / 2, width: node.width, height: PILL, rx: 7 }),
    s("text", { x: node.width / 2, y: 4.5, "text-anchor": "middle" }, node.text)));
  return s("svg", { class: "tree", viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `A draft of ${draft.tokens.length} tokens; ${draft.path.length} stood: ${draft.path.map((node) => texts[draft.tokens[node]]).join("")}` }, edges, pills);
}

// Columns by depth, as wide as their widest pill; leaves a row each, parents in the middle of their children. The path
// that stood comes first among siblings.
function place(nodes) {
  const children = nodes.map(() => []);
  nodes.forEach((node, i) => {
    node.width = Math.max(26, node.text.length * LETTER + 16);
    node.depth = node.parent === null ? 0 : nodes[node.parent].depth + 1;
    if (node.parent !== null) children[node.parent].push(i);
  });
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  const lefts = [4];
  for (let depth = 1; depth < widths.length; depth++) lefts[depth] = lefts[depth - 1] + widths[depth - 1] + GAP;
  const rank = (i) => nodes[i].kind === "rejected" ? 1 : 0;
  let row = 0;
  const visit = (i) => {
    const below = children[i].sort((a, b) => rank(a) - rank(b) || a - b);
    below.forEach(visit);
    nodes[i].x = lefts[nodes[i].depth];
    nodes[i].y = below.length ? nodes[below[0]].y : row++ * ROW + PILL / 2 + 6;
  };
  visit(0);
}
