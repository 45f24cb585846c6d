// How to sample and how to speculate: kept between visits, sent with every request.

import { fresh, h } from "./dom.js";

// What a drafter remembers beyond the request it drafts for; said where it is chosen, because it makes a second try faster.
const SUFFIX = "suffix remembers: prompts and answers of earlier requests with the same key, in memory, the newest 200,000 tokens or so. What was asked before is drafted sooner. A race leaves that out.";

const STORE = "paceline-controls";
const DEFAULTS = {
  system: "", method: "", depth: "", temperature: 0.3, top_p: 0.95, top_k: 0, min_p: 0, repetition_penalty: 1,
  presence_penalty: 0, frequency_penalty: 0, max_tokens: 256, seed: "", trace: true,
};

function load() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(STORE) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

export class Controls {
  constructor(about) {
    this.values = load();
    this.about = about;
    if (!["", "off", ...Object.keys(about.methods)].includes(this.values.method)) this.values.method = "";
    this.element = h("aside", { class: "controls card", "aria-label": "Controls" });
    this.build();
  }

  build() {
    const fallback = this.about.speculation ?? "off";
    this.remembers = h("p", { class: "soft small remembers" }, SUFFIX);
    this.element.replaceChildren(
      h("details", { open: true, class: "sheet" },
        h("summary", {}, "Controls"),
        this.choice("method", "Speculation", [["", `Server's choice (${fallback})`], ["off", "Off: plain decoding"], ...Object.keys(this.about.methods).map((name) => [name, name])]),
        this.remembers,
        this.number("depth", "Draft depth", { min: 1, max: 64, placeholder: "as it pays" }),
        this.slider("temperature", "Temperature", 0, 2, 0.05),
        this.slider("top_p", "Top-p", 0.05, 1, 0.01),
        this.slider("min_p", "Min-p", 0, 0.5, 0.01),
        h("div", { class: "pair" },
          this.number("top_k", "Top-k", { min: 0, placeholder: "0: all" }),
          this.number("max_tokens", "Max tokens", { min: 1, max: this.about.max_model_len })),
        this.number("seed", "Seed", { min: 0, placeholder: "a new one each time" }),
        h("details", { class: "more" },
          h("summary", {}, "Penalties, system prompt, trace"),
          this.slider("repetition_penalty", "Repetition penalty", 0.8, 1.6, 0.01),
          this.slider("presence_penalty", "Presence penalty", -2, 2, 0.05),
          this.slider("frequency_penalty", "Frequency penalty", -2, 2, 0.05),
          this.area("system", "System prompt"),
          this.check("trace", "Record a trace to replay")),
        h("button", { type: "button", class: "quiet small reset", onclick: () => { this.values = { ...DEFAULTS }; this.keep(); this.build(); } }, "Back to the defaults")));
    this.mention();
    if (matchMedia("(max-width: 900px)").matches) this.element.firstChild.open = false;
  }

  keep() { localStorage.setItem(STORE, JSON.stringify(this.values)); }

  set(name, value) { this.values[name] = value; this.keep(); this.mention(); }

  mention() { this.remembers.hidden = !/suffix|auto/.test(this.values.method || this.about.speculation || ""); }

  slider(name, label, min, max, step) {
    const id = fresh(name);
    const digits = String(step).split(".")[1]?.length ?? 0;
    const shown = h("output", { class: "num", for: id }, Number(this.values[name]).toFixed(digits));
    const input = h("input", { type: "range", id, name, min: `${min}`, max: `${max}`, step: `${step}`, value: `${this.values[name]}`,
      oninput: () => { this.set(name, Number(input.value)); shown.textContent = Number(input.value).toFixed(digits); } });
    return h("div", { class: "field" }, h("div", { class: "label" }, h("label", { for: id }, label), shown), input);
  }

  number(name, label, attributes) {
    const id = fresh(name);
    const input = h("input", { type: "text", inputmode: "numeric", pattern: "[0-9]*", id, name, autocomplete: "off", placeholder: attributes.placeholder,
      value: `${this.values[name]}`, oninput: () => this.set(name, input.value.trim()) });
    return h("div", { class: "field" }, h("label", { for: id }, label), input);
  }

  choice(name, label, options) {
    const id = fresh(name);
    const select = h("select", { id, name, onchange: () => this.set(name, select.value) },
      options.map(([value, text]) => h("option", { value, selected: value === this.values[name] }, text)));
    return h("div", { class: "field" }, h("label", { for: id }, label), select);
  }

  area(name, label) {
    const id = fresh(name);
    const area = h("textarea", { id, name, rows: "3", oninput: () => this.set(name, area.value) }, this.values[name]);
    return h("div", { class: "field" }, h("label", { for: id }, label), area);
  }

  check(name, label) {
    const box = h("input", { type: "checkbox", name, checked: this.values[name], onchange: () => this.set(name, box.checked) });
    return h("label", { class: "field check" }, box, label);
  }

  // The fields of a request that these controls decide. `speculation` overrides the method: null is off.
  body(speculation) {
    const v = this.values;
    const whole = (text) => /^\d+$/.test(`${text}`) ? Number(text) : undefined;
    const body = {
      temperature: v.temperature, top_p: v.top_p, min_p: v.min_p, top_k: whole(v.top_k), max_tokens: whole(v.max_tokens),
      repetition_penalty: v.repetition_penalty, presence_penalty: v.presence_penalty, frequency_penalty: v.frequency_penalty,
      seed: /^\d+$/.test(v.seed) ? v.seed : undefined, trace: v.trace,
    };
    const wish = speculation === undefined ? this.speculation() : speculation;
    if (wish !== undefined) body.speculation = wish ?? "none";
    return body;
  }

  // undefined: the server's choice; null: off.
  speculation() {
    const { method, depth } = this.values;
    if (method === "off") return null;
    const k = /^\d+$/.test(depth) ? Number(depth) : undefined;
    const wish = method ? this.about.methods[method] : this.about.speculation ?? undefined;
    if (k === undefined) return method ? wish : undefined;
    return wish === undefined ? undefined : { ...(typeof wish === "string" ? { method: wish } : wish), k, adaptive: false };
  }
}
