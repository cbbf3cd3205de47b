/** Figures below a turn: acceptance by position, speed with and without drafts, and the rounds as a table. */

import { counted, drawn, element, short } from "./elements.js";

/** Return the figures of one or two answers. plain: answer without drafts, or null. */
export function figures(drafted, plain) {
  const made = element("section", { className: "figures", "aria-label": "Figures" });
  const proposing = drafted.rounds.filter((round) => round?.drafts);
  const drafts = element("div", {}, element("h3", { text: "Accepted drafts by position" }));
  if (proposing.length) {
    drafts.append(...acceptance(proposing));
  } else {
    drafts.append(element("p", { text: "No round had drafts. Speculation is off, or did not pay, or found none." }));
  }
  made.append(drafts);
  const speeds = [["with drafts", drafted.rate(), "bar"], ["no drafts", plain?.rate(), "plain"]].filter((row) => row[1]);
  if (speeds.length) {
    const said = plain ? [element("p", { text: compared(drafted, plain) })] : [];
    const pause = Math.max(drafted.pause(), plain?.pause() ?? 0);
    if (pause) said.push(element("p", { text: `Not counted: a pause of ${short(pause)} s, as when programs compile.` }));
    made.append(element("div", {}, element("h3", { text: "Tokens a second" }), speed(speeds), ...said));
  }
  made.append(table(drafted));
  return made;
}

/** Return the chart of the share of rounds that accepted the draft at each position, and a line about it. */
function acceptance(rounds) {
  const most = Math.max(...rounds.map((round) => round.drafts));
  const shares = Array.from({ length: most }, (_, position) => {
    const tried = rounds.filter((round) => round.drafts > position).length;
    return { tried, accepted: rounds.filter((round) => round.accepted > position).length };
  });
  const width = 300 / most;
  const chart = drawn("svg", { viewBox: "0 0 300 130", role: "img" });
  const words = shares.map(({ tried, accepted }, i) => `position ${i + 1}: ${accepted} of ${tried}`);
  chart.append(drawn("title", { text: `Accepted drafts, ${words.join(", ")}` }));
  shares.forEach(({ tried, accepted }, i) => {
    const share = accepted / tried;
    const bar = { x: i * width + width * 0.14, width: width * 0.72, rx: Math.min(3, width / 4) };
    const middle = { x: (i + 0.5) * width, "text-anchor": "middle" };
    chart.append(drawn("rect", { class: "frame", ...bar, y: 16, height: 92 }));
    chart.append(drawn("rect", { class: "bar", ...bar, y: 108 - 92 * share, height: 92 * share }));
    if (width > 24) chart.append(drawn("text", { ...middle, y: 11, text: `${Math.round(100 * share)}%` }));
    chart.append(drawn("text", { class: "soft", ...middle, y: 124, text: i + 1 }));
  });
  const accepted = rounds.reduce((sum, round) => sum + round.accepted, 0);
  const proposed = rounds.reduce((sum, round) => sum + round.drafts, 0);
  const mean = (1 + accepted / rounds.length).toFixed(2);
  const line = `${accepted} of ${counted(proposed, "draft")} accepted; ${mean} tokens a round.`;
  return [chart, element("p", { text: line })];
}

/** Return bars of tokens a second. rows: [label, value, class]. */
function speed(rows) {
  const most = Math.max(...rows.map((row) => row[1]));
  const words = rows.map(([label, value]) => `${label} ${short(value)}`).join(", ");
  const chart = drawn("svg", { viewBox: `0 0 300 ${rows.length * 40}`, role: "img" });
  chart.append(drawn("title", { text: `Tokens a second: ${words}` }));
  rows.forEach(([label, value, kind], i) => {
    const y = i * 40;
    const width = Math.max(2, (230 * value) / most);
    chart.append(drawn("text", { class: "soft", x: 1, y: y + 12, text: label }));
    chart.append(drawn("rect", { class: kind, x: 1, y: y + 18, width, height: 14, rx: 3 }));
    chart.append(drawn("text", { x: width + 8, y: y + 29, text: short(value) }));
  });
  return chart;
}

/** Return a line that compares the speeds and the texts of two answers. */
function compared(drafted, plain) {
  const [fast, slow] = [drafted.rate(), plain.rate()];
  const ratio = fast && slow ? `${(fast / slow).toFixed(2)} times the speed. ` : "";
  const written = (answer) => answer.tokens.map((token) => token.text).join("");
  if (written(drafted) === written(plain)) return `${ratio}Both texts are the same.`;
  return `${ratio}The texts differ, as samples without a seed do. Greedy ones may where rounding decides.`;
}

/** Return the rounds of an answer as a table, which is filled when it is opened. */
function table(answer) {
  const made = element("details", {}, element("summary", { text: "All rounds as a table" }));
  const fill = () => {
    const names = [["Round", "number"], ["Proposed", "number"], ["Accepted", "number"], ["Drafts", ""], ["Model", ""]];
    const head = element("tr", {}, ...names.map(([text, className]) => element("th", { text, className, scope: "col" })));
    const rows = answer.rounds.map((round, number) => {
      const said = (origin) => round.tokens.filter((token) => token.origin === origin).map((token) => token.text).join("");
      const counts = [number + 1, round.drafts, round.accepted].map((text) => element("td", { className: "number", text }));
      const texts = ["draft", "target"].map((origin) => element("td", { className: "text", text: said(origin) }));
      return element("tr", {}, ...counts, ...texts);
    });
    const whole = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
    made.append(element("div", { className: "scroll", tabindex: "0", role: "region", "aria-label": "Rounds" }, whole));
  };
  made.addEventListener("toggle", fill, { once: true });
  return made;
}
