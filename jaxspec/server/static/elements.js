/** Making of elements. Texts are set as text, never as HTML. */

const SVG = "http://www.w3.org/2000/svg";

/** Return an element with a class, a text and attributes. */
export function element(name, { className = "", text = "", ...attributes } = {}, ...children) {
  return filled(document.createElement(name), { class: className, ...attributes }, text, children);
}

/** Return an SVG element with attributes and a text. */
export function drawn(name, { text = "", ...attributes } = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, text, children);
}

function filled(made, attributes, text, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== "") made.setAttribute(name, value);
  if (text !== "") made.textContent = text;
  made.append(...children);
  return made;
}

/** Return a number with one digit after the point if it is small. */
export const short = (number) => (number < 100 ? number.toFixed(1) : Math.round(number).toString());

/** Return a count with its noun. */
export const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
