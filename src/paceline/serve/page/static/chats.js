// Conversations that outlive a reload, in this browser alone: what was said, and the answers token by token.

const MOST = 30;

export class Chats {
  constructor(store) {
    this.store = store;
    this.list = this.load();
    this.current = this.list.at(-1) ?? this.fresh();
  }

  load() {
    try {
      const kept = JSON.parse(localStorage.getItem(this.store) ?? "[]");
      return Array.isArray(kept) ? kept.filter((chat) => Array.isArray(chat?.turns) && chat.turns.length) : [];
    } catch {
      return [];
    }
  }

  // A new conversation; it is kept from its first turn on.
  fresh() {
    this.current = { turns: [] };
    return this.current;
  }

  open(index) { this.current = this.list[index] ?? this.current; }

  // The newest last. Browsers give a page a few megabytes: the oldest go first.
  keep(chat) {
    this.list = [...this.list.filter((one) => one !== chat), ...(chat.turns.length ? [chat] : [])].slice(-MOST);
    while (this.list.length) {
      try {
        localStorage.setItem(this.store, JSON.stringify(this.list));
        return;
      } catch {
        this.list.shift();
      }
    }
    localStorage.removeItem(this.store);
  }

  clear() {
    this.list = [];
    localStorage.removeItem(this.store);
    this.fresh();
  }
}

export const titleOf = (chat) => chat.turns[0].said.replace(/\s+/g, " ").slice(0, 40);

// A token as it is kept, and as it is shown again: without the alternatives it had.
export const keptTokens = (tokens) => tokens.map(({ id, text, origin, drafter, logprob }) => [id, text, origin, drafter, logprob]);
export const shownTokens = (kept) => kept.map(([id, text, origin, drafter, logprob]) => ({ id, text, origin, drafter, logprob, top: [] }));
