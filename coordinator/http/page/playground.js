"use strict";

const FLEET_MS = 2000;
const POINTS = 120; // that a chart shows
const RECENT = 40; // tokens of which acceptance is the share
const KINDS = ["accepted", "recovered", "bonus", "plain"];
const COLOURS = { accepted: "var(--accepted)", recovered: "var(--recovered)", bonus: "var(--bonus)", plain: "var(--line)" };

const find = (id) => document.getElementById(id);
const make = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};
const figure = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

// --- charts ---------------------------------------------------------------------------------------------------------

class Chart {
  constructor(title, unit, digits, most) {
    this.values = [];
    this.unit = unit;
    this.digits = digits;
    this.most = most; // the top of the scale at least
    this.title = title;
    this.now = make("b", { textContent: "–" });
    this.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.svg.setAttribute("viewBox", `0 0 ${POINTS} 44`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    this.svg.append(this.line);
    const caption = make("figcaption", {}, make("span", { textContent: title }), this.now);
    find("charts").append(make("figure", { className: "chart" }, caption, this.svg));
  }

  clear() {
    this.values = [];
    this.draw();
  }

  add(value) {
    this.values.push(value);
    if (this.values.length > POINTS) this.values.shift();
    this.draw();
  }

  draw() {
    const top = Math.max(this.most, ...this.values) || 1;
    const start = POINTS - this.values.length;
    this.line.setAttribute("points", this.values.map((v, i) => `${start + i},${42 - (40 * v) / top}`).join(" "));
    const last = this.values.at(-1);
    this.now.textContent = last === undefined ? "–" : `${figure(last, this.digits)}${this.unit}`;
    this.svg.setAttribute("aria-label", `${this.title}: ${this.now.textContent}`);
  }
}

const charts = {
  speed: new Chart("Tokens per second", "", 1, 10),
  acceptance: new Chart("Guessed right, of recent tokens", " %", 0, 100),
  gamma: new Chart("γ, how far the drafter guesses", "", 0, 8),
  trip: new Chart("Round trip to the drafter", " ms", 1, 2),
};

// --- the server -----------------------------------------------------------------------------------------------------

const headers = () => {
  const key = find("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
};

const problem = async (reply) => {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `${reply.status} ${reply.statusText}`;
  }
};

const say = (text, how) => {
  find("state").className = how;
  find("state-text").textContent = text;
};

async function* events(body, signal) {
  const reply = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  });
  if (!reply.ok) throw new Error(await problem(reply));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream broke off");
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// --- answers --------------------------------------------------------------------------------------------------------

/** One answer as it is written, its tokens marked by what became of them. */
class Answer {
  constructor(title, watched) {
    this.watched = watched; // shown in the charts
    this.said = make("div", { className: "said writing" });
    this.speed = make("b");
    this.heading = make("h3", {}, title, " ", this.speed);
    this.mix = make("div", { className: "mix", hidden: true });
    this.box = make("article", { className: "answer" }, this.heading, this.said, this.mix);
    this.counts = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
    this.recent = [];
    this.text = "";
  }

  add(choice) {
    const { content } = choice.delta;
    const marks = choice.speculation;
    if (!content && !marks) return;
    this.text += content || "";
    const letters = [...(content || "")];
    const now = performance.now();
    this.began ??= now;
    (marks?.kinds || []).forEach((kind, i) => {
      this.counts[kind] += 1;
      this.recent.push(kind === "accepted");
      const part = letters.splice(0, marks.characters[i]).join("");
      this.said.append(make("span", { className: `token ${kind}`, textContent: part, title: kind }));
    });
    if (letters.length) this.said.append(letters.join(""));
    this.recent = this.recent.slice(-RECENT);
    const seconds = (now - this.began) / 1000;
    if (seconds > 0.05) this.speed.textContent = `${figure((this.tokens - 1) / seconds)} tokens/s`;
    if (this.watched && marks) {
      if (seconds > 0.05) charts.speed.add((this.tokens - 1) / seconds);
      charts.acceptance.add((100 * this.recent.filter(Boolean).length) / Math.max(1, this.recent.length));
      charts.gamma.add(marks.gamma);
    }
  }

  get tokens() {
    return Object.values(this.counts).reduce((sum, count) => sum + count, 0);
  }

  finish(metrics) {
    this.said.classList.remove("writing");
    this.mix.hidden = this.tokens === 0;
    this.mix.replaceChildren(...KINDS.map((kind) => {
      const part = make("i", { title: `${kind}: ${this.counts[kind]}` });
      part.style.width = `${(100 * this.counts[kind]) / this.tokens}%`;
      part.style.background = COLOURS[kind];
      return part;
    }));
    this.mix.setAttribute("role", "img");
    this.mix.setAttribute("aria-label", KINDS.map((kind) => `${kind} ${this.counts[kind]}`).join(", "));
    if (!metrics) return;
    this.rate = metrics.outrider.tokens_per_second;
    this.speed.textContent = `${figure(this.rate)} tokens/s`;
    if (this.watched) showNumbers(this, metrics);
  }

  fail(error) {
    this.said.classList.remove("writing");
    this.said.append(make("p", { className: "failed", textContent: error.message, role: "alert" }));
  }
}

const showNumbers = (answer, { speculative_decoding: spec, outrider: ours }) => {
  const plan = ours.plans[0];
  const rows = {
    "First token": `${figure(ours.time_to_first_token_ms, 0)} ms`,
    "Tokens per step": figure(answer.tokens / Math.max(1, ours.steps), 2),
    "Guesses that held": `${figure(100 * spec.draft_acceptance_rate, 0)} %`,
    "Mostly": plan ? plan.plan : "–",
    "Drafter": ours.drafter || "none",
    "Bytes per accepted token": figure(ours.bytes_per_accepted_token, 0),
    "Verifiers lost": ours.failovers,
    "Seed": ours.seed,
  };
  find("numbers").replaceChildren(...Object.entries(rows).flatMap(([name, value]) =>
    [make("dt", { textContent: name }), make("dd", { textContent: value })]));
};

// --- the conversation -----------------------------------------------------------------------------------------------

let history = [];
let running = null; // an AbortController, while an answer is written

const follow = async (answer, body, signal) => {
  let metrics = null;
  try {
    for await (const event of events(body, signal)) {
      metrics = event.metrics || metrics;
      if (event.choices[0]) answer.add(event.choices[0]);
      if (pinned()) scrollDown();
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      answer.fail(error);
      throw error;
    }
  } finally {
    answer.finish(metrics);
  }
};

const pinned = () => {
  const box = find("turns");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
};
const scrollDown = () => find("turns").scrollTo(0, find("turns").scrollHeight);

const wishes = () => {
  const gamma = find("gamma").value;
  const number = (id) => (find(id).value === "" ? undefined : Number(find(id).value));
  return {
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    stream: true,
    speculation: { show: true, ...(gamma === "" ? {} : { gamma: Number(gamma) }) },
  };
};

const ask = async (text) => {
  find("welcome")?.remove();
  const system = find("system").value.trim();
  const messages = [
    ...(system ? [{ role: "system", content: system }] : []), ...history, { role: "user", content: text },
  ];
  const body = { ...wishes(), messages };
  const both = find("compare").checked;
  // The same seed on both sides: the texts must be equal.
  if (both) body.seed ??= Math.floor(Math.random() * 2 ** 31);
  const guessed = new Answer(both ? "Speculated" : "", true);
  const plain = both ? new Answer("Plain", false) : null;
  const answers = make("div", { className: both ? "answers two" : "answers" }, ...(both ? [plain.box] : []), guessed.box);
  find("turns").append(make("div", { className: "said mine", textContent: text }), answers);
  scrollDown();
  charts.speed.clear();
  charts.acceptance.clear();
  charts.gamma.clear();
  running = new AbortController();
  busy(true);
  try {
    if (both) await follow(plain, { ...body, speculation: { show: true, gamma: 0 } }, running.signal);
    await follow(guessed, body, running.signal);
    if (both && plain.rate && guessed.rate) {
      const times = make("span", { className: "verdict", textContent: `${figure(guessed.rate / plain.rate, 2)} × plain` });
      guessed.heading.append(times, plain.text === guessed.text ? " the same text" : " another text");
    }
    history.push({ role: "user", content: text }, { role: "assistant", content: guessed.text });
  } catch {
    find("prompt").value ||= text; // the answer shows why; the question can be sent again
  } finally {
    running = null;
    busy(false);
  }
};

const busy = (yes) => {
  find("send").hidden = yes;
  find("stop").hidden = !yes;
  if (!yes) find("prompt").focus();
};

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("prompt").value.trim();
  if (!text || running) return;
  find("options").open = false;
  find("prompt").value = "";
  ask(text);
});
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (find("options").open) find("options").open = false;
  else running?.abort();
});
find("stop").addEventListener("click", () => running?.abort());
find("clear").addEventListener("click", () => {
  running?.abort();
  history = [];
  find("turns").replaceChildren();
  find("numbers").replaceChildren();
  find("prompt").focus();
});
find("ideas").addEventListener("click", (event) => {
  if (event.target.matches("button") && !running) ask(event.target.textContent);
});
find("temperature").addEventListener("input", () => {
  find("temperature-value").textContent = find("temperature").value;
});
find("gamma").append(
  make("option", { value: "", textContent: "as pays best" }),
  make("option", { value: "0", textContent: "not at all: plain" }),
  ...[2, 4, 6, 8, 12, 16].map((gamma) => make("option", { value: gamma, textContent: `γ ${gamma}, in turns` })),
);
find("key").value = sessionStorage.getItem("key") || "";
find("key").addEventListener("change", () => {
  sessionStorage.setItem("key", find("key").value.trim());
  look();
});

const themed = (theme) => {
  if (theme) document.documentElement.dataset.theme = theme;
};
themed(localStorage.getItem("theme"));
find("theme").addEventListener("click", () => {
  const shown = document.documentElement.dataset.theme ||
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const next = shown === "dark" ? "light" : "dark";
  localStorage.setItem("theme", next);
  themed(next);
});

// --- the fleet ------------------------------------------------------------------------------------------------------

const workerRow = (worker) => {
  const { load, model } = worker;
  const name = make("div", { className: "name" },
    make("strong", { textContent: worker.role === "drafter" ? `drafter, ${worker.kind}` : "verifier" }),
    make("span", { textContent: `${figure(worker.round_trip_ms)} ms` }));
  const what = [model.name, model.device, `${load.sessions} of ${worker.capacity} sessions`];
  if (load.waiting) what.push(`${load.waiting} waiting`);
  if (worker.draining) what.push("leaving");
  const row = make("li", {}, name, make("div", { className: "what", textContent: what.filter(Boolean).join(" · ") }));
  if (worker.role === "verifier" && load.kv_tokens_total) {
    const used = load.kv_tokens_used / load.kv_tokens_total;
    const meter = make("meter", { min: 0, max: 1, value: used, title: `KV cache: ${figure(100 * used, 0)} %` });
    meter.setAttribute("aria-label", meter.title);
    row.append(meter);
  }
  return row;
};

const look = async () => {
  try {
    const reply = await fetch("fleet", { headers: headers() });
    if (reply.status === 401) {
      say("needs an API key: see Options", "down");
      return;
    }
    if (!reply.ok) throw new Error(await problem(reply));
    const fleet = await reply.json();
    const verifier = fleet.workers.find((worker) => worker.role === "verifier");
    const drafters = fleet.workers.filter((worker) => worker.role === "drafter");
    find("model").textContent = verifier ? verifier.model.name : "no model";
    say(verifier ? "ready" : "no verifier yet", verifier ? "up" : "");
    const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
    find("fleet-summary").textContent =
      `${plural(fleet.sessions, "session")} here, ${fleet.durable ? "kept in Redis" : "Redis is away"}`;
    find("fleet").replaceChildren(...fleet.workers.map(workerRow));
    if (drafters.length) charts.trip.add(Math.min(...drafters.map((worker) => worker.round_trip_ms)));
  } catch (error) {
    say(`not reached: ${error.message}`, "down");
  }
};

look();
setInterval(look, FLEET_MS);
