// A race: the same prompt and seed with speculation off and on, and the proof that the texts are the same.

import { Answer } from "./answers.js";
import { everyFrame, h } from "./dom.js";
import { rate, seconds, times, visible } from "./format.js";

export class Race {
  constructor(about, controls, prompt) {
    this.about = about;
    this.controls = controls;
    const wish = controls.speculation();
    this.wish = wish === null || wish === undefined ? about.speculation ?? "auto" : wish;
    this.method = controls.values.method && controls.values.method !== "off" ? controls.values.method : typeof this.wish === "string" ? this.wish : this.wish.method;
    this.lanes = [this.lane("off", "Speculation off", "none"), this.lane("on", `Speculation on: ${this.method}`, this.wish)];
    this.verdict = h("p", { class: "verdict", role: "status", "aria-live": "polite" });
    this.stopped = false;
    this.element = h("div", { class: "race" },
      h("div", { class: "said" }, prompt),
      this.verdict,
      h("div", { class: "lanes" }, this.lanes.map((lane) => lane.element)));
  }

  lane(name, title, speculation) {
    const answer = new Answer(this.about, `${title}, token by token`);
    const speed = h("span", { class: "speed num" }, "–");
    const facts = h("div", { class: "facts small soft num" });
    const bar = h("i");
    const track = h("div", { class: "track", role: "progressbar", "aria-label": `${title}: progress`, "aria-valuemin": "0", "aria-valuemax": "100" }, bar);
    const element = h("article", { class: `lane card ${name}`, "data-lane": name },
      h("div", { class: "row" }, h("h2", { class: "grow" }, title), speed, h("span", { class: "soft small" }, "tok/s")),
      track, facts, answer.text.element);
    return { name, answer, speed, facts, bar, track, element, speculation };
  }

  // Both at once in one batch: every step of the engine serves both lanes.
  async run(messages) {
    const fields = this.controls.body(null);
    fields.seed ??= `${crypto.getRandomValues(new Uint32Array(1))[0]}`;
    const most = fields.max_tokens ?? 256;
    await Promise.all(this.lanes.map(async (lane) => {
      lane.answer.onprogress = everyFrame(() => { if (!lane.element.dataset.done) this.draw(lane, most); });
      await lane.answer.run(messages, { ...fields, speculation: lane.speculation });
      lane.element.dataset.done = "yes";
      this.draw(lane, lane.answer.text.length || 1);
      if (!this.winner && !this.stopped && !lane.answer.error) { this.winner = lane; lane.element.classList.add("first"); }
    }));
    this.judge();
  }

  draw(lane, most) {
    const { answer } = lane;
    const done = Math.min(1, answer.text.length / most);
    lane.bar.style.width = `${done * 100}%`;
    lane.track.setAttribute("aria-valuenow", `${Math.round(done * 100)}`);
    lane.speed.textContent = rate(answer.rate);
    const speculation = answer.summary?.speculation;
    lane.facts.textContent = [
      `${answer.text.length} tokens`, answer.last && `in ${seconds(answer.seconds)}`,
      speculation && `${speculation.tokens_per_step.toFixed(2)} tokens a step`,
    ].filter(Boolean).join(" · ");
  }

  // Equal means: the same token ids, to the last one.
  judge() {
    const [off, on] = this.lanes;
    const failed = this.lanes.find((lane) => lane.answer.error);
    if (failed) return this.say("broken", failed.answer.error);
    const a = off.answer.text.ids, b = on.answer.text.ids;
    const shared = Math.min(a.length, b.length);
    let at = 0;
    while (at < shared && a[at] === b[at]) at++;
    if (this.stopped) return this.say(at === shared ? "stopped" : "differs", `Stopped. The first ${at} tokens of both are ${at === shared ? "the same" : "the same, then they part"}.`);
    if (at === a.length && at === b.length) {
      const gain = off.answer.seconds / on.answer.seconds;
      const order = gain >= 1 ? `${times(gain)} as fast` : `${times(1 / gain)} as slow`;
      return this.say("equal", `Equal: all ${a.length} tokens are the same, id by id. ${this.method} was ${order} (${seconds(on.answer.seconds)} against ${seconds(off.answer.seconds)}).`);
    }
    off.answer.text.mark(at);
    on.answer.text.mark(at);
    const token = (lane) => visible(lane.answer.text.tokens[at]?.text ?? "the end");
    return this.say("differs", `Different from token ${at + 1} on: off says “${token(off)}”, on says “${token(on)}”. Rules other than the coupled one, and numerics that are not deterministic, may differ.`);
  }

  say(kind, text) {
    this.verdict.dataset.verdict = kind;
    this.verdict.textContent = text;
  }

  stop() {
    this.stopped = true;
    for (const lane of this.lanes) lane.answer.stop();
  }
}
