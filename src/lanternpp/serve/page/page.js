/** The page: a race is two streamed requests of the server's API, shown side by side. Nothing is loaded from other hosts. */

import { call, key } from "./api.js";
import { Dial } from "./dial.js";
import { Side, fromTemplate } from "./side.js";

const IMAGES = "v1/images/generations";
const MAX_SHOTS = 24; // finished pictures in the gallery
const SHARED_DIALS = ["cfg", "temperature"]; // of both sides; they keep their values when the method changes

const byId = (id) => document.getElementById(id);
const dials = new Map(); // name -> Dial
let setup; // the answer of /page/setup
let plain, drafted; // the sides
let racing = null; // the AbortController of a running race

/** Load the setup and build the page; where the server needs a key, ask for it. */
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
  const [plainPanel, draftedPanel] = byId("sides").children;
  plainPanel.id = "base";
  draftedPanel.id = "side";
  const hooks = { changed: showLead, warned: showWarnings, finished: addToGallery };
  plain = new Side(plainPanel, "Plain decoding", setup, hooks);
  drafted = new Side(draftedPanel, "With drafts", setup, hooks);
  for (const dial of dials.values()) dial.root.remove();
  for (const row of setup.dials) {
    dials.set(row.name, new Dial(row));
    if (row.more) byId("measuring").before(dials.get(row.name).root);
    else byId("few").append(dials.get(row.name).root);
  }
  adoptMethod();
  plain.clear(setup.baseline);
  drafted.clear(setup.method);
  byId("words").lastElementChild.replaceChildren();
  for (const [kind, words] of Object.entries(setup.words)) {
    byId("words").hidden = false;
    byId("words").lastElementChild.append(element("dt", kind), element("dd", words.join(", ")));
  }
  byId("words").firstElementChild.textContent = `Words that ${setup.model} knows`;
  byId("forget").hidden = !key.get();
  say("idle", "Plain decoding and your method draw the same seed side by side. Press Race.");
}

function element(tag, textContent) {
  return Object.assign(document.createElement(tag), { textContent });
}

/** Return a button that puts an example into the field of the prompt. */
function chip(prompt) {
  const button = element("button", prompt.replace(/^a photo of /, ""));
  Object.assign(button, { type: "button", className: "chip" });
  button.onclick = () => (byId("prompt").value = prompt);
  return button;
}

/** Show the dials that the chosen method reads, at the method's values. */
function adoptMethod() {
  const method = setup.methods[byId("method").value];
  byId("about").textContent = method.about;
  for (const [name, dial] of dials) {
    const chosenValue = SHARED_DIALS.includes(name) && dial.changed ? dial.value : null;
    dial.adopt(method.dials[name], method.limits[name]);
    if (chosenValue !== null) dial.set(chosenValue);
  }
}

/** Return the bodies of the requests of the two sides. */
function requests() {
  const changed = [...dials].filter(([, dial]) => dial.changed).map(([name, dial]) => [name, dial.value]);
  const shared = {
    prompt: byId("prompt").value.trim(),
    seed: byId("seed").valueAsNumber,
    n: Number(byId("race-form").elements.count.value),
    stream: true,
    progress: true,
    ...setup.methods[byId("method").value].sampling,
    ...Object.fromEntries(changed.filter(([name]) => SHARED_DIALS.includes(name))),
  };
  const drafting = { method: byId("method").value, measure_tv: byId("measure").checked };
  return [{ ...shared, method: setup.baseline }, { ...shared, ...Object.fromEntries(changed), ...drafting }];
}

async function race() {
  if (racing) return;
  const bodies = requests();
  const controller = (racing = new AbortController());
  say("running", "Drawing …");
  byId("notes").replaceChildren();
  try {
    const sides = [plain, drafted];
    const responses = await Promise.all(bodies.map((body) => call(IMAGES, body, controller.signal)));
    sides.forEach((side, i) => side.clear(bodies[i].method, bodies[i].n, bodies[i].seed));
    showLead();
    await Promise.all(sides.map((side, i) => side.follow(responses[i], bodies[i].prompt)));
    showWinner();
  } catch (error) {
    if (controller.signal.aborted) say("stopped", "Stopped.");
    else say("wrong", sentence(error.message));
    if (error.status === 401) askForKey();
  } finally {
    controller.abort(); // after an error of one side, the other side may still be running
    racing = null;
  }
}

const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.…]$/.test(text) ? "" : ".");

/** Set the line above the pictures; kind: idle, running, stopped, won or wrong. Screen readers read "wrong" out at once. */
function say(kind, text, figure) {
  byId("board").className = kind;
  byId("lead").textContent = "";
  byId("problem").textContent = kind === "wrong" ? text : "";
  byId("verdict").textContent = kind === "wrong" ? "" : text;
  if (figure) byId("verdict").prepend(element("strong", figure), " ");
}

/** Show the progress of both sides. Screen readers do not read this out, since it changes all the time. */
function showLead() {
  const isDrawing = plain.percent || drafted.percent;
  byId("lead").textContent = isDrawing
    ? `Plain decoding ${plain.percent}\u00a0%, ${drafted.method} ${drafted.percent}\u00a0%`
    : "Waiting in the queue.";
}

/** Show which side won. */
function showWinner() {
  const speedup = plain.seconds / drafted.seconds;
  const unit = plain.pictures.length > 1 ? "s a picture" : "s";
  const seconds = `${drafted.seconds.toFixed(2)} ${unit} where plain decoding took ${plain.seconds.toFixed(2)} s`;
  if (speedup >= 1.005) say("won", `${drafted.method} won: ${seconds}.`, `${speedup.toFixed(1)}×`);
  else if (speedup > 0.995) say("won", `A draw: ${seconds}.`, "1.0×");
  else say("won", `Plain decoding won: ${drafted.method} took ${seconds}.`, `${speedup.toFixed(2)}×`);
}

/** Show the model's warnings about the prompt. Both sides report the same warnings, which are shown once. */
function showWarnings(warnings) {
  const texts = [...byId("notes").children].map((line) => line.textContent);
  for (const text of new Set(warnings.map(sentence))) {
    if (!texts.includes(text)) byId("notes").append(element("p", text));
  }
}

/** Add a finished picture to the gallery of the session. */
function addToGallery(prompt, { image, facts, seed }) {
  const shot = fromTemplate("shot");
  const words = prompt.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
  const slug = words.join("-").slice(0, 48).replace(/-$/, "");
  const name = `${slug}-${facts.method.replaceAll("+", "p")}-${seed}.png`;
  Object.assign(shot.querySelector("a"), { href: image.src, download: name, title: "Save this picture as PNG" });
  Object.assign(shot.querySelector("img"), { src: image.src, alt: `${prompt}, ${facts.method}, seed ${seed}` });
  const figures = `${facts.seconds.toFixed(2)} s · ${facts.codes_per_pass.toFixed(2)} codes per pass`;
  shot.querySelector(".prompt").textContent = prompt;
  shot.querySelector(".facts").textContent = `${facts.method} · seed ${seed} · ${figures}`;
  byId("none").hidden = true;
  byId("gallery").prepend(shot);
  for (const oldShot of [...byId("gallery").children].slice(MAX_SHOTS)) {
    URL.revokeObjectURL(oldShot.querySelector("a").href);
    oldShot.remove();
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
byId("method").onchange = adoptMethod;
byId("dice").onclick = () => (byId("seed").value = Math.floor(Math.random() * 1e6));
byId("forget").onclick = () => {
  key.set("");
  location.reload();
};
start();
