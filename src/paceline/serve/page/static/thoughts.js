// What a reasoning model wrote before its answer: folded, and token by token like the answer.

import { h } from "./dom.js";
import { TokenText } from "./tokens.js";

export class Thoughts {
  constructor() {
    this.text = new TokenText("Thoughts, token by token");
    this.summary = h("summary", { class: "soft small num" });
    this.element = h("details", { class: "thoughts", hidden: true }, this.summary);
  }

  // `over`: the answer has begun, or there will be none.
  push(tokens, over) {
    if (!tokens.length && this.element.hidden) return;
    if (this.element.hidden) this.element.append(this.text.element);
    this.element.hidden = false;
    this.text.push(tokens);
    if (over) this.text.flush();
    this.summary.textContent = `${over ? "Thoughts" : "Thinking …"} ${this.text.length} tokens`;
  }
}

// Which of these tokens are the first of `content`, by their texts; those before them closed the thoughts.
export function beginning(tokens, content) {
  const start = tokens.map((token) => token.text).join("").lastIndexOf(content);
  let at = 0;
  for (let end = 0; at < tokens.length && (end += tokens[at].text.length) <= start;) at++;
  return start < 0 ? 0 : at;
}
