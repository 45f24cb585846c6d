// A conversation, or texts that are continued: its turns on the page, and what one can do with each of them.

import { Answer } from "./answers.js";
import { Chats, keptTokens, shownTokens } from "./chats.js";
import { copyButton, everyFrame, h } from "./dom.js";
import { percent, rate, seconds } from "./format.js";
import { formatted } from "./look.js";
import { Thoughts } from "./thoughts.js";

export class Talk {
  // `complete`: the model goes on with each text instead of answering in a conversation.
  constructor(about, store, complete) {
    this.about = about;
    this.complete = complete;
    this.chats = new Chats(store);
    this.element = h("div", { class: `turns${complete ? " completions" : ""}` });
    this.onedit = this.onagain = () => {};
    this.show();
    addEventListener("look", () => { for (const turn of this.turns) turn.text.format(formatted()); });
  }

  get empty() { return !this.turns.length; }

  show() {
    this.turns = this.chats.current.turns.map((kept) => {
      const turn = this.turn(kept.said, newAnswer(this.about));
      turn.answer.thoughts.push(shownTokens(kept.thoughts ?? []), true);
      turn.text.push(shownTokens(kept.tokens));
      turn.text.finish(kept.content);
      Object.assign(turn, { content: kept.content, done: true });
      turn.facts.textContent = kept.facts;
      turn.article.dataset.done = "yes";
      return turn;
    });
    this.element.replaceChildren(...this.turns.flatMap((turn) => turn.nodes));
  }

  turn(said, answer) {
    const facts = h("div", { class: "facts small soft num" });
    const turn = { said, answer, text: answer.text, content: "", facts, done: false };
    const button = (name, does) => h("button", { type: "button", class: "quiet small", onclick: does }, name);
    const own = h("div", { class: "actions" }, copyButton(() => said, "Copy what was said"), button("Edit", () => this.onedit(this.turns.indexOf(turn), said)));
    const actions = h("div", { class: "actions" }, copyButton(() => turn.content, "Copy the answer"), button("Regenerate", () => this.onagain(this.turns.indexOf(turn), said)),
      this.complete && button("Continue", () => this.onedit(null, said + turn.content)));
    turn.article = h("article", { class: "answer" }, answer.thoughts.element, answer.text.element, facts, actions);
    turn.nodes = [h("div", { class: "turn-said" }, h("div", { class: "said" }, said), own), turn.article];
    return turn;
  }

  // Turns from `index` on are given up: the conversation goes on before them.
  cut(index) {
    for (const turn of this.turns.splice(index)) for (const node of turn.nodes) node.remove();
    const { current } = this.chats;
    current.turns = this.turns.filter((turn) => turn.done).map(keptTurn);
    this.chats.keep(current);
  }

  messages(system, said) {
    if (this.complete) return [{ role: "user", content: said }];
    const past = this.turns.filter((turn) => turn.done).flatMap((turn) => [{ role: "user", content: turn.said }, { role: "assistant", content: turn.content }]);
    return [...(system ? [{ role: "system", content: system }] : []), ...past, { role: "user", content: said }];
  }

  // Ask, and fill the new turn while the answer comes; `started` is told what can be stopped.
  async ask(said, system, fields, started) {
    const { chats } = this, chat = chats.current;
    const answer = newAnswer(this.about);
    const messages = this.messages(system, said);
    const turn = this.turn(said, answer);
    turn.facts.textContent = "waiting for the first token …";
    this.turns.push(turn);
    this.element.append(...turn.nodes);
    turn.article.scrollIntoView({ block: "nearest" });
    answer.onprogress = everyFrame(() => { turn.facts.replaceChildren(...factsOf(answer)); follow(); });
    started(answer);
    await answer.run(messages, fields, this.complete);
    turn.content = answer.content;
    if (answer.error) turn.article.insertBefore(h("p", { class: "note", role: "alert" }, answer.error), turn.facts);
    turn.facts.replaceChildren(...factsOf(answer));
    turn.article.dataset.done = "yes";
    if (!answer.error && this.turns.includes(turn)) {
      turn.done = true;
      chat.turns.push(keptTurn(turn));
      chats.keep(chat);
    }
    follow();
    return answer;
  }
}

const newAnswer = (about) => new Answer(about, "Answer, token by token", formatted(), new Thoughts());

const keptTurn = (turn) => ({ said: turn.said, content: turn.content, thoughts: keptTokens(turn.answer.thoughts.text.tokens), tokens: keptTokens(turn.text.tokens), facts: turn.facts.textContent.replace(/ · Open the request$/, "") });

// Stay at the end of the text, unless somebody has scrolled up to read.
function follow() {
  const page = document.scrollingElement;
  if (page.scrollHeight - page.scrollTop - innerHeight < 160) page.scrollTop = page.scrollHeight;
}

function factsOf(answer) {
  const summary = answer.summary;
  const speculation = summary?.speculation;
  const facts = [
    h("b", {}, `${rate(answer.rate)} tok/s`), `${answer.length} tokens`,
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
