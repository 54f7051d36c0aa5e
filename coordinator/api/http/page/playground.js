"use strict";

const FLEET_MS = 2000;
const POINTS = 160; // in a chart
const FEWEST = 24; // minimum width of a chart, in points
const RECENT = 40; // tokens of the acceptance chart
const WINDOW_MS = 2000; // of the present speed
const WAITING_MS = 5000; // until an answer that has not begun is told to wait
const WAITING = "Waiting for the server. Six answers at a time are written to one browser, in all its windows.";
const KINDS = ["accepted", "recovered", "bonus", "plain"];

const stored = (kind) => {
  try {
    return window[kind];
  } catch {
    return null; // forbidden by the browser
  }
};
const find = (id) => document.getElementById(id);
const make = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};
const drawn = (name, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};
const figure = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const rows = (entries) => entries.map(([name, value, how = ""]) =>
  make("div", { className: how }, make("dt", { textContent: name }), make("dd", { textContent: value })));

// --- charts ---------------------------------------------------------------------------------------------------------

class Chart {
  /** `most`: minimum top of the scale. `stepped`: draw steps, not lines. */
  constructor(title, unit, digits, most, stepped = false) {
    Object.assign(this, { title, unit, digits, most, stepped });
    this.values = [];
    this.now = make("b");
    this.top = make("small");
    this.svg = drawn("svg", { viewBox: "0 0 100 46", preserveAspectRatio: "none", role: "img" });
    this.area = drawn("polygon", {});
    this.line = drawn("polyline", {});
    this.svg.append(this.area, this.line);
    find("charts").append(make("figure", { className: "chart" },
      make("figcaption", {}, make("span", { textContent: title }), this.now),
      make("div", { className: "plot" }, this.svg, this.top)));
    this.draw();
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
    const top = Math.max(this.most, ...this.values);
    const step = 100 / (Math.max(FEWEST, this.values.length) - 1);
    const height = (value) => 45 - (43 * value) / top;
    const points = this.values.flatMap((value, i) => {
      const point = `${i * step},${height(value)}`;
      return this.stepped && i ? [`${i * step},${height(this.values[i - 1])}`, point] : [point];
    });
    this.line.setAttribute("points", points.join(" "));
    this.area.setAttribute("points", points.length ? `0,46 ${points.join(" ")} ${(this.values.length - 1) * step},46` : "");
    const last = this.values.at(-1);
    this.now.textContent = last === undefined ? "–" : `${figure(last, this.digits)}${this.unit}`;
    this.top.textContent = last === undefined ? "" : figure(top, top < 10 ? this.digits : 0);
    this.svg.setAttribute("aria-label", `${this.title}: ${this.now.textContent}`);
  }
}

const charts = {
  speed: new Chart("Tokens per second", "", 1, 10),
  acceptance: new Chart(`Guessed, of the last ${RECENT} tokens`, " %", 0, 100),
  gamma: new Chart("Guesses ahead, γ", "", 0, 8, true),
  trip: new Chart("Round trip to the drafter", " ms", 1, 2),
};

const showMix = (bar, counts) => {
  const all = KINDS.filter((kind) => counts[kind]);
  bar.replaceChildren(...all.map((kind) => {
    const part = make("i", { className: kind, title: `${kind}: ${counts[kind]}` });
    part.style.flexGrow = counts[kind];
    return part;
  }));
};
const showTally = (counts) => {
  showMix(find("mix"), counts);
  find("tally").replaceChildren(...rows(KINDS.map((kind) => [kind, counts[kind] ?? "–", kind])));
};

// --- the server -----------------------------------------------------------------------------------------------------

class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const headers = () => {
  const key = find("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
};

const refusal = async (reply) => {
  let message = `${reply.status} ${reply.statusText}`;
  try {
    message = (await reply.json()).error.message;
  } catch {
    // a reply without a message
  }
  if (reply.status === 401) message = `${message.replace(/\.$/, "")}. Enter the API key under Options.`;
  return new Refused(message, reply.status);
};

/** Fetch or read from the server; a broken connection is told in our words, not the browser's. */
const reached = (promise, words) => promise.catch((error) => {
  throw error.name === "AbortError" ? error : new Error(words);
});
const call = (path, options) => reached(fetch(path, { headers: headers(), ...options }), "The server does not answer.");

const say = (text, how) => {
  find("state").className = how;
  if (find("state-text").textContent !== text) find("state-text").textContent = text;
};

const INTERRUPTED = "The stream was interrupted.";

async function* events(body, signal) {
  const reply = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  if (!reply.ok) throw await refusal(reply);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reached(reader.read(), INTERRUPTED);
    if (done) throw new Error(INTERRUPTED);
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith(":")) continue; // nothing new yet
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
    this.title = title;
    this.watched = watched; // shown next to the conversation
    this.said = make("div", { className: "said writing" });
    this.thoughts = make("div", { className: "said thoughts" });
    this.speed = make("b");
    this.box = make("article", { className: "answer" },
      make("h3", {}, title, title ? " " : "", this.speed), this.said);
    this.counts = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
    this.recent = [];
    this.times = [];
    this.text = ""; // of the answer itself
    this.all = ""; // with its thoughts
  }

  add(choice) {
    const thought = choice.delta.reasoning_content || "";
    const content = choice.delta.content || "";
    const marks = choice.speculation || { kinds: [], characters: [] };
    if (!thought && !content && !marks.kinds.length) return;
    this.text += content;
    this.all += thought + content;
    if (thought && !this.thoughts.parentNode) this.said.before(this.thoughts);
    const shown = thought ? this.thoughts : this.said;
    const letters = [...(thought || content)];
    const now = performance.now();
    marks.kinds.forEach((kind, i) => {
      this.counts[kind] += 1;
      this.recent.push(kind === "accepted");
      this.times.push(now);
      const part = letters.splice(0, marks.characters[i]).join("");
      const word = part.trimStart();
      const space = part.slice(0, part.length - word.length);
      if (word) shown.append(space, make("span", { className: `token ${kind}`, textContent: word, title: kind }));
      else if (part) shown.append(make("span", { className: `token ${kind} blank`, textContent: part }));
    });
    if (letters.length) shown.append(letters.join(""));
    this.recent = this.recent.slice(-RECENT);
    this.times = this.times.filter((time) => now - time < WINDOW_MS);
    const rate = (1000 * (this.times.length - 1)) / (now - this.times[0]);
    if (Number.isFinite(rate)) this.speed.textContent = `${figure(rate)} tokens/s`;
    if (!this.watched || !marks.kinds.length) return;
    if (Number.isFinite(rate)) charts.speed.add(rate);
    charts.acceptance.add((100 * this.recent.filter(Boolean).length) / this.recent.length);
    charts.gamma.add(marks.gamma);
    showTally(this.counts);
  }

  get tokens() {
    return KINDS.reduce((sum, kind) => sum + this.counts[kind], 0);
  }

  finish(metrics) {
    this.said.classList.remove("writing");
    if (!metrics) return;
    this.rate = metrics.outrider.tokens_per_second;
    this.speed.textContent = `${figure(this.rate)} tokens/s`;
    if (this.watched) showNumbers(this, metrics);
  }

  fail(error) {
    this.box.append(make("p", { className: "failed", textContent: error.message, role: "alert" }));
  }
}

const showNumbers = (answer, { speculative_decoding: spec, outrider: ours }) => {
  find("numbers").replaceChildren(...rows([
    ["First token after", `${figure(ours.time_to_first_token_ms, 0)} ms`],
    ["Tokens per step", figure(answer.tokens / Math.max(1, ours.steps), 2)],
    ["Acceptance rate", spec.num_draft_tokens ? `${figure(100 * spec.draft_acceptance_rate, 0)} %` : "none made"],
    ["Most used plan", ours.plans[0]?.plan ?? "–"],
    ["Drafter", ours.drafter || "none"],
    ["Bytes per accepted token", figure(ours.bytes_per_accepted_token || NaN, 0)],
    ...(ours.failovers ? [["Verifiers lost", ours.failovers]] : []),
    ...(ours.drafter_losses ? [["Drafters lost", ours.drafter_losses]] : []),
    ["Seed", ours.seed],
  ]));
};

/** Plain and speculated, once both are there. */
const race = (plain, guessed) => {
  const most = Math.max(plain.rate, guessed.rate);
  const bar = (answer, how) => {
    const made = make("div", { className: `bar ${how}` });
    made.style.width = `${(100 * answer.rate) / most}%`;
    return [make("span", { textContent: answer.title }), made, make("span", { textContent: `${figure(answer.rate)} tokens/s` })];
  };
  const same = plain.all === guessed.all;
  const verdict = same ? " and the same text, to the last letter." : " but another text.";
  return make("div", { className: "race" }, ...bar(plain, "plain"), ...bar(guessed, "speculated"),
    make("p", {}, make("b", { className: "times", textContent: `${figure(guessed.rate / plain.rate, 2)} ×` }),
      " as fast as plain decoding,", make("span", { className: same ? "same" : "bad", textContent: verdict })));
};

// --- the conversation -----------------------------------------------------------------------------------------------

const welcome = find("welcome");
let history = [];
let running = null; // an AbortController, while an answer is written

const pinned = () => {
  const last = find("turns").lastElementChild;
  return last.getBoundingClientRect().bottom < find("ask").getBoundingClientRect().top + 120;
};
const scrollDown = () => find("turns").lastElementChild.scrollIntoView({ block: "end" });

const follow = async (answer, body, signal) => {
  let metrics = null;
  const waiting = setTimeout(() => { answer.speed.textContent = WAITING; }, WAITING_MS);
  const begun = () => {
    clearTimeout(waiting);
    if (answer.speed.textContent === WAITING) answer.speed.textContent = "";
  };
  try {
    for await (const event of events(body, signal)) {
      begun();
      metrics = event.metrics || metrics;
      const stays = pinned();
      if (event.choices[0]) answer.add(event.choices[0]);
      if (stays) scrollDown();
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      answer.fail(error);
      throw error;
    }
  } finally {
    begun();
    answer.finish(metrics);
  }
};

const wishes = () => {
  const gamma = find("gamma").value;
  const number = (id) => (find(id).value === "" ? undefined : Number(find(id).value));
  return {
    ...(several() ? { model: find("choice").value } : {}),
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed") ?? Math.floor(Math.random() * 2 ** 31),
    stream: true,
    speculation: { show: true, ...(gamma === "" ? {} : { gamma: Number(gamma) }) },
  };
};

const ask = async (text) => {
  const talk = history; // a new conversation must not receive this answer
  const system = find("system").value.trim();
  const messages = [
    ...(system ? [{ role: "system", content: system }] : []), ...talk, { role: "user", content: text },
  ];
  const body = { ...wishes(), messages }; // one seed for both, so that their texts are equal
  const both = find("compare").checked;
  const guessed = new Answer(both ? "Speculated" : "", true);
  const plain = both ? new Answer("Plain", false) : null;
  const answers = make("div", { className: both ? "answers two" : "answers" }, ...(both ? [plain.box] : []), guessed.box);
  welcome.remove();
  find("turns").append(make("div", { className: "said mine", textContent: text }), answers);
  scrollDown();
  for (const chart of [charts.speed, charts.acceptance, charts.gamma]) chart.clear();
  find("numbers").replaceChildren();
  showTally(guessed.counts);
  running = new AbortController();
  const { signal } = running;
  busy(true);
  try {
    if (both) await follow(plain, { ...body, speculation: { show: true, gamma: 0 } }, signal);
    if (!signal.aborted) await follow(guessed, body, signal);
    if (both && plain.rate && guessed.rate) answers.after(race(plain, guessed));
    if (talk === history) scrollDown();
    talk.push({ role: "user", content: text }, { role: "assistant", content: guessed.text || plain?.text || "" });
    find("news").textContent = `${signal.aborted ? "Stopped" : "Complete"}: ${plural(guessed.tokens, "token")}`;
  } catch (error) {
    find("prompt").value ||= text; // the answer shows why; the question can be sent again
    answers.querySelector(".failed")?.scrollIntoView({ block: "center" }); // a long question covered it
    if (error.status === 401) find("options").open = true;
  } finally {
    answers.querySelectorAll(".writing").forEach((said) => said.classList.remove("writing"));
    if (running?.signal === signal) running = null;
    busy(running !== null);
  }
};

const busy = (yes) => {
  find("send").hidden = yes;
  find("stop").hidden = !yes;
  if (yes) return;
  if (find("options").open) find("key").focus();
  else if (matchMedia("(pointer: fine)").matches) find("prompt").focus();
};

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("prompt").value.trim();
  if (!text || running) return;
  find("options").open = false;
  find("prompt").value = "";
  ask(text);
});
find("ask").addEventListener("invalid", () => { find("options").open = true; }, true); // to show which and why
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (find("options").open) {
    find("options").open = false;
    find("options").firstElementChild.focus();
  } else running?.abort();
});
document.addEventListener("pointerdown", (event) => {
  if (!find("options").contains(event.target)) find("options").open = false;
});
find("stop").addEventListener("click", () => running?.abort());
find("clear").addEventListener("click", () => {
  running?.abort();
  running = null;
  history = [];
  find("turns").replaceChildren(welcome);
  find("numbers").replaceChildren();
  for (const chart of [charts.speed, charts.acceptance, charts.gamma]) chart.clear();
  showTally({});
  busy(false);
});
find("ideas").addEventListener("click", (event) => {
  if (event.target.matches("button") && !running) ask(event.target.textContent);
});
find("temperature").addEventListener("input", () => {
  find("temperature-value").textContent = find("temperature").value;
});
find("gamma").append(
  make("option", { value: "", textContent: "as far as it pays" }),
  make("option", { value: "0", textContent: "not at all: plain decoding" }),
  ...[2, 4, 6, 8, 12, 16].map((gamma) => make("option", { value: gamma, textContent: `${gamma} tokens, in turns` })),
);
find("choice").addEventListener("change", () => {
  find("model").textContent = find("choice").value;
});
find("key").value = stored("sessionStorage")?.getItem("key") || "";
find("key").addEventListener("change", () => {
  stored("sessionStorage")?.setItem("key", find("key").value.trim());
  look();
});

const themed = (theme) => {
  if (theme) document.documentElement.dataset.theme = theme;
};
themed(stored("localStorage")?.getItem("theme"));
find("theme").addEventListener("click", () => {
  const shown = document.documentElement.dataset.theme ||
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const next = shown === "dark" ? "light" : "dark";
  stored("localStorage")?.setItem("theme", next);
  themed(next);
});

// --- the fleet ------------------------------------------------------------------------------------------------------

const workerRow = (worker) => {
  const { load, model } = worker;
  const name = make("div", { className: "name" },
    make("strong", { textContent: worker.role === "drafter" ? `Drafter, ${worker.kind}` : "Verifier" }),
    make("span", { textContent: `${figure(worker.round_trip_ms)} ms round trip` }));
  const what = [
    model.name === worker.kind ? "" : model.name, model.device, `${load.sessions} of ${plural(worker.capacity, "session")}`,
  ];
  if (load.waiting) what.push(`${load.waiting} waiting`);
  if (worker.draining) what.push("leaving");
  const row = make("li", {}, name);
  if (load.kv_tokens_total) {
    const used = load.kv_tokens_used / load.kv_tokens_total;
    what.push(`cache ${figure(100 * used, 0)} % full`);
    const bar = make("i");
    bar.style.width = `${100 * used}%`;
    row.append(make("div", { className: "used" }, bar));
  }
  name.after(make("div", { className: "what", textContent: what.filter(Boolean).join(" · ") }));
  return row;
};

let known = ""; // models of the verifiers when the list was read
const several = () => find("choice").options.length > 1;

/** Offer the models to choose from, where a fleet has several names for them. */
const offer = async (verifiers) => {
  const names = [...new Set(verifiers.map((worker) => worker.model.name))].sort().join("\n");
  if (names !== known && names) {
    const reply = await call("v1/models");
    if (!reply.ok) throw await refusal(reply);
    const ids = (await reply.json()).data.map((model) => model.id);
    const chosen = find("choice").value;
    find("choice").replaceChildren(...ids.map((id) => make("option", { value: id, textContent: id })));
    if (ids.includes(chosen)) find("choice").value = chosen;
    for (const part of document.querySelectorAll(".choice")) part.hidden = !several();
    known = names;
  }
  find("model").textContent = several() ? find("choice").value : (verifiers[0]?.model.name ?? "");
};

const look = async () => {
  try {
    const reply = await call("fleet");
    if (reply.status === 401) {
      say("needs an API key", "down");
      return;
    }
    if (!reply.ok) throw await refusal(reply);
    const fleet = await reply.json();
    const workers = fleet.workers.sort((a, b) => b.role.localeCompare(a.role)); // verifiers first
    const verifiers = workers.filter((worker) => worker.role === "verifier");
    const drafters = workers.filter((worker) => worker.role === "drafter");
    await offer(verifiers);
    say(verifiers.length ? "ready" : "no verifier yet", verifiers.length ? "up" : "");
    find("fleet").replaceChildren(...workers.map(workerRow));
    const kept = fleet.durable ? "Sessions survive this coordinator: they are in Redis." : "Redis does not answer: sessions end with this coordinator.";
    find("fleet-summary").textContent = `${fleet.sessions || "No"} session${fleet.sessions === 1 ? "" : "s"} now. ${kept}`;
    if (drafters.length) charts.trip.add(Math.min(...drafters.map((worker) => worker.round_trip_ms)));
  } catch (error) {
    say(error.message, "down");
  }
};

showTally({});
look();
setInterval(() => document.hidden || look(), FLEET_MS);
