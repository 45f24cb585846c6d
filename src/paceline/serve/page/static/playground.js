// The playground: a chat, or a race of the same request with speculation off and on.

import { Answer } from "./answers.js";
import { Controls } from "./controls.js";
import { everyFrame, h } from "./dom.js";
import { percent, rate, seconds } from "./format.js";
import { Race } from "./race.js";
import { legend } from "./tokens.js";

const STARTERS = [
  ["Write code that repeats itself", "Write a Python class Stack with push, pop, peek and is_empty methods, each with a docstring."],
  ["Correct a paragraph", "Correct the spelling and return the whole text: A paceline is a line of riders who draft behind one anoter and take turns at the front. The rider at the front brakes the wind for the others. After a while he moves to the side and the next rider takes the front."],
  ["Explain something", "Why is the sky blue? Answer in three sentences."],
  ["Make something up", "Tell a short story about two cyclists who share one map."],
];

// What was said stays while somebody looks at the other views.
const kept = { messages: [], nodes: [], mode: "chat", race: null, busy: null };

export function playground(about) {
  const controls = new Controls(about);
  const log = h("div", { class: "log" });
  const status = h("p", { class: "visually-hidden", role: "status" });
  const field = h("textarea", { id: "prompt", rows: "1", placeholder: "Say something", "aria-label": "Your message", enterkeyhint: "send" });
  const send = h("button", { class: "primary", type: "submit" }, "Send");
  const modes = h("div", { class: "segments", role: "group", "aria-label": "Mode" },
    ["chat", "race"].map((mode) => h("button", { type: "button", "data-mode": mode, onclick: () => show(mode) }, { chat: "Chat", race: "Race" }[mode])));
  const clear = h("button", { type: "button", class: "quiet small", onclick: () => { kept.busy?.stop(); kept.messages = []; kept.nodes = []; kept.race = null; show(kept.mode); field.focus(); } }, "Clear");
  const form = h("form", { class: "composer card", onsubmit: submit }, field, send);
  const element = h("div", { class: "playground" },
    h("section", { class: "talk", "aria-label": "Playground" },
      h("div", { class: "row talk-head" }, modes, h("span", { class: "grow" }), legend(), clear),
      log, form, status),
    controls.element);

  field.addEventListener("input", grow);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  });

  function grow() {
    field.style.height = "auto";
    field.style.height = `${Math.min(field.scrollHeight + 2, 220)}px`;
  }

  function show(mode) {
    kept.mode = mode;
    for (const button of modes.children) button.setAttribute("aria-pressed", `${button.dataset.mode === mode}`);
    send.textContent = kept.busy ? "Stop" : mode === "race" ? "Race" : "Send";
    field.placeholder = mode === "race" ? "A prompt for both lanes" : "Say something";
    const shown = mode === "race" ? (kept.race ? [kept.race.element] : []) : kept.nodes;
    log.replaceChildren(...(shown.length ? shown : [welcome(mode)]));
  }

  function welcome(mode) {
    return h("div", { class: "welcome" },
      h("h1", {}, mode === "race" ? "The same text, sooner" : "Each token shows where it came from"),
      h("p", { class: "soft" }, mode === "race"
        ? "One prompt, one seed, two lanes: speculation off and on. The faster lane may not change a single token, and the page checks that."
        : "Drafters guess ahead, the model checks their guesses in one pass, and what stands is what the model would have said alone. Point at a token, or walk with the arrow keys, for its probability, its drafter and what else might have come."),
      h("div", { class: "starters" }, STARTERS.map(([name, text]) =>
        h("button", { type: "button", onclick: () => { field.value = text; grow(); form.requestSubmit(); } }, h("b", {}, name), h("span", {}, text)))));
  }

  // Also while another view is open: what runs goes on, and is here when somebody comes back.
  function working(on) {
    kept.busy = on;
    const button = document.querySelector(".composer button") ?? send;
    button.textContent = on ? "Stop" : kept.mode === "race" ? "Race" : "Send";
    (document.querySelector(".playground") ?? element).classList.toggle("busy", Boolean(on));
  }

  async function submit(event) {
    event.preventDefault();
    if (kept.busy) { kept.busy.stop(); return; }
    const text = field.value.trim();
    if (!text) { field.focus(); return; }
    if (kept.mode === "race") await race(text);
    else await chat(text);
  }

  function conversation(text) {
    const system = controls.values.system.trim();
    return [...(system ? [{ role: "system", content: system }] : []), ...kept.messages, { role: "user", content: text }];
  }

  async function chat(text) {
    field.value = "";
    grow();
    const answer = new Answer(about, "Answer, token by token");
    const facts = h("div", { class: "facts small soft num" }, "waiting for the first token …");
    const turn = [h("div", { class: "said" }, text), h("article", { class: "answer" }, answer.text.element, facts)];
    if (!kept.nodes.length) log.replaceChildren();
    kept.nodes.push(...turn);
    log.append(...turn);
    turn[1].scrollIntoView({ block: "nearest" });
    answer.onprogress = everyFrame(() => { facts.replaceChildren(...factsOf(answer)); follow(); });
    working(answer);
    const messages = conversation(text);
    await answer.run(messages, controls.body());
    if (answer.error) turn[1].append(h("p", { class: "note", role: "alert" }, answer.error));
    else kept.messages = [...messages.filter((message) => message.role !== "system"), { role: "assistant", content: answer.content }];
    facts.replaceChildren(...factsOf(answer));
    turn[1].dataset.done = "yes";
    working(null);
    status.textContent = answer.error ?? `The answer has ${answer.text.length} tokens.`;
    follow();
  }

  async function race(text) {
    field.value = "";
    grow();
    kept.race = new Race(about, controls, text);
    log.replaceChildren(kept.race.element);
    working(kept.race);
    await kept.race.run([...conversation(text).filter((message) => message.role === "system"), { role: "user", content: text }]);
    working(null);
    kept.race.element.scrollIntoView({ block: "nearest" });
  }

  show(kept.mode);
  element.classList.toggle("busy", Boolean(kept.busy));
  requestAnimationFrame(() => { if (matchMedia("(pointer: fine)").matches) field.focus({ preventScroll: true }); });
  return { element };
}

// Stay at the end of the text, unless somebody has scrolled up to read.
function follow() {
  const page = document.scrollingElement;
  if (page.scrollHeight - page.scrollTop - innerHeight < 160) page.scrollTop = page.scrollHeight;
}

export function factsOf(answer) {
  const summary = answer.summary;
  const speculation = summary?.speculation;
  const facts = [
    h("b", {}, `${rate(answer.rate)} tok/s`), `${answer.text.length} tokens`,
    answer.firstToken !== null && `first after ${seconds(answer.firstToken)}`,
    speculation && `${speculation.tokens_per_step.toFixed(2)} tokens a step`,
    speculation?.drafted > 0 && `${percent(speculation.accepted / speculation.drafted)} of ${speculation.drafted} drafted accepted`,
    summary && `seed ${summary.seed}`,
    answer.finish && answer.finish !== "stop" && { length: "cut at max tokens", stopped: "stopped" }[answer.finish],
  ].filter(Boolean);
  const nodes = facts.flatMap((fact, index) => index ? [" · ", fact] : [fact]);
  if (summary?.request_id) nodes.push(" · ", h("a", { href: `#/requests/${encodeURIComponent(summary.request_id)}` }, "Open the request"));
  return nodes;
}
