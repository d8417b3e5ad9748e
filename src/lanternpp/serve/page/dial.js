/** A dial of the page: a number within a range, or a choice. */

import { fromTemplate } from "./side.js";

export class Dial {
  /** row: its name, label, info, and range or choices, from /page/setup. */
  constructor(row) {
    this.row = row;
    this.root = fromTemplate(row.choices.length ? "choice" : "number");
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
    this.reset.onclick = () => this.set(this.default);
    this.range.oninput = () => this.set(this.range.value);
    this.field.oninput = () => this.moved();
  }

  /**
   * Show the value of a method. undefined: the method does not read this dial; null: the value has no name.
   * limits: [low, high], where these are not `low` and `high` of the row.
   */
  adopt(value, [low, high] = [this.row.low, this.row.high]) {
    this.default = value;
    this.root.hidden = this.field.disabled = value === undefined;
    if (this.range) {
      const { step } = this.row;
      const limits = { min: Math.min(low, value ?? low), max: Math.max(high, value ?? high) };
      Object.assign(this.range, { ...limits, step });
      Object.assign(this.field, { ...limits, step: step === 1 ? 1 : "any" });
      this.root.querySelectorAll(".range span").forEach((end, i) => (end.textContent = i ? limits.max : limits.min));
    } else {
      const unnamed = value === null ? [new Option("the method's own", "")] : [];
      this.field.replaceChildren(...unnamed, ...this.row.choices.map((choice) => new Option(choice)));
    }
    this.set(value);
  }

  set(value) {
    this.field.value = value ?? "";
    if (this.range) this.moved();
  }

  /** Update the slider and the reset button after the number has changed. */
  moved() {
    this.range.value = this.field.value || this.row.low;
    this.reset.disabled = !this.changed;
  }

  /** Whether the dial has another value than the method; an empty field stands for the method's value. */
  get changed() {
    return !this.field.disabled && this.field.value !== "" && this.field.value !== String(this.default);
  }

  get value() {
    return this.range ? this.field.valueAsNumber : this.field.value;
  }
}
