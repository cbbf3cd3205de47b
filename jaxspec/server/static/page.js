/** The page: its form, its turns, and the requests that answer them. */

import { Answer } from "./answer.js";
import { element } from "./elements.js";
import { figures } from "./figures.js";
import { Failure, events, request } from "./stream.js";

const PATHS = { chat: "v1/chat/completions", complete: "v1/completions" };
const NUMBERS = ["max_tokens", "temperature", "seed", "num_speculative_tokens"];
const GRAMMARS = {
  json: ["JSON schema", '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}'],
  regex: ["Regular expression", "(yes|no), because [a-z ]{10,80}\\."],
};
const ENDS = { stop: "", length: "The limit of tokens ended it: " };
const get = (id) => document.getElementById(id);

let model = null;  // name of the served model
let running = null;  // AbortController of the requests that run
let messages = [];  // conversation so far

/** Read the served model's name, and show it. */
async function connect() {
  const status = get("model");
  try {
    const answer = await request("v1/models", { key: get("key").value });
    [{ id: model }] = (await answer.json()).data;
    status.textContent = model;
    status.classList.remove("error");
    document.title = `${model} · jaxspec`;
  } catch (error) {
    model = null;
    status.textContent = error.message;
    status.classList.add("error");
    if (error.status === 401) askForKey();
  }
}

function askForKey() {
  get("options").open = true;
  get("key").focus();
}

const mode = () => document.querySelector("input[name=mode]:checked").value;

/** Return the fields of a request that the form holds. Throw Failure for a schema that is not JSON. */
function fields(prompt) {
  const body = { model, stream: true, token_origins: true };
  for (const name of NUMBERS) {
    const value = get(name).value.trim();
    if (value !== "") body[name] = Number(value);
  }
  const form = get("form").value;
  if (form === "json_object") body.structured_outputs = { json_object: true };
  if (form === "regex") body.structured_outputs = { regex: get("grammar").value };
  if (form === "json") {
    try {
      body.structured_outputs = { json: JSON.parse(get("grammar").value) };
    } catch (error) {
      throw new Failure(`The schema is not JSON: ${error.message}`);
    }
  }
  if (mode() === "complete") return { ...body, prompt };
  return { ...body, messages: [...messages, { role: "user", content: prompt }] };
}

/** Stream one answer into its place on the page. Return whether it ended as it should. */
async function stream(answer, path, body, signal) {
  let reason = "stop";
  try {
    const response = await request(path, { key: get("key").value, body, signal });
    for await (const event of events(response)) {
      for (const choice of event.choices) {
        answer.add(choice);
        reason = choice.finish_reason ?? reason;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") {
      answer.end("Stopped: ");
    } else {
      answer.fail(error.message);
      if (error.status === 401) askForKey();
    }
    return false;
  }
  answer.end(ENDS[reason] ?? "");
  return true;
}

/** Answer a prompt, once or with and without drafts, one after the other. */
async function answer(prompt) {
  const turn = element("section", { className: "turn", "aria-label": "Turn" }, element("h2", { text: prompt }));
  const answers = element("div", { className: "answers" });
  turn.append(answers);
  get("turns").append(turn);
  get("intro").hidden = true;
  get("clear").hidden = false;
  busy(new AbortController());
  const { signal } = running;
  const drafted = new Answer("with drafts", true);
  const plain = get("compare").checked ? new Answer("no drafts", false) : null;
  answers.append(...[drafted, plain].filter(Boolean).map((one) => one.element));
  turn.scrollIntoView({ block: "start" });
  try {
    if (!model) await connect();
    if (!model) throw new Failure(get("model").textContent);
    const [body, path, chat] = [fields(prompt), PATHS[mode()], mode() === "chat"];
    const whole = await stream(drafted, path, body, signal);
    if (chat && drafted.content) {
      messages.push({ role: "user", content: prompt }, { role: "assistant", content: drafted.content });
    }
    if (plain && whole) await stream(plain, path, { ...body, num_speculative_tokens: 0 }, signal);
    else if (plain) plain.element.remove();
    if (drafted.tokens.length) turn.append(figures(drafted, plain?.tokens.length ? plain : null));
  } catch (error) {
    drafted.fail(error.message);
    plain?.element.remove();
  } finally {
    busy(null);
  }
}

/** Show whether requests run. controller: AbortController of the requests; null if none run. */
function busy(controller) {
  running = controller;
  const hadFocus = [get("send"), get("stop")].includes(document.activeElement);
  get("send").hidden = Boolean(controller);
  get("stop").hidden = !controller;
  get("clear").disabled = Boolean(controller);
  if (hadFocus) get(controller ? "stop" : "send").focus();
}

get("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = get("prompt").value;
  if (running || !prompt.trim()) return;
  get("prompt").value = "";
  answer(prompt);
});
get("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  get("composer").requestSubmit();
});
get("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
get("key").addEventListener("change", connect);
get("clear").addEventListener("click", () => {
  messages = [];
  get("turns").replaceChildren();
  get("intro").hidden = false;
  get("clear").hidden = true;
  get("prompt").focus();
});
get("form").addEventListener("change", () => {
  const [label, example] = GRAMMARS[get("form").value] ?? [];
  get("grammar_label").hidden = !label;
  if (!label) return;
  get("grammar_label").firstElementChild.textContent = label;
  get("grammar").value = example;
});
for (const radio of document.querySelectorAll("input[name=mode]")) {
  radio.addEventListener("change", () => {
    get("prompt").placeholder = mode() === "chat" ? "Ask something" : "Begin a text";
  });
}
connect();
