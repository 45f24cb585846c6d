// Numbers and tokens as people read them.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.round(value / 60)} min`;
}

export const rate = (value) => (value === null || value === undefined || !isFinite(value)) ? "–" : value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
export const count = (value) => (value ?? 0).toLocaleString("en");
export const percent = (value, digits = 0) => value === null || value === undefined ? "–" : `${(value * 100).toFixed(digits)} %`;
export const times = (value) => value ? `${value.toFixed(2)}×` : "–";

// A probability from its logarithm: 97.3 %, or 0.02 % where it is small.
export function probability(logprob) {
  if (logprob === null || logprob === undefined) return "–";
  const value = Math.exp(logprob) * 100;
  return `${value >= 10 ? value.toFixed(1) : value >= 0.1 ? value.toFixed(2) : value >= 0.001 ? value.toFixed(3) : "<0.001"} %`;
}

// White space made visible, so that " the" and "the" look different.
export const visible = (text) => text === "" ? "∅" : text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥");

// A request's id as far as a table needs it.
export const short = (id) => id.length > 20 ? `${id.slice(0, 18)}…` : id;
