/** One answer on the page: its tokens by origin, its rounds, its speed, and what is known of the token in view. */

import { counted, element, short } from "./elements.js";

const LOOKUPS = ["ngram", "suffix"];  // methods that copy from the text; all others have a model or a head
const HINT = "Point at a token, or move through the text with the arrow keys.";

export class Answer {
  /** drafts: whether the request may have drafts. */
  constructor(title, drafts) {
    this.tokens = [];  // origin of each token
    this.spans = [];
    this.rounds = [];  // {drafts, accepted, tokens} by round
    this.content = "";
    this.at = -1;
    this.before = 0;  // number of tokens of the first event
    this.gaps = [];  // milliseconds between events with tokens
    this.last = null;  // time of the last event with tokens
    const className = drafts ? "tokens" : "tokens undrafted";
    this.text = element("div", { className, tabindex: "0", role: "group", "aria-label": `Answer, ${title}` });
    this.speed = element("span", { className: "speed" });
    this.note = element("p", { className: "note", role: "status", text: "Waiting for the first token" });
    const head = element("div", { className: "head" }, element("h3", { text: title }), this.speed);
    this.element = element("article", { className: "answer" }, head, this.text, this.note);
    this.text.addEventListener("keydown", (event) => this.move(event));
    this.text.addEventListener("pointerover", (event) => this.show(this.spans.indexOf(event.target)));
    this.text.addEventListener("click", (event) => this.show(this.spans.indexOf(event.target)));
    this.text.addEventListener("blur", () => this.show(-1));
  }

  /** Add an event of the stream: its text, and the origins of its tokens. */
  add(choice) {
    this.content += choice.delta ? (choice.delta.content ?? "") : choice.text;
    const origins = choice.token_origins ?? [];
    if (!origins.length) return;
    const now = performance.now();
    if (this.last === null) this.before = origins.length;
    else this.gaps.push(now - this.last);
    this.last = now;
    for (const origin of origins) this.append(origin);
    this.text.classList.toggle("counts", origins[0].num_legal !== null);
    const rate = this.rate();
    if (rate) this.speed.replaceChildren(element("b", { text: short(rate) }), " tokens/s");
    if (this.at < 0) this.note.textContent = "Writing";
  }

  append(origin) {
    const round = (this.rounds[origin.round] ??= { drafts: origin.num_drafts, accepted: 0, tokens: [] });
    const drafted = origin.origin === "draft";
    round.accepted += drafted;
    round.tokens.push(origin);
    const who = !drafted ? "target" : LOOKUPS.includes(origin.method) ? "lookup" : "model";
    const marks = [origin.position === 0 ? "first" : "", origin.text ? "" : "empty"];
    const legal = origin.num_legal === null ? "" : String(origin.num_legal);
    const className = ["token", who, ...marks].filter(Boolean).join(" ");
    const span = element("span", { className, text: origin.text, "data-legal": legal });
    this.tokens.push(origin);
    this.spans.push(span);
    this.text.append(span);
  }

  /** Return the longest gap between two events, in seconds, if it is far from the others, as if programs compiled. */
  pause() {
    const sorted = [...this.gaps].sort((a, b) => a - b);
    const longest = sorted.at(-1) ?? 0;
    return longest > Math.max(2000, 20 * sorted[sorted.length >> 1]) ? longest / 1000 : 0;
  }

  /** Return tokens a second after the first event, without the pause; null before there are two events. */
  rate() {
    const seconds = this.gaps.reduce((sum, gap) => sum + gap, 0) / 1000 - this.pause();
    return seconds > 0 ? (this.tokens.length - this.before) / seconds : null;
  }

  /** End the answer. how: words for the way in which it ended. */
  end(how) {
    const drafted = this.tokens.filter((token) => token.origin === "draft").length;
    const share = Math.round((100 * drafted) / this.tokens.length);
    const rounds = Object.keys(this.rounds).length;
    const said = `${counted(this.tokens.length, "token")} in ${counted(rounds, "round")}`;
    const single = this.tokens.map((token) => token.num_legal).filter((legal) => legal === 1).length;
    const forced = single ? ` ${single} had one legal choice.` : "";
    this.summary = this.tokens.length ? `${how}${said}, ${share}% from drafts.${forced} ${HINT}` : "No answer.";
    this.show(-1);
  }

  fail(message) {
    this.element.append(element("p", { className: "error", role: "alert", text: message }));
    this.end("Broken off: ");
  }

  /** Describe the token at an index below the text, and mark it. index: -1 for none. */
  show(index) {
    this.spans[this.at]?.classList.remove("at");
    this.at = index;
    this.spans[index]?.classList.add("at");
    this.note.textContent = index < 0 ? (this.summary ?? "Writing") : this.described(index);
  }

  described(index) {
    const token = this.tokens[index];
    const round = this.rounds[token.round];
    const who = token.origin === "draft"
      ? `draft ${token.position + 1} of ${token.num_drafts}, accepted, by ${token.method}`
      : `the model's own, after ${round.accepted} of ${token.num_drafts} drafts`;
    const legal = token.num_legal === null ? "" : `; ${counted(token.num_legal, "legal token")}`;
    return `${token.text ? JSON.stringify(token.text) : "no text of its own"}: round ${token.round + 1}, ${who}${legal}`;
  }

  /** Move to another token by the arrow keys: left and right by token, up and down by round. */
  move(event) {
    const last = this.tokens.length - 1;
    const byRound = (step) => {
      const round = (this.tokens[this.at]?.round ?? -step) + step;
      const found = this.tokens.findIndex((token) => token.round === round);
      return found < 0 ? this.at : found;
    };
    const moves = {
      ArrowRight: () => Math.min(this.at + 1, last),
      ArrowLeft: () => Math.max(this.at - 1, 0),
      ArrowDown: () => byRound(1),
      ArrowUp: () => byRound(-1),
      Home: () => 0,
      End: () => last,
    };
    if (last < 0 || !moves[event.key]) return;
    event.preventDefault();
    this.show(moves[event.key]());
  }
}
