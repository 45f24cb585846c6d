// The engine as it runs: cache, queue, rates, latencies, luck of the drafts.

import { getJSON, watch } from "./api.js";
import { BlockMap } from "./blockmap.js";
import { acceptance, Spark } from "./charts.js";
import { h } from "./dom.js";
import { count, percent, rate, seconds, short, times } from "./format.js";

const SHOWN_SECONDS = 90;

class Tile {
  constructor(title, spark) {
    this.value = h("div", { class: "big num" }, "–");
    this.note = h("div", { class: "soft small num" });
    this.spark = spark ? new Spark(`${title}, the last ${SHOWN_SECONDS} seconds`) : null;
    this.element = h("div", { class: "tile card" }, h("h2", { class: "soft" }, title), this.value, this.note, this.spark?.element);
  }

  show(value, note) {
    this.value.textContent = value;
    this.note.textContent = note;
  }
}

export function live() {
  const tiles = { output: new Tile("Output tokens/s", true), prompt: new Tile("Prompt tokens/s", true), queue: new Tile("Requests"), ttft: new Tile("Time to first token"), tpot: new Tile("Time per token"), spec: new Tile("Drafts accepted") };
  const maps = h("div", { class: "maps" });
  const facts = h("p", { class: "soft small num" });
  const body = h("tbody");
  const grid = h("div", { class: "scroll", hidden: true }, h("table", {},
    h("thead", {}, h("tr", {}, ["Request", "Prompt", "State", "Prompt tokens", "Output", "Speculation", "Tokens a step", "Age"].map((title) => h("th", { scope: "col" }, title)))), body));
  const idle = h("p", { class: "soft" }, "Nothing runs.");
  const depths = h("div", { class: "methods" });
  const drift = h("div", { class: "findings" });
  const state = h("span", { class: "pulse", role: "status" }, "connecting …");
  const whole = [
    h("div", { class: "tiles" }, Object.values(tiles).map((tile) => tile.element)),
    h("section", { class: "card cache" }, h("h2", {}, "KV cache, block by block"), maps, facts),
    h("section", { class: "card luck" }, h("h2", {}, "Acceptance by position"), depths),
    h("section", { class: "card drift" }, h("h2", {}, "Drift watch"), drift)];
  const own = h("p", { class: "soft", hidden: true }, "Your own requests. What the engine does for all is shown to an operator's key.");
  const element = h("div", { class: "live" },
    h("div", { class: "row" }, h("h1", { class: "grow" }, "Live"), state),
    own, whole[0],
    h("div", { class: "watch" }, whole.slice(1), h("section", { class: "card queue" }, h("h2", {}, "Running and waiting"), grid, idle)));
  const pictures = new Map();
  const history = new Map();
  const rows = new Map();
  let naming = false;
  let watching = new AbortController();
  let left = false;
  let marked = null;

  function cache(frame) {
    for (const group of frame.cache.groups) {
      let picture = pictures.get(group.name);
      if (!picture) {
        picture = new BlockMap(group.name);
        pictures.set(group.name, picture);
        maps.append(h("figure", {}, frame.cache.groups.length > 1 && h("figcaption", { class: "small" }, group.name), picture.element));
      }
      picture.show(group, frame.cache.block_size);
    }
    const { totals } = frame;
    facts.textContent = [`blocks of ${frame.cache.block_size} tokens`, totals.cache_hit_rate !== null && `${percent(totals.cache_hit_rate)} of prompt tokens found in the cache`,
      `${count(totals.cache_evictions)} evictions`, `${count(totals.preemptions)} preemptions`].filter(Boolean).join(" · ");
  }

  function rates(frame) {
    for (const [second, tokens, prompt] of frame.seconds) history.set(second, [tokens, prompt]);
    const now = Math.floor(frame.clock);
    for (const second of history.keys()) if (second < now - SHOWN_SECONDS - 2) history.delete(second);
    const past = (which) => Array.from({ length: SHOWN_SECONDS }, (_, i) => history.get(now - SHOWN_SECONDS + i)?.[which] ?? 0);
    const mean = (values) => values.slice(-3).reduce((a, b) => a + b, 0) / 3;
    const out = past(0), prompt = past(1);
    tiles.output.show(rate(mean(out)), `${count(frame.totals.output_tokens)} since the start`);
    tiles.output.spark.show(out);
    tiles.prompt.show(rate(mean(prompt)), `${count(frame.totals.prefill_tokens)} computed`);
    tiles.prompt.spark.show(prompt);
  }

  function latencies(frame) {
    for (const name of ["ttft", "tpot"]) {
      const found = frame.latency[`${name}_s`];
      tiles[name].show(found ? seconds(found[0]) : "–", found ? `p90 ${seconds(found[1])} · p99 ${seconds(found[2])}`.replace(/(\d) /g, "$1\u00a0") : "nothing finished yet");
    }
    tiles.queue.show(`${frame.running_count}`, `running, ${frame.waiting_count} waiting`);
    const { drafted, accepted } = frame.totals;
    tiles.spec.show(drafted ? percent(accepted / drafted) : "–", drafted ? `${count(accepted)} of ${count(drafted)} tokens` : "no drafts yet");
  }

  function methods(frame) {
    const drawn = frame.speculation.filter((one) => one.acceptance_by_position.length);
    depths.replaceChildren(...(drawn.length ? drawn.map((one) => h("figure", { "data-method": one.method },
      h("figcaption", { class: "row small" }, h("b", { class: "grow" }, one.method), h("span", { class: "soft num" }, `${one.tokens_per_step.toFixed(2)} tokens a step${one.net_speed ? ` · ${times(one.net_speed)} plain, estimated` : ""}`)),
      acceptance(one.method, one.acceptance_by_position)))
      : [h("p", { class: "soft" }, "Nothing has been drafted yet. Ask something in the playground.")]));
  }

  // Speculation against plain decoding: what was compared, and what was found.
  function findings(frame) {
    const seen = frame.watch;
    if (!seen) { drift.replaceChildren(h("p", { class: "soft" }, "Nothing is watched (--watch-share).")); return; }
    const compared = (seen.shadows.equal ?? 0) + (seen.shadows.read ?? 0) + (seen.shadows.tie ?? 0) + (seen.shadows.different ?? 0);
    drift.replaceChildren(
      h("p", { class: "soft small num" }, `${count(seen.watched)} requests watched (${percent(seen.share)}) · ${count(compared)} shadows compared · ${count(seen.tokens)} tokens judged`),
      ...(seen.alarms.length ? seen.alarms.map((one) => h("p", { class: "alarm", role: "alert", "data-kind": one.kind }, h("b", {}, `${one.method}: ${one.kind}`), ` ${one.evidence}, ${seconds(one.age_s)} ago.`, one.suspended && " Switched off."))
        : [h("p", { class: "soft small" }, compared || seen.tokens ? "Speculation gives what plain decoding would." : "Nothing has been compared yet.")]),
      ...seen.changes.map((one) => h("p", { class: "change soft small", "data-direction": one.direction }, `${one.method}: acceptance changed. It ${one.direction} from ${percent(one.before)} to ${percent(one.after)} in the last ${count(one.requests)} requests, ${seconds(one.age_s)} ago. Other traffic alone does that: not an alarm.`)));
  }

  // Rows are kept from frame to frame: a focused link stays focused, a row that is pointed at stays marked.
  function queue(frame) {
    const seen = new Set();
    const order = [];
    for (const [status, list] of [["running", frame.running], ["waiting", frame.waiting]]) {
      for (const one of list) {
        const key = `${one.id}/${one.sample}`;
        if (!rows.has(key)) rows.set(key, new Row(one, mark));
        const row = rows.get(key);
        row.show(status, one);
        seen.add(key);
        order.push(row.element);
      }
    }
    for (const [key, row] of rows) if (!seen.has(key)) { row.element.remove(); rows.delete(key); }
    order.forEach((element, i) => { if (body.children[i] !== element) body.insertBefore(element, body.children[i] ?? null); });
    grid.hidden = !order.length;
    idle.hidden = Boolean(order.length);
    for (const picture of pictures.values()) picture.mark(marked === null ? [] : frame.running.find((one) => one.id === marked)?.blocks);
  }

  // Frames have no texts: what the new ones are about is asked for once, and at most once a second.
  async function name() {
    if (naming || left || [...rows.values()].every((row) => row.named)) return;
    naming = true;
    try {
      const prompts = new Map((await getJSON("paceline/requests")).requests.map((one) => [one.id, one.prompt]));
      for (const row of rows.values()) if (prompts.has(row.id)) row.name(prompts.get(row.id));
    } catch { /* the next frame asks again */ }
    setTimeout(() => { naming = false; }, 1000);
  }

  function mark(id) {
    marked = id;
    if (id === null) for (const picture of pictures.values()) picture.mark([]);
  }

  async function follow() {
    while (!left) {
      await inSight();
      watching = new AbortController();
      try {
        for await (const frame of watch("paceline/live", watching.signal)) {
          state.textContent = "live";
          state.dataset.on = "yes";
          const all = "totals" in frame;
          own.hidden = all;
          for (const part of whole) part.hidden = !all;
          if (all) for (const show of [cache, rates, latencies, methods, findings]) show(frame);
          queue(frame);
          name();
          element.dataset.frames = `${Number(element.dataset.frames ?? 0) + 1}`;
        }
      } catch (problem) {
        if (problem.name === "AbortError") continue;
        state.textContent = problem.message ?? "lost";
      }
      delete state.dataset.on;
      await new Promise((resolve) => setTimeout(resolve, 1500));
    }
  }

  const repaint = () => { for (const picture of pictures.values()) picture.draw(); };
  const hide = () => { if (document.hidden) watching.abort(); };
  addEventListener("repaint", repaint);
  document.addEventListener("visibilitychange", hide);
  follow();
  return { element, leave: () => { left = true; watching.abort(); removeEventListener("repaint", repaint); document.removeEventListener("visibilitychange", hide); for (const picture of pictures.values()) picture.close(); } };
}

// A tab that nobody sees asks for nothing.
async function inSight() {
  while (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

class Row {
  constructor(one, mark) {
    const link = h("a", { href: `#/requests/${encodeURIComponent(one.id)}`, title: one.id, onfocus: () => mark(one.id), onblur: () => mark(null) }, short(one.id), one.sample ? ` /${one.sample}` : "");
    this.id = one.id;
    this.named = false;
    this.piece = h("td", { class: "piece" });
    this.state = h("span", { class: "chip" });
    this.prompt = h("td", { class: "num" });
    this.output = h("span", { class: "num" });
    this.bar = h("i");
    this.method = h("td");
    this.step = h("td", { class: "num" });
    this.age = h("td", { class: "num" });
    this.element = h("tr", { "data-id": one.id, onpointerenter: () => mark(one.id), onpointerleave: () => mark(null) },
      h("td", {}, link), this.piece, h("td", {}, this.state), this.prompt,
      h("td", {}, this.output, h("span", { class: "soft num" }, ` of ${one.limit}`), h("span", { class: "meter" }, this.bar)), this.method, this.step, this.age);
  }

  name(text) {
    this.named = true;
    this.piece.textContent = text ?? "";
    this.piece.title = text ?? "";
  }

  show(status, one) {
    this.state.className = `chip ${status}`;
    this.state.textContent = status;
    this.prompt.textContent = one.cached ? `${one.prompt} (${one.cached} cached)` : `${one.prompt}`;
    this.output.textContent = `${one.output}`;
    this.bar.style.width = `${Math.min(100, one.output / one.limit * 100)}%`;
    this.method.textContent = one.method ?? "off";
    this.step.textContent = one.tokens_per_step ? one.tokens_per_step.toFixed(2) : "–";
    this.age.textContent = seconds(one.age_s);
  }
}
