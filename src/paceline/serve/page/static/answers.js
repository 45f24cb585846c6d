// One answer as it streams: asks the server, keeps time, fills a TokenText.

import { stream } from "./api.js";
import { TokenText } from "./tokens.js";

export class Answer {
  constructor(about, label) {
    this.about = about;
    this.text = new TokenText(label);
    this.content = "";
    this.summary = null;
    this.finish = null;
    this.error = null;
    this.abort = new AbortController();
    this.begun = this.first = this.last = null;
    this.onprogress = () => {};
  }

  // `messages` as chat has them; a model without a chat template continues the last one's text.
  async run(messages, fields) {
    const chat = this.about.chat;
    const body = {
      ...fields, stream: true, provenance: true,
      ...(chat ? { messages, logprobs: true, top_logprobs: 5 } : { prompt: messages.at(-1).content, logprobs: 5 }),
    };
    this.begun = performance.now();
    try {
      for await (const chunk of stream(chat ? "v1/chat/completions" : "v1/completions", body, this.abort.signal)) {
        const choice = chunk.choices?.[0];
        if (choice?.tokens?.length) {
          this.last = performance.now();
          this.first ??= this.last;
          this.text.push(choice.tokens);
        }
        this.content += choice?.delta?.content ?? choice?.text ?? "";
        if (choice?.finish_reason) this.finish = choice.paceline?.finish_reason ?? choice.finish_reason;
        if (chunk.paceline) this.summary = chunk.paceline;
        this.onprogress(this);
      }
    } catch (problem) {
      if (problem.name === "AbortError") this.finish = "stopped";
      else this.error = problem.message;
    }
    this.text.finish(this.content);
    this.onprogress(this);
  }

  stop() { this.abort.abort(); }

  // Tokens a second after the first, as they reached this page.
  get rate() {
    const spent = (this.last - this.first) / 1000;
    return this.text.length > 1 && spent > 0 ? (this.text.length - 1) / spent : null;
  }

  get firstToken() { return this.first === null ? null : (this.first - this.begun) / 1000; }
  get seconds() { return this.begun === null ? 0 : ((this.last ?? performance.now()) - this.begun) / 1000; }
}
