// Puts the page together: the life of the server, the conversation, the settings.

import { ServerError, events, getJson, setKey } from "./server.js";
import { Timeline } from "./timeline.js";
import { Answer } from "./tokens.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
  "repetition_penalty"];
const RETRY_MS = 1000;
const messages = []; // what the model is sent, system prompt aside
const timeline = new Timeline();
let running = null; // AbortController of the answer being streamed
let ready = false;

const sleep = (time) => new Promise((resolve) => setTimeout(resolve, time));

function setStatus(text, state) {
  $("status").textContent = text;
  $("status").dataset.state = state;
}

function update() {
  $("send").disabled = !ready || running !== null;
  $("stop").disabled = running === null;
  $("clear").disabled = running !== null;
}

// -- the server -------------------------------------------------------------------------------------------------------

async function connect() {
  ready = false;
  update();
  for (;;) {
    const state = await fetch("/health").then((r) => r.json()).catch(() => null);
    if (state?.stage === "ready" && state.status === "ok") break;
    if (state) setStatus(state.reason ?? (state.stage === "loading" ? "Loading the model" : "Shutting down"), state.stage);
    else setStatus("The server does not answer", "error");
    await sleep(RETRY_MS);
  }
  for (;;) {
    try {
      const { data } = await getJson("/v1/models");
      $("model").textContent = data[0].id;
      break;
    } catch (error) {
      if (error.status === 401) await askKey(error);
      else {
        setStatus(error.message, "error");
        await sleep(RETRY_MS);
      }
    }
  }
  ready = true;
  setStatus("Ready", "ready");
  update();
  watchIfWanted();
}

async function askKey(error) {
  setStatus("API key needed", "error");
  if (error.message.startsWith("wrong")) $("ask-why").textContent = `The server said: ${error.message}.`;
  const dialog = $("ask");
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  setKey($("key").value);
  $("key").value = "";
}

function watchIfWanted() {
  if (ready && $("watch").checked && !document.hidden) timeline.watch();
  else timeline.unwatch();
}

// -- the conversation -------------------------------------------------------------------------------------------------

function turn(who) {
  $("empty").hidden = true;
  const article = document.createElement("article");
  article.className = `turn ${who}`;
  article.setAttribute("aria-label", who === "user" ? "You" : "Model");
  const text = document.createElement("div");
  text.className = "text";
  article.append(text);
  $("log").append(article);
  $("log").scrollTop = $("log").scrollHeight;
  return { article, text };
}

function line(article, className, ...parts) {
  const made = document.createElement("div");
  made.className = className;
  made.append(...parts);
  article.append(made);
  return made;
}

function request() {
  const system = $("system").value.trim();
  const body = { messages: [...(system ? [{ role: "system", content: system }] : []), ...messages], stream: true };
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  if ($("details").checked) Object.assign(body, { logprobs: true, top_logprobs: 5, return_token_details: true });
  body.stream_options = { include_usage: true };
  return body;
}

async function send() {
  const content = $("prompt").value.trim();
  if (!content || !ready || running) return;
  $("prompt").value = "";
  messages.push({ role: "user", content });
  turn("user").text.textContent = content;
  const { article, text } = turn("assistant");
  article.classList.add("waiting");
  running = new AbortController();
  update();
  const answer = new Answer(text);
  const started = performance.now();
  let first = null, last = started, usage = null, reason = null, failure = null;
  try {
    for await (const chunk of events("/v1/chat/completions", { body: request(), signal: running.signal })) {
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      const { content: added = "", reasoning_content: thought = "" } = choice.delta;
      const details = choice.token_details ?? [];
      if (added || thought || details.length) {
        last = performance.now();
        first ??= last;
      }
      const pinned = $("log").scrollTop + $("log").clientHeight > $("log").scrollHeight - 40;
      answer.add((thought ?? "") + (added ?? ""), details, choice.logprobs?.content ?? []);
      if (pinned) $("log").scrollTop = $("log").scrollHeight;
      reason = choice.finish_reason ?? reason;
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else failure = error;
  }
  answer.end();
  article.classList.remove("waiting");
  running = null;
  if (failure) {
    line(article, "error", failure.message).setAttribute("role", "alert");
    if (!(failure instanceof ServerError)) console.error(failure);
    if (!answer.text) {
      messages.pop(); // so that the next message is not the second of two
      $("prompt").value = content;
      text.remove();
    }
  }
  if (answer.text || !failure) messages.push({ role: "assistant", content: answer.text });
  if (first !== null) tellSpeed(article, { answer, started, first, last, usage, reason });
  $("log").scrollTop = $("log").scrollHeight;
  update();
  if (failure?.status === 401 || failure?.status === 503 || failure?.code === "unreachable") connect();
}

function tellSpeed(article, { answer, started, first, last, usage, reason }) {
  const count = usage?.completion_tokens ?? answer.numTokens;
  const facts = [];
  if (count) facts.push(`${count} tokens`);
  if (count > 1 && last > first) facts.push(`${((1000 * (count - 1)) / (last - first)).toFixed(1)} tokens/s`);
  facts.push(`first after ${(first - started).toFixed(0)} ms`);
  if (reason) facts.push(reason === "length" ? "cut at max tokens" : reason);
  const meta = line(article, "meta", facts.join(" · "));
  const counts = usage?.completion_tokens_details;
  if (counts || answer.numDrafts) {
    const mark = document.createElement("span");
    mark.className = "draft";
    const drafted = counts ? counts.accepted_prediction_tokens + counts.rejected_prediction_tokens : null;
    mark.textContent = `${answer.numDrafts || counts.accepted_prediction_tokens} accepted drafts`;
    meta.append(" · ", mark, drafted ? ` of ${drafted}` : "");
  }
}

// -- controls ---------------------------------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("prompt").focus();
});
$("clear").addEventListener("click", () => {
  messages.length = 0;
  $("log").querySelectorAll(".turn").forEach((each) => each.remove());
  $("empty").hidden = false;
  $("prompt").focus();
});
$("watch").addEventListener("change", watchIfWanted);
document.addEventListener("visibilitychange", watchIfWanted);
$("ask").addEventListener("cancel", (event) => event.preventDefault());
if (matchMedia("(max-width: 760px)").matches) $("settings").open = false;

connect();
