// One answer as it streams: asks the server, keeps time, fills a TokenText.

import { stream } from "./api.js";
import { beginning } from "./thoughts.js";
import { TokenText } from "./tokens.js";

export class Answer {
  // `thoughts`: where those of a reasoning model go; else they are part of the text.
  constructor(about, label, formatted = false, thoughts = null) {
    this.about = about;
    this.text = new TokenText(label, formatted);
    this.thoughts = thoughts;
    this.thought = false;
    this.held = [];
    this.content = "";
    this.summary = null;
    this.finish = null;
    this.error = null;
    this.abort = new AbortController();
    this.begun = this.first = this.last = null;
    this.arrivals = [];
    this.onprogress = () => {};
  }

  // `messages` as chat has them; a model without a chat template continues the last one's text, and so does any if asked to.
  async run(messages, fields, complete = false) {
    const chat = this.about.chat && !complete;
    const body = {
      ...fields, stream: true, provenance: true, ...(this.about.models.length > 1 ? { model: this.about.model } : {}),
      ...(chat ? { messages, logprobs: true, top_logprobs: 5 } : { prompt: messages.at(-1).content, logprobs: 5 }),
    };
    this.begun = performance.now();
    try {
      for await (const chunk of stream(chat ? "v1/chat/completions" : "v1/completions", body, this.abort.signal)) {
        const choice = chunk.choices?.[0];
        if (choice?.tokens?.length) {
          this.last = performance.now();
          this.first ??= this.last;
          this.held.push(...choice.tokens);
          for (const _ of choice.tokens) this.arrivals.push(this.last);
        }
        this.content += choice?.delta?.content ?? choice?.text ?? "";
        this.sort(choice?.delta ?? {}, chat);
        if (choice?.finish_reason) this.finish = choice.paceline?.finish_reason ?? choice.finish_reason;
        if (chunk.paceline) this.summary = chunk.paceline;
        this.onprogress(this);
      }
    } catch (problem) {
      if (problem.name === "AbortError") this.finish = "stopped";
      else this.error = problem.message;
    }
    this.thoughts?.push([], true);
    this.text.push(this.held.splice(0));
    this.text.finish(this.content);
    this.onprogress(this);
  }

  // To which text the newest tokens belong. Those of which nothing was said yet (a mark between the two) wait for what comes.
  sort(delta, chat) {
    if (!this.thoughts || !chat) this.text.push(this.held.splice(0));
    else if (delta.reasoning_content) {
      this.thought = true;
      this.thoughts.push(this.held.splice(0), false);
    } else if (this.content && this.held.length) {
      if (this.thought && !this.text.length) this.thoughts.push(this.held.splice(0, beginning(this.held, this.content)), true);
      this.text.push(this.held.splice(0));
    }
  }

  stop() { this.abort.abort(); }

  // Tokens that came, thoughts and all.
  get length() { return this.arrivals.length; }

  // Tokens a second after the first, as they reached this page.
  get rate() {
    const spent = (this.last - this.first) / 1000;
    return this.length > 1 && spent > 0 ? (this.length - 1) / spent : null;
  }

  get firstToken() { return this.first === null ? null : (this.first - this.begun) / 1000; }

  // Seconds from its first step to its last token, on the engine's clock; without that (it was stopped), on this page's.
  get alone() {
    const metrics = this.summary?.metrics;
    if (typeof metrics?.ttft_s !== "number") return this.last === null ? 0 : (this.last - this.begun) / 1000;
    return metrics.ttft_s - (metrics.queue_time_s ?? 0) + (metrics.tpot_s ?? 0) * (this.length - 1);
  }

  // Tokens a second over that time, the prompt included.
  get speed() { return this.alone > 0 ? this.length / this.alone : null; }

  // When each token came, in seconds since the first step: as they reached the page, the last one as the engine has it.
  get offsets() {
    const { alone } = this;
    return this.arrivals.map((time) => Math.max(0, alone - (this.last - time) / 1000));
  }
}
