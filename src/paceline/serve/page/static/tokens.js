// A text made of tokens, each in the colour of its origin. One stop for the Tab key; arrows walk inside.

import { h } from "./dom.js";
import { coloursSwitch } from "./look.js";
import { draw, parse } from "./markdown.js";
import { forget, ORIGINS, peek } from "./peek.js";

export class TokenText {
  // `formatted`: its Markdown is drawn; else every character is shown as it was written.
  constructor(label, formatted = false) {
    this.tokens = [];
    this.ends = [];
    this.source = "";
    this.formatted = formatted;
    this.blocks = [];
    this.drawn = 0;
    this.waiting = [];
    this.asked = 0;
    this.element = h("div", { class: "tokens", role: "group", "aria-label": label });
    this.element.classList.toggle("formatted", formatted);
    const told = (event) => {
      const span = event.target.closest(".tok");
      if (span) peek(span, this.tokens[Number(span.dataset.at)]);
    };
    this.element.addEventListener("pointerover", told);
    this.element.addEventListener("focusin", told);
    this.element.addEventListener("pointerout", forget);
    this.element.addEventListener("focusout", forget);
    this.element.addEventListener("keydown", (event) => this.walk(event));
  }

  // Tokens come faster than frames: they are collected and drawn once per frame.
  push(tokens) {
    this.waiting.push(...tokens);
    this.asked ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.asked);
    this.asked = 0;
    for (const token of this.waiting) {
      this.source += token.text;
      this.tokens.push(token);
      this.ends.push(this.source.length);
    }
    this.waiting = [];
    this.draw();
  }

  draw() {
    if (this.formatted) this.drawBlocks();
    else this.element.append(...this.pieces(this.drawn, this.source.length));
    this.drawn = this.source.length;
    if (!this.element.querySelector(".tok[tabindex='0']")) this.element.querySelector(".tok")?.setAttribute("tabindex", "0");
  }

  // A text only grows: blocks that are where they were stay as they are, the others are drawn anew.
  drawBlocks() {
    const blocks = parse(this.source);
    let same = 0;
    const stays = (block, before) => before && block.kind === before.kind && block.start === before.start && block.end === before.end;
    while (same < blocks.length && stays(blocks[same], this.blocks[same])) same++;
    while (this.element.children.length > same) this.element.lastChild.remove();
    this.element.append(...blocks.slice(same).map((block) => draw(block, this.source, (start, end) => this.pieces(start, end))));
    this.blocks = blocks;
  }

  format(formatted) {
    this.formatted = formatted;
    this.element.classList.toggle("formatted", formatted);
    this.element.replaceChildren();
    this.blocks = [];
    this.drawn = 0;
    this.flush();
  }

  // A stretch of the text as the tokens it is of; what no token has said is text alone.
  pieces(start, end) {
    let at = 0;
    for (let high = this.ends.length; at < high;) {
      const middle = (at + high) >> 1;
      if (this.ends[middle] > start) high = middle;
      else at = middle + 1;
    }
    const nodes = [];
    for (; start < end; at++) {
      const stop = at < this.ends.length ? Math.min(end, this.ends[at]) : end;
      if (stop === start) continue;
      const text = this.source.slice(start, stop);
      nodes.push(at < this.ends.length ? h("span", { class: "tok", "data-origin": this.tokens[at].origin ?? "plain", "data-at": `${at}`, tabindex: "-1" }, text) : text);
      start = stop;
    }
    return nodes;
  }

  get spans() { return [...this.element.querySelectorAll(".tok")]; }
  get length() { return this.tokens.length + this.waiting.length; }
  get ids() { return [...this.tokens, ...this.waiting].map((token) => token.id); }

  // Half a character at the very end belongs to no token's text: show what the answer has beyond them.
  finish(content) {
    this.flush();
    if (content.length > this.source.length && content.startsWith(this.source)) this.source = content;
    this.draw();
  }

  mark(at) {
    this.flush();
    this.spans.find((span) => Number(span.dataset.at) >= at)?.classList.add("differs");
  }

  // Show the first so many tokens alone.
  reveal(count) {
    for (const span of this.spans) span.hidden = Number(span.dataset.at) >= count;
  }

  walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    const { spans } = this;
    const here = spans.indexOf(document.activeElement);
    if (step === undefined || here < 0) return;
    event.preventDefault();
    const there = Math.min(Math.max(here + step, 0), spans.length - 1);
    spans[here].tabIndex = -1;
    spans[there].tabIndex = 0;
    spans[there].focus();
  }
}

export const legend = () => h("div", { class: "origins row" },
  h("ul", { class: "legend", "aria-label": "Where a token came from" },
    Object.entries(ORIGINS).map(([origin, [name, meaning]]) =>
      h("li", { title: meaning }, h("span", { class: "swatch tok", "data-origin": origin, "aria-hidden": "true" }), name))),
  coloursSwitch());
