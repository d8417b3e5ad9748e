/** One side of a race: the panel that shows what is known of its pictures. */

import { events } from "./api.js";

const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);
const mean = (numbers) => sum(numbers) / numbers.length;
export const fresh = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);

/** The address of a picture that came as base64; it holds memory until it is revoked. */
function address(base64, type) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return URL.createObjectURL(new Blob([bytes], { type: `image/${type}` }));
}

/**
 * Which codes came in one pass, as two SVG paths: neighbouring passes in alternating tints.
 *
 * accepted: codes by each pass, of which the first `seen` can be seen. width: codes of a row; those beyond `columns` end
 * it and are not drawn.
 */
export function bands(accepted, seen, columns, width) {
  const paths = ["", ""];
  let from = 0;
  accepted.forEach((count, pass) => {
    const end = Math.min(from + count, seen);
    while (from < end) {
      const [row, column] = [Math.floor(from / width), from % width];
      const stop = Math.min(end, (row + 1) * width);
      const long = Math.min(stop - row * width, columns) - column;
      if (long > 0) paths[pass % 2] += `M${column} ${row}h${long}v1h-${long}z`;
      from = stop;
    }
  });
  return paths;
}

export class Side {
  /** setup: what the server says of its model. hooks: `changed()`, `warned(sentences)`, `finished(prompt, picture)`. */
  constructor(panel, title, setup, hooks) {
    Object.assign(this, { panel, title, setup, hooks, pictures: [] });
    this.one(".title").textContent = title;
    this.one(".pictures").style.aspectRatio = `${setup.columns} / ${setup.rows}`;
  }

  one(selector) {
    return this.panel.querySelector(selector);
  }

  /** Empty places for so many pictures of a method. */
  clear(method, count = 1, seed = 0) {
    const { columns, rows } = this.setup;
    this.method = method;
    this.one(".name").textContent = count > 1 ? `${method}, mean of ${count}` : method;
    this.one("progress").setAttribute("aria-label", `${this.title}: codes decided`);
    for (const { facts, image } of this.pictures) if (!facts) URL.revokeObjectURL(image.src);
    this.pictures = Array.from({ length: count }, (_, i) => {
      const frame = fresh("picture");
      frame.style.aspectRatio = `${columns} / ${rows}`;
      frame.querySelector("svg").setAttribute("viewBox", `0 0 ${columns} ${rows}`);
      return { frame, image: frame.querySelector("img"), seed: seed + i, accepted: [], seconds: 0 };
    });
    this.one(".pictures").replaceChildren(...this.pictures.map((picture) => picture.frame));
    this.one(".pictures").classList.toggle("several", count > 1);
    this.figures();
  }

  /** Show pictures grow as the events of an answer tell; throws as `call` does. */
  async follow(answer, prompt) {
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      this.hear(event, this.pictures[event.index], prompt);
      this.figures();
      this.hooks.changed();
    }
    if (!this.pictures.every((picture) => picture.facts)) throw new Error("the server ended before the pictures were finished");
  }

  hear(event, picture, prompt) {
    switch (event.type) {
      case "image_generation.accepted":
        this.hooks.warned(event.warnings);
        break;
      case "image_generation.progress":
        Object.assign(picture, { accepted: event.accepted_per_pass, seconds: event.seconds });
        break;
      case "image_generation.preview":
        this.show(picture, event, event.codes);
        break;
      case "image_generation.completed": {
        const { accepted_per_pass: accepted, seconds } = event.lanternpp;
        Object.assign(picture, { accepted, seconds, facts: event.lanternpp });
        this.show(picture, event, this.setup.length);
        this.hooks.finished(prompt, picture);
      }
    }
  }

  show({ frame, image, accepted, facts, seed }, event, seen) {
    const { length, columns, width } = this.setup;
    URL.revokeObjectURL(image.src);
    image.src = address(event.b64_json, event.output_format);
    image.alt = `${this.method}, seed ${seed}: ${facts ? "finished" : `${seen} of ${length} codes`}`;
    image.hidden = false;
    const paths = bands(accepted, seen, columns, width);
    frame.querySelectorAll("path").forEach((path, i) => path.setAttribute("d", paths[i]));
  }

  /** Codes of all its pictures. */
  get decided() {
    return sum(this.pictures.map((picture) => sum(picture.accepted)));
  }

  /** Of the codes that its pictures will have. */
  get percent() {
    return Math.round((100 * this.decided) / (this.setup.length * this.pictures.length));
  }

  /** Mean of its pictures: what their lanes computed from each one's first pass to its last. */
  get seconds() {
    return mean(this.pictures.map((picture) => picture.seconds));
  }

  figures() {
    const passes = sum(this.pictures.map((picture) => picture.accepted.length));
    const spent = this.pictures.map((picture) => picture.facts?.tv_spent).filter((value) => value !== undefined);
    const shown = [
      passes && this.seconds.toFixed(2),
      passes && (this.decided / passes).toFixed(2),
      passes && (passes / this.pictures.length).toFixed(0),
      spent.length && mean(spent).toFixed(1),
    ];
    this.panel.querySelectorAll("dd").forEach((cell, i) => (cell.textContent = shown[i] || "–"));
    const bar = this.one("progress");
    [bar.max, bar.value] = [this.setup.length * this.pictures.length, this.decided];
  }
}
