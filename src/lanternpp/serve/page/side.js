/** A side of a race: the panel with its pictures and figures. */

import { events } from "./api.js";

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const mean = (numbers) => sum(numbers) / numbers.length;
export const fromTemplate = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);

/** Return an object URL for a picture in base64; it must be revoked to free its memory. */
function objectURL(base64, type) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return URL.createObjectURL(new Blob([bytes], { type: `image/${type}` }));
}

/**
 * Return the codes of each pass as rectangles in two SVG paths, for passes of even and of odd number.
 *
 * accepted: number of codes by pass. codesShown: number of codes that the picture shows. width: codes of a row; those beyond
 * `columns` only end the row and are not drawn.
 */
export function bands(accepted, codesShown, columns, width) {
  const paths = ["", ""];
  let code = 0;
  accepted.forEach((count, pass) => {
    const passEnd = Math.min(code + count, codesShown);
    while (code < passEnd) {
      const [row, column] = [Math.floor(code / width), code % width];
      const rowEnd = Math.min(passEnd, (row + 1) * width);
      const length = Math.min(rowEnd - row * width, columns) - column;
      if (length > 0) paths[pass % 2] += `M${column} ${row}h${length}v1h-${length}z`;
      code = rowEnd;
    }
  });
  return paths;
}

export class Side {
  /** setup: the answer of /page/setup. hooks: `changed()`, `warned(sentences)`, `finished(prompt, picture)`. */
  constructor(panel, title, setup, hooks) {
    Object.assign(this, { panel, title, setup, hooks, pictures: [] });
    this.find(".title").textContent = title;
    this.find(".pictures").style.aspectRatio = `${setup.columns} / ${setup.rows}`;
  }

  find(selector) {
    return this.panel.querySelector(selector);
  }

  /** Show empty frames for `count` pictures of a method, with the seeds from `seed` on. */
  clear(method, count = 1, seed = 0) {
    const { columns, rows } = this.setup;
    this.method = method;
    this.find(".name").textContent = count > 1 ? `${method}, mean of ${count}` : method;
    this.find("progress").setAttribute("aria-label", `${this.title}: codes decided`);
    for (const { facts, image } of this.pictures) if (!facts) URL.revokeObjectURL(image.src);
    this.pictures = Array.from({ length: count }, (_, i) => {
      const frame = fromTemplate("picture");
      frame.style.aspectRatio = `${columns} / ${rows}`;
      frame.querySelector("svg").setAttribute("viewBox", `0 0 ${columns} ${rows}`);
      return { frame, image: frame.querySelector("img"), seed: seed + i, accepted: [], seconds: 0 };
    });
    this.find(".pictures").replaceChildren(...this.pictures.map((picture) => picture.frame));
    this.find(".pictures").classList.toggle("several", count > 1);
    this.figures();
  }

  /** Update the pictures with the events of a response; throws as `call` does. */
  async follow(response, prompt) {
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      this.handle(event, this.pictures[event.index], prompt);
      this.figures();
      this.hooks.changed();
    }
    if (!this.pictures.every((picture) => picture.facts)) throw new Error("the server ended before the pictures were finished");
  }

  handle(event, picture, prompt) {
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

  show({ frame, image, accepted, facts, seed }, event, codesShown) {
    const { length, columns, width } = this.setup;
    URL.revokeObjectURL(image.src);
    image.src = objectURL(event.b64_json, event.output_format);
    image.alt = `${this.method}, seed ${seed}: ${facts ? "finished" : `${codesShown} of ${length} codes`}`;
    image.hidden = false;
    const paths = bands(accepted, codesShown, columns, width);
    frame.querySelectorAll("path").forEach((path, i) => path.setAttribute("d", paths[i]));
  }

  /** Number of decided codes of all pictures. */
  get decided() {
    return sum(this.pictures.map((picture) => sum(picture.accepted)));
  }

  /** The decided codes in per cent of all codes. */
  get percent() {
    return Math.round((100 * this.decided) / (this.setup.length * this.pictures.length));
  }

  /** Mean over the pictures of the seconds that the engine computed from the first pass to the last. */
  get seconds() {
    return mean(this.pictures.map((picture) => picture.seconds));
  }

  figures() {
    const passes = sum(this.pictures.map((picture) => picture.accepted.length));
    const costs = this.pictures.map((picture) => picture.facts?.tv_cost).filter((value) => value !== undefined);
    const figures = [
      passes && this.seconds.toFixed(2),
      passes && (this.decided / passes).toFixed(2),
      passes && (passes / this.pictures.length).toFixed(0),
      costs.length && mean(costs).toFixed(1),
    ];
    this.panel.querySelectorAll("dd").forEach((cell, i) => (cell.textContent = figures[i] || "–"));
    const bar = this.find("progress");
    [bar.max, bar.value] = [this.setup.length * this.pictures.length, this.decided];
  }
}
