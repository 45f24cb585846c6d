// A request's life from arrival to end: waiting, prompt chunks, steps, lost seats. Bars as high as the tokens they gave.

import { h, s } from "./dom.js";
import { seconds } from "./format.js";

const HEIGHT = 120, LANE = 26, TOP = 8;

// The stretches in which the request waited: before its first event, and after each loss of its seat.
function waits(events, end) {
  const found = [];
  let since = 0;
  for (const event of events) {
    if (event.kind === "preempted") since = event.begun;
    else if (since !== null) { found.push([since, event.begun]); since = null; }
  }
  if (since !== null) found.push([since, end]);
  return found;
}

export function drawTimeline(events, story, choose) {
  const end = Math.max(story.duration_s, events.at(-1)?.ended ?? 0, 1e-6);
  const most = Math.max(...events.map((event) => event.tokens.length), 4);
  const x = (time) => time / end * 1000;
  const wide = (from, to) => Math.max(x(to) - x(from), 1.2);
  const base = TOP + HEIGHT;
  const bars = new Map();
  const shapes = [];
  for (const [from, to] of waits(events, end)) {
    if (to > from) shapes.push(s("rect", { class: "t-wait", x: x(from), y: base + 6, width: wide(from, to), height: LANE, rx: 2 }, s("title", {}, `waited ${seconds(to - from)}`)));
  }
  for (const event of events) {
    if (event.kind === "preempted") {
      shapes.push(s("path", { class: "t-preempted", d: `M${x(event.begun)},${TOP} V${base + 6 + LANE}` }, s("title", {}, "preempted: lost its blocks, to be computed again")));
      continue;
    }
    const took = `${seconds(event.ended - event.begun)}, with ${event.company - 1} other${event.company === 2 ? "" : "s"}`;
    if (event.kind === "prefill") {
      shapes.push(s("rect", { class: "t-prefill", x: x(event.begun), y: base + 6, width: wide(event.begun, event.ended), height: LANE, rx: 2 }, s("title", {}, `prompt tokens ${event.start + 1} to ${event.start + event.rows}, ${took}`)));
    }
    if (!event.tokens.length) continue;
    const height = HEIGHT * event.tokens.length / most;
    const bar = s("g", { class: `t-step${event.draft ? " drafted" : ""}` },
      s("title", {}, `${event.tokens.length} token${event.tokens.length > 1 ? "s" : ""}${event.draft ? `, ${event.draft.path.length} of ${event.draft.tokens.length} drafted stood` : ""}, ${took}`));
    let y = base;
    const unit = height / event.tokens.length;
    event.tokens.forEach((_, i) => {
      y -= unit;
      bar.append(s("rect", { class: `t-token of-${event.origins[i] ?? "plain"}`, x: x(event.begun), y: y + 0.5, width: Math.max(wide(event.begun, event.ended) - 0.6, 1), height: Math.max(unit - 1, 1) }));
    });
    if (event.draft) bar.addEventListener("click", () => choose(event));
    bars.set(event, bar);
    shapes.push(bar);
  }
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => h("span", { class: "num" }, seconds(part * end)));
  const drafted = events.filter((event) => event.draft);
  const label = `From arrival to end in ${seconds(end)}: ${events.filter((event) => event.kind === "prefill").length} prompt chunks, ${events.filter((event) => event.kind === "decode").length} steps, ${drafted.length} of them drafted, ${events.filter((event) => event.kind === "preempted").length} preemptions`;
  const svg = s("svg", { class: "timeline", viewBox: `0 0 1000 ${base + LANE + 10}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, shapes);
  let selected = null;
  return {
    element: h("div", { class: "timeline-box" }, svg, h("div", { class: "ticks soft small", "aria-hidden": "true" }, ticks),
      h("ul", { class: "legend" }, [["wait", "Waiting"], ["prefill", "Prompt chunk"], ["preempted", "Preempted"]].map(([kind, name]) => h("li", {}, h("span", { class: `swatch t-swatch-${kind}`, "aria-hidden": "true" }), name)),
        h("li", {}, `Bars above: the tokens of each step, by origin`))),
    select(event) {
      selected?.classList.remove("chosen");
      selected = bars.get(event);
      selected?.classList.add("chosen");
    },
  };
}
