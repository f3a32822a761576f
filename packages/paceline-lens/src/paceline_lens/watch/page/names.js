// `NamePicker`: finds logged values by their names, of which there may be 10,000, and says which are to be shown.

import { element, show } from "./dom.js";
import { number } from "./format.js";

const MOST_OPTIONS = 50;

export class NamePicker {
  /** `choose(name)` is called with a name that was picked; picking it again takes it away. */
  constructor(input, list, choose) {
    this.input = input;
    this.list = list;
    this.choose = choose;
    this.names = [];
    this.chosen = new Set();
    this.active = -1;
    input.addEventListener("input", () => this.open());
    input.addEventListener("click", () => this.open());
    input.addEventListener("keydown", (event) => this.key(event));
    input.addEventListener("blur", () => this.close());
    // The list must not take the focus: leaving the input closes it.
    list.addEventListener("mousedown", (event) => event.preventDefault());
    list.addEventListener("click", (event) => this.pick(event.target.closest("[data-index]")));
  }

  update(names, chosen) {
    this.names = names;
    this.chosen = new Set(chosen);
    if (!this.list.hidden) this.show();
  }

  open() {
    this.active = -1;
    this.list.hidden = false;
    this.input.setAttribute("aria-expanded", "true");
    this.show();
  }

  close() {
    this.list.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
    this.input.removeAttribute("aria-activedescendant");
  }

  /** Names in which every word of the input occurs. */
  matches() {
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    return this.names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  }

  show() {
    const matches = this.matches();
    this.options = matches.slice(0, MOST_OPTIONS);
    this.active = Math.min(this.active, this.options.length - 1);
    const rows = this.options.map((name, index) =>
      element(
        "li",
        {
          id: `option-${index}`,
          role: "option",
          "data-index": index,
          "aria-selected": this.chosen.has(name) ? "true" : "false",
          class: index === this.active ? "active" : null,
        },
        name,
      ),
    );
    const rest = matches.length - this.options.length;
    if (rest > 0)
      rows.push(element("li", { class: "more", role: "presentation" }, `and ${number(rest)} more: type a part of the name`));
    if (matches.length === 0)
      rows.push(element("li", { class: "more", role: "presentation" }, "no logged value has such a name"));
    show(this.list, rows);
    if (this.active >= 0) {
      this.input.setAttribute("aria-activedescendant", `option-${this.active}`);
      this.list.children[this.active].scrollIntoView({ block: "nearest" });
    } else {
      this.input.removeAttribute("aria-activedescendant");
    }
  }

  pick(option) {
    if (option === null || option === undefined) return;
    this.choose(this.options[Number(option.dataset.index)]);
  }

  key(event) {
    if (event.key === "Escape" && !this.list.hidden) {
      event.preventDefault(); // a browser would empty the input
      this.close();
      return;
    }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step !== undefined) {
      event.preventDefault();
      if (this.list.hidden) this.open();
      const last = this.options.length - 1;
      this.active = Math.min(last, Math.max(0, this.active + step));
      this.show();
    }
    if (event.key === "Enter" && !this.list.hidden) {
      event.preventDefault();
      this.pick(this.list.children[Math.max(0, this.active)]);
    }
  }
}
