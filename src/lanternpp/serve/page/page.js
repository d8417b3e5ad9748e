/** The page: a race is two streamed requests of the server's API, shown side by side. Nothing is loaded from other hosts. */

import { call, key } from "./api.js";
import { Dial } from "./dial.js";
import { Side, fromTemplate } from "./side.js";

const IMAGES = "v1/images/generations";
const MAX_SHOTS = 24; // pictures that the session keeps
const BOTH = ["cfg", "temperature"]; // dials that apply to both sides; they keep their values when the method changes

const byId = (id) => document.getElementById(id);
const dials = new Map(); // name -> Dial
let setup; // what the server says of its model
let plain, drafted; // the sides
let racing = null; // the AbortController of a running race

/** Load what the page shows; where the server needs a key, ask for it. */
async function start() {
  byId("trouble").textContent = "";
  try {
    setup = await (await call("page/setup")).json();
  } catch (error) {
    if (error.status === 401) askForKey();
    else byId("trouble").textContent = sentence(error.message);
    return;
  }
  build();
  byId("key-form").hidden = true;
  byId("race-form").hidden = false;
}

function askForKey() {
  if (key.get()) byId("trouble").textContent = "That is not one of this server's keys.";
  key.set("");
  byId("race-form").hidden = true;
  byId("key-form").hidden = false;
  byId("key").focus();
}

function build() {
  document.title = `lantern++ · ${setup.model}`;
  byId("intro").textContent =
    `${setup.model} draws a picture of ${setup.length} codes, one pass of the network for each. ` +
    "Drafting decides several in one pass.";
  byId("prompt").maxLength = setup.prompt;
  byId("prompt").value ||= setup.examples[0] ?? "";
  byId("examples").replaceChildren(...(setup.examples.length > 1 ? setup.examples.map(chip) : []));
  byId("method").replaceChildren(...Object.keys(setup.methods).map((name) => new Option(name)));
  byId("method").value = setup.method;
  byId("sides").replaceChildren(fromTemplate("panel"), fromTemplate("panel"));
  const [base, side] = byId("sides").children;
  [base.id, side.id] = ["base", "side"];
  const hooks = { changed: lead, warned: note, finished: keep };
  plain = new Side(base, "Plain decoding", setup, hooks);
  drafted = new Side(side, "With drafts", setup, hooks);
  for (const dial of dials.values()) dial.root.remove();
  for (const row of setup.dials) {
    dials.set(row.name, new Dial(row));
    if (row.more) byId("measuring").before(dials.get(row.name).root);
    else byId("few").append(dials.get(row.name).root);
  }
  choose();
  plain.clear(setup.baseline);
  drafted.clear(setup.method);
  byId("words").lastElementChild.replaceChildren();
  for (const [kind, words] of Object.entries(setup.words)) {
    byId("words").hidden = false;
    const [term, list] = [document.createElement("dt"), document.createElement("dd")];
    [term.textContent, list.textContent] = [kind, words.join(", ")];
    byId("words").lastElementChild.append(term, list);
  }
  byId("words").firstElementChild.textContent = `Words that ${setup.model} knows`;
  byId("forget").hidden = !key.get();
  say("idle", "Plain decoding and your method draw the same seed side by side. Press Race.");
}

function chip(prompt) {
  const made = document.createElement("button");
  Object.assign(made, { type: "button", className: "chip", textContent: prompt.replace(/^a photo of /, "") });
  made.onclick = () => (byId("prompt").value = prompt);
  return made;
}

/** Show the dials that the method reads, at the method's values. */
function choose() {
  const method = setup.methods[byId("method").value];
  byId("about").textContent = method.about;
  for (const [name, dial] of dials) {
    const moved = BOTH.includes(name) && dial.changed ? dial.value : null;
    dial.adopt(method.dials[name], method.limits[name]);
    if (moved !== null) dial.set(moved);
  }
}

/** The bodies of the requests of the two sides. */
function requests() {
  const changed = [...dials].filter(([, dial]) => dial.changed).map(([name, dial]) => [name, dial.value]);
  const both = {
    prompt: byId("prompt").value.trim(),
    seed: byId("seed").valueAsNumber,
    n: Number(byId("race-form").elements.count.value),
    stream: true,
    progress: true,
    ...setup.methods[byId("method").value].sampling,
    ...Object.fromEntries(changed.filter(([name]) => BOTH.includes(name))),
  };
  const drafting = { method: byId("method").value, measure_tv: byId("measure").checked };
  return [{ ...both, method: setup.baseline }, { ...both, ...Object.fromEntries(changed), ...drafting }];
}

async function race() {
  if (racing) return;
  const bodies = requests();
  const control = (racing = new AbortController());
  say("running", "Drawing …");
  byId("notes").replaceChildren();
  try {
    const sides = [plain, drafted];
    const answers = await Promise.all(bodies.map((body) => call(IMAGES, body, control.signal)));
    sides.forEach((side, i) => side.clear(bodies[i].method, bodies[i].n, bodies[i].seed));
    lead();
    await Promise.all(sides.map((side, i) => side.follow(answers[i], bodies[i].prompt)));
    showWinner();
  } catch (error) {
    if (control.signal.aborted) say("stopped", "Stopped.");
    else say("wrong", sentence(error.message));
    if (error.status === 401) askForKey();
  } finally {
    control.abort(); // the other side may still be running
    racing = null;
  }
}

const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.…]$/.test(text) ? "" : ".");

/** The line above the pictures; kind: idle, running, stopped, won or wrong. Wrong is read out at once. */
function say(kind, text, figure) {
  byId("board").className = kind;
  byId("lead").textContent = "";
  byId("problem").textContent = kind === "wrong" ? text : "";
  byId("verdict").textContent = kind === "wrong" ? "" : text;
  if (!figure) return;
  const large = document.createElement("strong");
  large.textContent = figure;
  byId("verdict").prepend(large, " ");
}

/** Show how far both sides are. Screen readers do not read this out, since it changes all the time. */
function lead() {
  const shares = [plain.percent, drafted.percent];
  byId("lead").textContent = shares.some(Boolean)
    ? `Plain decoding ${shares[0]}\u00a0%, ${drafted.method} ${shares[1]}\u00a0%`
    : "Waiting in the queue.";
}

/** Show which side won. */
function showWinner() {
  const times = plain.seconds / drafted.seconds;
  const each = plain.pictures.length > 1 ? " a picture" : "";
  const mine = `${drafted.seconds.toFixed(2)} s${each}`;
  const took = `${mine} where plain decoding took ${plain.seconds.toFixed(2)} s`;
  if (times >= 1.005) say("won", `${drafted.method} won: ${took}.`, `${times.toFixed(1)}×`);
  else if (times > 0.995) say("won", `A draw: ${took}.`, "1.0×");
  else say("won", `Plain decoding won: ${drafted.method} took ${took}.`, `${times.toFixed(2)}×`);
}

/** Show the model's warnings about the prompt, each once: both sides report the same ones. */
function note(warnings) {
  const shown = [...byId("notes").children].map((line) => line.textContent);
  for (const warning of new Set(warnings.map(sentence))) {
    if (shown.includes(warning)) continue;
    const line = document.createElement("p");
    line.textContent = warning;
    byId("notes").append(line);
  }
}

/** Add a finished picture to those of the session. */
function keep(prompt, { image, facts, seed }) {
  const shot = fromTemplate("shot");
  const words = prompt.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
  const start = words.join("-").slice(0, 48).replace(/-$/, "");
  const name = `${start}-${facts.method.replaceAll("+", "p")}-${seed}.png`;
  Object.assign(shot.querySelector("a"), { href: image.src, download: name, title: "Save this picture as PNG" });
  Object.assign(shot.querySelector("img"), { src: image.src, alt: `${prompt}, ${facts.method}, seed ${seed}` });
  const figures = `${facts.seconds.toFixed(2)} s · ${facts.codes_per_pass.toFixed(2)} codes per pass`;
  shot.querySelector(".prompt").textContent = prompt;
  shot.querySelector(".facts").textContent = `${facts.method} · seed ${seed} · ${figures}`;
  byId("none").hidden = true;
  byId("gallery").prepend(shot);
  for (const old of [...byId("gallery").children].slice(MAX_SHOTS)) {
    URL.revokeObjectURL(old.querySelector("a").href);
    old.remove();
  }
}

byId("race-form").onsubmit = (event) => {
  event.preventDefault();
  race();
};
byId("key-form").onsubmit = (event) => {
  event.preventDefault();
  key.set(byId("key").value);
  byId("key").value = "";
  start();
};
byId("more").addEventListener("invalid", () => (byId("more").open = true), true); // the browser cannot show an invalid field that is folded away
byId("stop").onclick = () => racing?.abort();
byId("method").onchange = choose;
byId("dice").onclick = () => (byId("seed").value = Math.floor(Math.random() * 1e6));
byId("forget").onclick = () => {
  key.set("");
  location.reload();
};
start();
