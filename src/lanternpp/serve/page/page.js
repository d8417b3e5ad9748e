/** The page: a race is two streamed requests of the server's API, beside each other. Nothing comes from elsewhere. */

import { call, key } from "./api.js";
import { Dial } from "./dial.js";
import { Side, fresh } from "./side.js";

const IMAGES = "v1/images/generations";
const KEPT = 24; // pictures of the session
const BOTH = ["cfg", "temperature"]; // dials of both sides; a change of the method leaves them alone

const at = (id) => document.getElementById(id);
const dials = new Map(); // name -> Dial
let setup; // what the server says of its model
let plain, drafted; // the sides
let racing = null; // the AbortController of a running race

/** Ask what there is to show; where that wants a key, ask for the key. */
async function start() {
  at("trouble").textContent = "";
  try {
    setup = await (await call("page/setup")).json();
  } catch (error) {
    if (error.status === 401) ask();
    else at("trouble").textContent = sentence(error.message);
    return;
  }
  build();
  at("door").hidden = true;
  at("order").hidden = false;
  watch();
}

/** While the server measures which tree is fastest, say so. */
async function watch() {
  const health = await call("healthz").then((answer) => answer.json(), () => ({}));
  const { state, done, total } = health.calibration ?? {};
  const going = ["measuring", "paused"].includes(state);
  at("calibration").textContent = going
    ? `The server measures which tree is fastest here, while no picture is drawn: ${done} of ${total}.`
    : "";
  if (going) setTimeout(watch, 5000);
}

function ask() {
  if (key.get()) at("trouble").textContent = "That is not one of this server's keys.";
  key.set("");
  at("order").hidden = true;
  at("door").hidden = false;
  at("key").focus();
}

function build() {
  document.title = `lantern++ · ${setup.model}`;
  at("intro").textContent =
    `${setup.model} draws a picture of ${setup.length} codes, one pass of the network for each. ` +
    "Drafting decides several in one pass.";
  at("prompt").maxLength = setup.prompt;
  at("prompt").value = setup.examples[0] ?? "";
  at("examples").replaceChildren(...(setup.examples.length > 1 ? setup.examples.map(chip) : []));
  at("method").replaceChildren(...Object.keys(setup.methods).map((name) => new Option(name)));
  at("method").value = setup.method;
  at("sides").replaceChildren(fresh("panel"), fresh("panel"));
  const [base, side] = at("sides").children;
  [base.id, side.id] = ["base", "side"];
  const hooks = { changed: lead, warned: note, finished: keep };
  plain = new Side(base, "Plain decoding", setup, hooks);
  drafted = new Side(side, "With drafts", setup, hooks);
  for (const dial of dials.values()) dial.root.remove();
  for (const row of setup.dials) {
    dials.set(row.name, new Dial(row));
    if (row.more) at("measuring").before(dials.get(row.name).root);
    else at("few").append(dials.get(row.name).root);
  }
  choose();
  plain.clear(setup.baseline);
  drafted.clear(setup.method);
  for (const [kind, words] of Object.entries(setup.words)) {
    at("words").hidden = false;
    const [term, list] = [document.createElement("dt"), document.createElement("dd")];
    [term.textContent, list.textContent] = [kind, words.join(", ")];
    at("words").lastElementChild.append(term, list);
  }
  at("words").firstElementChild.textContent = `Words that ${setup.model} knows`;
  at("forget").hidden = !key.get();
  say("idle", "Plain decoding and your method draw the same seed side by side. Press Race.");
}

function chip(prompt) {
  const made = document.createElement("button");
  Object.assign(made, { type: "button", className: "chip", textContent: prompt.replace(/^a photo of /, "") });
  made.onclick = () => (at("prompt").value = prompt);
  return made;
}

/** Show the dials that the method reads, where it has them. */
function choose() {
  const method = setup.methods[at("method").value];
  at("about").textContent = method.about;
  for (const [name, dial] of dials) {
    const moved = BOTH.includes(name) && dial.changed ? dial.value : null;
    dial.adopt(method.dials[name]);
    if (moved !== null) dial.set(moved);
  }
}

/** What the two sides ask for. */
function requests() {
  const changed = [...dials].filter(([, dial]) => dial.changed).map(([name, dial]) => [name, dial.value]);
  const both = {
    prompt: at("prompt").value.trim(),
    seed: at("seed").valueAsNumber,
    n: Number(at("order").elements.count.value),
    stream: true,
    progress: true,
    ...setup.methods[at("method").value].sampling,
    ...Object.fromEntries(changed.filter(([name]) => BOTH.includes(name))),
  };
  const mine = { method: at("method").value, measure: at("measure").checked };
  return [{ ...both, method: setup.baseline }, { ...both, ...Object.fromEntries(changed), ...mine }];
}

async function race() {
  if (racing) return;
  const asked = requests();
  const control = (racing = new AbortController());
  say("running", "Drawing …");
  at("notes").replaceChildren();
  try {
    const sides = [plain, drafted];
    const answers = await Promise.all(asked.map((body) => call(IMAGES, body, control.signal)));
    sides.forEach((side, i) => side.clear(asked[i].method, asked[i].n, asked[i].seed));
    lead();
    await Promise.all(sides.map((side, i) => side.follow(answers[i], asked[i].prompt)));
    judge();
  } catch (error) {
    if (control.signal.aborted) say("stopped", "Stopped.");
    else say("wrong", sentence(error.message));
    if (error.status === 401) ask();
  } finally {
    control.abort(); // one side may be drawn still
    racing = null;
  }
}

const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.…]$/.test(text) ? "" : ".");

/** The line above the pictures; kind: idle, running, stopped, won or wrong. Wrong is read out at once. */
function say(kind, text, figure) {
  at("board").className = kind;
  at("lead").textContent = "";
  at("problem").textContent = kind === "wrong" ? text : "";
  at("verdict").textContent = kind === "wrong" ? "" : text;
  if (!figure) return;
  const large = document.createElement("strong");
  large.textContent = figure;
  at("verdict").prepend(large, " ");
}

/** Who leads; never read out, for it changes all the time. */
function lead() {
  const shares = [plain.percent, drafted.percent];
  at("lead").textContent = shares.some(Boolean)
    ? `Plain decoding ${shares[0]}\u00a0%, ${drafted.method} ${shares[1]}\u00a0%`
    : "Waiting for a free place.";
}

/** Who won. */
function judge() {
  const times = plain.seconds / drafted.seconds;
  const each = plain.pictures.length > 1 ? " a picture" : "";
  const mine = `${drafted.seconds.toFixed(2)} s${each}`;
  const took = `${mine} where plain decoding took ${plain.seconds.toFixed(2)} s`;
  if (times >= 1.005) say("won", `${drafted.method} won: ${took}.`, `${times.toFixed(1)}×`);
  else if (times > 0.995) say("won", `A draw: ${took}.`, "1.0×");
  else say("won", `Plain decoding won: ${drafted.method} took ${took}.`, `${times.toFixed(2)}×`);
}

/** What the model says of the prompt; both sides may say the same. */
function note(warnings) {
  const told = [...at("notes").children].map((line) => line.textContent);
  for (const warning of new Set(warnings.map(sentence))) {
    if (told.includes(warning)) continue;
    const line = document.createElement("p");
    line.textContent = warning;
    at("notes").append(line);
  }
}

/** A finished picture joins the session's. */
function keep(prompt, { image, facts, seed }) {
  const shot = fresh("shot");
  const words = prompt.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
  const start = words.join("-").slice(0, 48).replace(/-$/, "");
  const name = `${start}-${facts.method.replaceAll("+", "p")}-${seed}.png`;
  Object.assign(shot.querySelector("a"), { href: image.src, download: name, title: "Save this picture as PNG" });
  Object.assign(shot.querySelector("img"), { src: image.src, alt: `${prompt}, ${facts.method}, seed ${seed}` });
  const figures = `${facts.seconds.toFixed(2)} s · ${facts.codes_per_pass.toFixed(2)} codes per pass`;
  shot.querySelector(".prompt").textContent = prompt;
  shot.querySelector(".facts").textContent = `${facts.method} · seed ${seed} · ${figures}`;
  at("none").hidden = true;
  at("gallery").prepend(shot);
  for (const old of [...at("gallery").children].slice(KEPT)) {
    URL.revokeObjectURL(old.querySelector("a").href);
    old.remove();
  }
}

at("order").onsubmit = (event) => {
  event.preventDefault();
  race();
};
at("door").onsubmit = (event) => {
  event.preventDefault();
  key.set(at("key").value);
  at("key").value = "";
  start();
};
at("more").addEventListener("invalid", () => (at("more").open = true), true); // a closed field cannot be shown
at("stop").onclick = () => racing?.abort();
at("method").onchange = choose;
at("dice").onclick = () => (at("seed").value = Math.floor(Math.random() * 1e6));
at("forget").onclick = () => {
  key.set("");
  location.reload();
};
start();
