// The server: JSON, streams of server-sent events, and the key where one is asked for.

const KEY = "paceline-key";

export class ServerError extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

let asking = null;
function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const field = document.getElementById("key");
    dialog.addEventListener("close", () => {
      asking = null;
      if (dialog.returnValue === "use" && field.value) sessionStorage.setItem(KEY, field.value);
      resolve(dialog.returnValue === "use");
    }, { once: true });
    field.value = "";
    dialog.showModal();
  });
  return asking;
}

async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (problem) {
      if (problem.name === "AbortError") throw problem;
      throw new ServerError("The server cannot be reached.", 0);
    }
    if (response.ok) return response;
    if (response.status === 401 && await askForKey()) continue;
    throw new ServerError(await reason(response), response.status);
  }
}

async function reason(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    const detail = body.error?.message ?? body.detail;
    if (typeof detail === "string") return detail;
  } catch { /* not JSON */ }
  return `The server answered ${response.status}.`;
}

// Seeds have 64 bits and JavaScript's numbers 53: they travel as text inside the page.
const BIG_SEED = /"seed":\s*(\d{15,})/g;
export const parse = (text) => JSON.parse(text.replace(BIG_SEED, '"seed":"$1"'));
export const serialise = (body) => JSON.stringify(body).replace(/"seed":"(\d+)"/, '"seed":$1');

export const getJSON = async (path, signal) => parse(await (await call(path, { signal })).text());
export const getBlob = async (path) => (await call(path)).blob();

// The data of each event of a stream, parsed, until it ends. fetch and not EventSource: that one sends no key.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export async function* watch(path, signal) {
  yield* events(await call(path, { signal }));
}

export async function* stream(path, body, signal) {
  const response = await call(path, { method: "POST", body: serialise(body), signal, headers: { "content-type": "application/json" } });
  for await (const chunk of events(response)) {
    if (chunk.error) throw new ServerError(chunk.error.message ?? "The request failed.", chunk.error.code);
    yield chunk;
  }
}
