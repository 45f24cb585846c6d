// The KV cache as a picture: one cell per block, in the colour of what it is.

import { colour, everyFrame, h } from "./dom.js";
import { count } from "./format.js";

export const STATES = [["free", "Free"], ["used", "In use"], ["shared", "Shared"], ["cached", "Cached"]];

// Two bits a block, the first in the lowest bits of the first byte.
export function unpack(map, blocks) {
  const bytes = Uint8Array.from(atob(map), (letter) => letter.charCodeAt(0));
  const states = new Uint8Array(blocks);
  for (let i = 0; i < blocks; i++) states[i] = bytes[i >> 2] >> ((i & 3) * 2) & 3;
  return states;
}

const FEWEST = 64;

// How many blocks are worth drawing: up to the last one that is not free, in powers of two, so that the picture does not
// jump with each of them.
export function extent(states) {
  let last = states.length;
  while (last > 0 && states[last - 1] === 0) last--;
  let shown = FEWEST;
  while (shown < last) shown *= 2;
  return Math.min(shown, states.length);
}

export class BlockMap {
  constructor(name) {
    this.name = name;
    this.states = new Uint8Array(0);
    this.changed = new Float64Array(0);
    this.map = "";
    this.marked = [];
    this.canvas = h("canvas", { role: "img", class: "blocks" });
    this.counts = h("ul", { class: "legend num" });
    this.whole = h("input", { type: "checkbox", onchange: () => this.draw() });
    this.rest = h("p", { class: "soft small num rest", hidden: true }, h("span"), h("label", { class: "switch" }, this.whole, "All blocks"));
    this.element = h("div", { class: "blockmap" }, this.counts, this.canvas, this.rest);
    this.draw = everyFrame(() => this.paint());
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.element);
  }

  show(group, blockSize) {
    this.canvas.setAttribute("aria-label", `${count(group.blocks)} blocks of ${blockSize} tokens: ${group.free} free, ${group.used} in use, ${group.shared} shared, ${group.cached} cached`);
    this.counts.replaceChildren(...STATES.map(([state, label]) => {
      const swatch = h("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.setProperty("--of", `var(--block-${state})`);
      return h("li", { "data-state": state }, swatch, label, h("b", {}, count(group[state])));
    }));
    if (group.map === this.map && group.blocks === this.states.length) return;
    const before = this.states, states = unpack(group.map, group.blocks), now = performance.now();
    if (this.changed.length !== states.length) this.changed = new Float64Array(states.length);
    else for (let i = 0; i < states.length; i++) if (states[i] !== before[i]) this.changed[i] = now;
    this.states = states;
    this.map = group.map;
    this.canvas.dataset.map = group.map;
    this.draw();
  }

  // Outline the blocks of one request: first, length, first, length, ...
  mark(runs) {
    this.marked = runs ?? [];
    this.draw();
  }

  paint() {
    const width = this.element.clientWidth, all = this.states.length, used = extent(this.states);
    if (!width || !all) return;
    const blocks = this.whole.checked ? all : used;
    this.rest.hidden = used === all;
    this.rest.firstChild.textContent = blocks < all ? `The first ${count(blocks)} of ${count(all)} blocks; the rest is free.` : `All ${count(all)} blocks.`;
    this.canvas.dataset.shown = `${blocks}`;
    const cell = Math.max(3, Math.min(16, Math.floor(Math.sqrt(width * 260 / blocks))));
    const columns = Math.floor(width / cell), rows = Math.ceil(blocks / columns), gap = cell > 5 ? 1.5 : cell > 3 ? 1 : 0.5;
    const scale = devicePixelRatio || 1, height = rows * cell;
    const { canvas } = this;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const box = (i) => [i % columns * cell, Math.floor(i / columns) * cell];
    const size = cell - gap, round = cell > 8 ? 2.5 : cell > 5 ? 1.5 : 0;
    STATES.forEach(([state], value) => {
      context.fillStyle = colour(`--block-${state}`);
      context.beginPath();
      for (let i = 0; i < blocks; i++) {
        if (this.states[i] !== value) continue;
        const [x, y] = box(i);
        if (round) context.roundRect(x, y, size, size, round);
        else context.rect(x, y, size, size);
      }
      context.fill();
    });
    // What has just changed glows for a moment.
    const now = performance.now();
    let glowing = false;
    context.fillStyle = colour("--ink");
    for (let i = 0; i < blocks; i++) {
      const age = (now - this.changed[i]) / 600;
      if (!this.changed[i] || age >= 1) continue;
      glowing = true;
      context.globalAlpha = 0.28 * (1 - age);
      const [x, y] = box(i);
      context.fillRect(x, y, size, size);
    }
    context.globalAlpha = 1;
    context.strokeStyle = colour("--mark");
    context.lineWidth = cell > 8 ? 2 : 1;
    for (let at = 0; at < this.marked.length; at += 2) {
      for (let i = this.marked[at]; i < this.marked[at] + this.marked[at + 1]; i++) {
        const [x, y] = box(i);
        context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
      }
    }
    if (glowing && this.element.isConnected) this.draw();
  }

  close() { this.observer.disconnect(); }
}
