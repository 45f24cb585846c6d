// A text made of tokens, each in the colour of its origin. One stop for the Tab key; arrows walk inside.

import { h } from "./dom.js";
import { forget, ORIGINS, peek } from "./peek.js";

export class TokenText {
  constructor(label) {
    this.tokens = [];
    this.element = h("div", { class: "tokens", role: "group", "aria-label": label });
    this.spans = [];
    this.at = -1;
    this.waiting = [];
    this.asked = 0;
    const told = (event) => {
      const index = this.spans.indexOf(event.target);
      if (index >= 0) peek(event.target, this.tokens[Number(event.target.dataset.at)]);
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
    const fragment = document.createDocumentFragment();
    for (const token of this.waiting) {
      const at = this.tokens.push(token) - 1;
      if (token.text === "") continue;
      const span = h("span", { class: "tok", "data-origin": token.origin ?? "plain", "data-at": `${at}`, tabindex: this.spans.length ? "-1" : "0" }, token.text);
      this.spans.push(span);
      fragment.append(span);
    }
    this.waiting = [];
    this.element.append(fragment);
  }

  get length() { return this.tokens.length + this.waiting.length; }
  get ids() { return [...this.tokens, ...this.waiting].map((token) => token.id); }
  get text() { return [...this.tokens, ...this.waiting].map((token) => token.text).join(""); }

  // Half a character at the very end belongs to no token's text: show what the answer has beyond them.
  finish(content) {
    this.flush();
    const { text } = this;
    if (content.length > text.length && content.startsWith(text)) this.element.append(content.slice(text.length));
  }

  mark(at) {
    this.flush();
    this.spans.find((span) => Number(span.dataset.at) >= at)?.classList.add("differs");
  }

  walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    const here = this.spans.indexOf(document.activeElement);
    if (step === undefined || here < 0) return;
    event.preventDefault();
    const there = Math.min(Math.max(here + step, 0), this.spans.length - 1);
    this.spans[here].tabIndex = -1;
    this.spans[there].tabIndex = 0;
    this.spans[there].focus();
  }
}

export const legend = () => h("ul", { class: "legend", "aria-label": "Where a token came from" },
  Object.entries(ORIGINS).map(([origin, [name, meaning]]) =>
    h("li", { title: meaning }, h("span", { class: "swatch tok", "data-origin": origin, "aria-hidden": "true" }), name)));
