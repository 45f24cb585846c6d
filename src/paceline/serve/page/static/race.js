// A race: the same prompt and seed with speculation off and on, one after the other, each alone; then both are shown side
// by side on one clock, with the proof that the texts are the same.

import { Answer } from "./answers.js";
import { getJSON } from "./api.js";
import { everyFrame, h } from "./dom.js";
import { rate, seconds, times, visible } from "./format.js";
import { formatted } from "./look.js";

const LONGEST_REPLAY = 8;
const NOTE = "One lane after the other, each by itself. A lane's clock starts at its own first step. Neither finds the prompt in the cache, nor anything to remember from earlier answers (suffix): every lane has a cache_salt of its own.";

const random = () => crypto.getRandomValues(new Uint32Array(2)).join("-");

export class Race {
  constructor(about, controls, prompt) {
    this.about = about;
    this.controls = controls;
    const wish = controls.speculation();
    this.wish = wish === null || wish === undefined ? about.speculation ?? "auto" : wish;
    this.method = controls.values.method && controls.values.method !== "off" ? controls.values.method : typeof this.wish === "string" ? this.wish : this.wish.method;
    this.lanes = [new Lane(about, "off", "Speculation off", "none"), new Lane(about, "on", `Speculation on: ${this.method}`, this.wish)];
    this.verdict = h("p", { class: "verdict", role: "status", "aria-live": "polite" });
    this.again = h("button", { type: "button", class: "small", hidden: true, onclick: () => this.replay() }, "Replay");
    this.pace = h("span", { class: "soft small num" });
    this.replaying = 0;
    this.stopped = false;
    addEventListener("look", () => { if (this.element.isConnected) for (const { answer } of this.lanes) answer.text.format(formatted()); });
    this.element = h("div", { class: "race" },
      h("div", { class: "said" }, prompt),
      this.verdict,
      h("div", { class: "row" }, this.again, this.pace),
      h("div", { class: "lanes" }, this.lanes.map((lane) => lane.element)),
      h("p", { class: "soft small" }, NOTE));
  }

  async run(messages) {
    const fields = this.controls.body(null);
    fields.seed ??= `${random().split("-")[0]}`;
    const most = fields.max_tokens ?? 256;
    for (const lane of this.lanes) {
      if (this.stopped) break;
      await lane.run(messages, { ...fields, cache_salt: `race ${random()}` }, most);
    }
    if (this.judge() && !matchMedia("(prefers-reduced-motion: reduce)").matches) this.replay();
    await this.mention();
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
    const gain = on.answer.speed / off.answer.speed;
    on.gain.textContent = `${times(gain)} plain`;
    off.gain.textContent = "plain";
    (gain >= 1 ? on : off).element.classList.add("first");
    if (at === a.length && at === b.length) {
      this.say("equal", `Equal: all ${a.length} tokens are the same, id by id. ${this.method} alone had ${times(gain)} the speed of plain decoding alone (${rate(on.answer.speed)} against ${rate(off.answer.speed)} tok/s).`);
    } else {
      off.answer.text.mark(at);
      on.answer.text.mark(at);
      const token = (lane) => visible(lane.answer.text.tokens[at]?.text ?? "the end");
      this.say("differs", `Different from token ${at + 1} on: off says “${token(off)}”, on says “${token(on)}”. Rules other than the coupled one, and numerics that are not deterministic, may differ.`);
    }
    return true;
  }

  // The lanes again, side by side, from the times of their tokens; a long race is shown in less time than it took.
  replay() {
    const longest = Math.max(...this.lanes.map((lane) => lane.answer.alone));
    const pace = Math.max(1, longest / LONGEST_REPLAY);
    const begun = performance.now();
    const turn = ++this.replaying;
    this.again.hidden = false;
    this.pace.textContent = pace > 1 ? `Replayed ${pace.toFixed(1)} times as fast as it was` : "Replayed as fast as it was";
    const draw = () => {
      if (turn !== this.replaying) return;
      const now = (performance.now() - begun) / 1000 * pace;
      for (const lane of this.lanes) lane.showAt(now);
      if (now < longest && this.element.isConnected) requestAnimationFrame(draw);
      else for (const lane of this.lanes) lane.showAt(Infinity);
    };
    draw();
  }

  // What the engine did for others meanwhile is in the speeds: where it did, that is said.
  async mention() {
    for (const lane of this.lanes) {
      const id = lane.answer.summary?.request_id;
      const story = id && await getJSON(`paceline/request?id=${encodeURIComponent(id)}`).catch(() => null);
      if (story?.events.some((event) => event.company > 1)) {
        this.element.append(h("p", { class: "note small company" }, "Other requests shared steps with a lane: what is shown are no solo speeds. Race again when the server is idle."));
        return;
      }
    }
  }

  say(kind, text) {
    this.verdict.dataset.verdict = kind;
    this.verdict.textContent = text;
    return false;
  }

  stop() {
    this.stopped = true;
    for (const lane of this.lanes) lane.answer.stop();
  }
}

class Lane {
  constructor(about, name, title, speculation) {
    this.speculation = speculation;
    this.answer = new Answer(about, `${title}, token by token`, formatted());
    this.speed = h("span", { class: "speed num" }, "–");
    this.gain = h("span", { class: "chip gain num" });
    this.facts = h("div", { class: "facts small soft num" }, "waits for its turn");
    this.bar = h("i");
    this.track = h("div", { class: "track", role: "progressbar", "aria-label": `${title}: progress`, "aria-valuemin": "0", "aria-valuemax": "100" }, this.bar);
    this.element = h("article", { class: `lane card ${name}`, "data-lane": name },
      h("div", { class: "row" }, h("h2", { class: "grow" }, title), this.gain, h("span", { class: "measured" }, this.speed, h("span", { class: "soft small" }, " tok/s"))),
      this.track, this.facts, this.answer.text.element);
  }

  async run(messages, fields, most) {
    const { answer } = this;
    this.element.dataset.running = "yes";
    answer.onprogress = everyFrame(() => {
      if (this.element.dataset.done) return;
      this.fill(answer.text.length / most);
      this.facts.textContent = `measuring … ${answer.text.length} tokens`;
    });
    await answer.run(messages, { ...fields, speculation: this.speculation });
    delete this.element.dataset.running;
    this.element.dataset.done = "yes";
    this.speed.textContent = rate(answer.speed);
    this.showAt(Infinity);
  }

  fill(share) {
    const done = Math.min(1, share);
    this.bar.style.width = `${done * 100}%`;
    this.track.setAttribute("aria-valuenow", `${Math.round(done * 100)}`);
  }

  // As it was so many seconds after its first step.
  showAt(time) {
    const { answer } = this, { offsets } = answer;
    let shown = 0;
    while (shown < offsets.length && offsets[shown] <= time) shown++;
    answer.text.reveal(shown);
    this.fill(shown / (offsets.length || 1));
    const speculation = answer.summary?.speculation;
    this.facts.textContent = [
      `${shown} tokens`, `${seconds(Math.min(time, answer.alone))} from the first step`,
      speculation && `${speculation.tokens_per_step.toFixed(2)} tokens a step`,
    ].filter(Boolean).join(" · ");
  }
}
