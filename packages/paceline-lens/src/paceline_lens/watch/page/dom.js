// Elements are made from text and never from markup: a value of a script can hold anything.

/** An element. `attributes` has its attributes; `style` in it is an object. A null child is left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") {
      for (const [property, setting] of Object.entries(value)) made.style.setProperty(property, setting);
    } else {
      made.setAttribute(name, value === true ? "" : value);
    }
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** A sentence in which `words` between backticks are code. */
export function sentence(text) {
  return text.split("`").map((part, index) => (index % 2 ? element("code", {}, part) : part));
}

/** Gives `target` new children, and changes only what differs: focus, selected text and open details stay. */
export function show(target, ...children) {
  const wanted = document.createElement("div");
  wanted.append(...children.flat().filter((child) => child !== null && child !== undefined));
  matchChildren(target, wanted);
}

function matchChildren(target, wanted) {
  const children = [...wanted.childNodes];
  while (target.childNodes.length > children.length) target.lastChild.remove();
  children.forEach((child, index) => {
    const present = target.childNodes[index];
    if (present === undefined) target.append(child);
    else match(present, child);
  });
}

function match(present, wanted) {
  if (present.nodeName !== wanted.nodeName) {
    present.replaceWith(wanted);
  } else if (present.nodeType === Node.TEXT_NODE) {
    if (present.data !== wanted.data) present.data = wanted.data;
  } else {
    matchAttributes(present, wanted);
    matchChildren(present, wanted);
  }
}

function matchAttributes(present, wanted) {
  for (const { name } of [...present.attributes]) {
    // Whether details are open is the reader's choice; a style is not an attribute to the page's security policy.
    if (name !== "open" && name !== "style" && !wanted.hasAttribute(name)) present.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (name !== "style" && present.getAttribute(name) !== value) present.setAttribute(name, value);
  }
  if (present.style.cssText !== wanted.style.cssText) present.style.cssText = wanted.style.cssText;
}
