/** A field of a request that can be set: a number of a range, or a choice. */

import { fresh } from "./side.js";

export class Dial {
  /** row: its name, label, info and range or choices, as the server says. */
  constructor(row) {
    this.row = row;
    this.root = fresh(row.choices.length ? "choice" : "number");
    this.root.id = `dial-${row.name}`;
    this.field = this.root.querySelector("select, input[type=number]");
    this.range = this.root.querySelector("input[type=range]");
    this.field.id = `field-${row.name}`;
    this.field.setAttribute("aria-describedby", `info-${row.name}`);
    Object.assign(this.root.querySelector("label"), { htmlFor: this.field.id, textContent: row.label });
    Object.assign(this.root.querySelector(".quiet"), { id: `info-${row.name}`, textContent: row.info });
    if (!this.range) return;
    this.reset = this.root.querySelector("button");
    this.reset.title = `Reset ${row.label}`;
    this.reset.setAttribute("aria-label", this.reset.title);
    this.range.setAttribute("aria-label", `${row.label}, slider`);
    this.reset.onclick = () => this.set(this.own);
    this.range.oninput = () => this.set(this.range.value);
    this.field.oninput = () => this.moved();
  }

  /** Show a method's own value; undefined: the method does not read it, null: the value has no name. */
  adopt(own) {
    this.own = own;
    this.root.hidden = this.field.disabled = own === undefined;
    if (this.range) {
      const { low, high, step } = this.row;
      const limits = { min: Math.min(low, own ?? low), max: Math.max(high, own ?? high) };
      Object.assign(this.range, { ...limits, step });
      Object.assign(this.field, { ...limits, step: step === 1 ? 1 : "any" });
      this.root.querySelectorAll(".range span").forEach((end, i) => (end.textContent = i ? limits.max : limits.min));
    } else {
      const unnamed = own === null ? [new Option("the method's own", "")] : [];
      this.field.replaceChildren(...unnamed, ...this.row.choices.map((choice) => new Option(choice)));
    }
    this.set(own);
  }

  set(value) {
    this.field.value = value ?? "";
    if (this.range) this.moved();
  }

  /** The number was changed: slider and reset follow. */
  moved() {
    this.range.value = this.field.value || this.row.low;
    this.reset.disabled = !this.changed;
  }

  /** Whether it is set to something else than the method has; an empty one is the method's own. */
  get changed() {
    return !this.field.disabled && this.field.value !== "" && this.field.value !== String(this.own);
  }

  get value() {
    return this.range ? this.field.valueAsNumber : this.field.value;
  }
}
