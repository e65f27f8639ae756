// The page holds no state but its address: #item=12 is a search from image 12 of the gallery, #upload=1 one with the first
// image that was dropped. So Back, reload and links work as they do everywhere.

const $ = (id) => document.getElementById(id);
const SKELETONS = 12;
const uploads = [];      // {file, url}, by the number in the address
const answers = new Map();
let about = null;
let seed = 0;
let shown = 0;
let turn = 0;            // of the newest search; what older ones bring is dropped
let typing = null;       // waits for the end of a word before looking for it

function element(name, classes, text) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  if (text !== undefined) made.textContent = text;
  return made;
}

function icon(right) {
  const namespace = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(namespace, "svg");
  svg.setAttribute("class", "mark");
  svg.setAttribute("viewBox", "0 0 12 12");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(namespace, "path");
  path.setAttribute("d", right ? "M2 6.5l3 3 5-7" : "M2.5 2.5l7 7M9.5 2.5l-7 7");
  svg.append(path);
  return svg;
}

const count = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
const named = (item) => item.label || item.name.split("/").pop();
const thumb = (item) => `/thumb/${item.id}?v=${about.version}`;

async function ask(address, options) {
  let answer;
  try {
    answer = await fetch(address, options);
  } catch {
    throw new Error("The server does not answer. Is “rankgrad serve” still running?");
  }
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(content.error || `The server answered with status ${answer.status}.`);
  return content;
}

function complain(sentence) {
  $("problem").textContent = sentence || "";
  $("problem").hidden = !sentence;
}

function picture(item) {
  const frame = element("span", "frame");
  const image = element("img");
  image.alt = "";
  image.width = image.height = 256;
  image.loading = "lazy";
  image.decoding = "async";
  image.draggable = false;
  image.addEventListener("error", () => frame.classList.add("missing"));
  image.src = thumb(item);
  frame.append(image);
  return frame;
}

function tile(item) {
  const link = element("a", "tile");
  link.href = `#item=${item.id}`;
  link.title = item.category ? `${item.name} (${item.category})` : item.name;
  const frame = picture(item);
  const line = element("span", "line");
  line.append(element("span", "label", named(item)));
  link.append(frame, line);
  if (item.rank === undefined) {
    link.setAttribute("aria-label", `Search from ${named(item)}, image ${item.id}`);
    return link;
  }
  frame.append(element("span", "rank", item.rank));
  line.append(element("span", "score", item.score.toFixed(3)));
  const bar = element("span", "bar");
  const filled = element("i");
  filled.style.setProperty("--score", Math.min(1, Math.max(0, item.score)));
  bar.append(filled);
  link.append(bar);
  let verdict = "";
  if (item.right !== null) {
    frame.append(icon(item.right));
    link.classList.add(item.right ? "right" : "wrong");
    verdict = item.right ? ", same label" : ", other label";
  }
  link.setAttribute("aria-label", `Rank ${item.rank}: ${named(item)}, score ${item.score.toFixed(3)}${verdict}. Search from it`);
  return link;
}

function listed(items) {
  return items.map((item) => {
    const entry = element("li");
    entry.append(tile(item));
    return entry;
  });
}

function wait() {
  $("results").replaceChildren(...Array.from({ length: SKELETONS }, () => {
    const entry = element("li", "waiting");
    entry.append(element("span", "frame"), element("span", "line"));
    return entry;
  }));
  $("tally").textContent = "Searching…";
}

function showQuery(kind, label, name, address) {
  $("query-kind").textContent = kind;
  $("query-label").textContent = label;
  $("query-name").textContent = name;
  $("query-image").src = address;
  $("query-image").alt = label ? `The query, ${label}` : "The query";
  $("found").hidden = false;
  document.body.classList.add("searching");
  $("gallery-title").textContent = "The gallery";
}

function tallied(answer) {
  const found = answer.results.length;
  const seconds = answer.seconds < 0.1 ? `${Math.max(1, Math.round(1000 * answer.seconds))} ms` : `${answer.seconds.toFixed(1)} s`;
  if (!found) return "Nothing was found.";
  const query = answer.query;
  if (!query || !query.label) return `${count(found, "image", "images")} in ${seconds}`;
  const right = answer.results.filter((item) => item.right).length;
  const others = query.class_size - 1;
  if (!others) return `${count(found, "image", "images")} in ${seconds}; no other image has its label`;
  return `${right} of the ${count(others, "other image", "other images")} of its label among the first ${found}, in ${seconds}`;
}

function showResults(answer) {
  $("results").replaceChildren(...listed(answer.results));
  $("tally").textContent = tallied(answer);
  $("status").textContent = `${count(answer.results.length, "image", "images")} found. ${$("tally").textContent}`;
}

function reset() {
  complain();
  $("found").hidden = true;
  $("results").replaceChildren();
  document.body.classList.remove("searching");
  $("gallery-title").textContent = "Or begin from the gallery";
  document.title = `${about.run} · rankgrad search`;
}

async function follow() {
  const [, kind, number] = location.hash.match(/^#(item|upload)=(\d{1,15})$/) || [];
  const mine = ++turn;
  const upload = kind === "upload" ? uploads[Number(number)] : null;
  if (!kind || (kind === "upload" && !upload)) {
    // dropped images do not outlive the page
    if (kind) history.replaceState(null, "", location.pathname);
    reset();
    return;
  }
  complain();
  if (upload) showQuery("Your image", upload.file.name || "Pasted image", "", upload.url);
  else showQuery("From the gallery", `Image ${number}`, "", `/thumb/${number}?v=${about.version}`);
  const key = location.hash;
  const slow = setTimeout(wait, answers.has(key) ? 1e6 : 120);
  $("results").setAttribute("aria-busy", "true");
  scrollTo({ top: 0 });
  try {
    if (!answers.has(key)) {
      const form = new FormData();
      if (upload) form.append("image", upload.file);
      const answer = await (upload ? ask("/api/search", { method: "POST", body: form }) : ask(`/api/search?item=${number}`));
      answers.set(key, answer);
    }
    if (mine !== turn) return;
    const answer = answers.get(key);
    if (answer.query) showQuery("From the gallery", named(answer.query), answer.query.name, thumb(answer.query));
    document.title = `${$("query-label").textContent} · ${about.run}`;
    clearTimeout(slow);
    showResults(answer);
  } catch (error) {
    if (mine !== turn) return;
    reset();
    complain(error.message);
  } finally {
    clearTimeout(slow);
    if (mine === turn) $("results").removeAttribute("aria-busy");
  }
}

function take(files) {
  const file = [...(files || [])].find((one) => one.type.startsWith("image/")) || (files || [])[0];
  if (!file) return complain("That was no file: drop an image from your disk, or paste one.");
  if (file.size > about.most_bytes) return complain(`The file is larger than ${about.most_bytes / 1e6} MB. Choose a smaller one.`);
  uploads.push({ file, url: URL.createObjectURL(file) });
  location.hash = `upload=${uploads.length - 1}`;
}

async function browse(more) {
  if (!more) shown = 0;
  const label = $("label").value.trim();
  // whole rows of the strip, fewer where they are long
  const columns = getComputedStyle($("items")).gridTemplateColumns.split(" ").length;
  const asked = new URLSearchParams({ seed, offset: shown, limit: columns * (columns > 6 ? 2 : 4), label });
  try {
    const answer = await ask(`/api/items?${asked}`);
    const entries = listed(answer.items);
    if (more) $("items").append(...entries);
    else $("items").replaceChildren(...entries);
    shown += answer.items.length;
    $("more").hidden = shown >= answer.total;
    $("none").hidden = answer.total > 0;
    $("none").textContent = `No label contains “${label}”.`;
    if (more && entries.length) entries[0].firstChild.focus();
  } catch (error) {
    complain(error.message);
  }
}

function number(term, value) {
  const pair = element("div");
  pair.append(element("dt", "", term), element("dd", "", value));
  return pair;
}

function listen() {
  addEventListener("hashchange", follow);
  $("file").addEventListener("change", (event) => {
    if (event.target.files.length) take(event.target.files);
    event.target.value = "";
  });
  addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) {
      event.preventDefault();
      take(event.clipboardData.files);
    }
  });
  let depth = 0;
  const dragging = (on) => document.body.classList.toggle("dragging", on);
  addEventListener("dragenter", (event) => { event.preventDefault(); depth += 1; dragging(true); });
  addEventListener("dragleave", () => { depth = Math.max(0, depth - 1); dragging(depth > 0); });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    dragging(false);
    take(event.dataTransfer.files);
  });
  $("tools").addEventListener("submit", (event) => event.preventDefault());
  $("label").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(browse, 200);
  });
  $("shuffle").addEventListener("click", () => {
    seed += 1;
    browse();
  });
  $("more").addEventListener("click", () => browse(true));
}

async function begin() {
  try {
    about = await ask("/api/about");
  } catch (error) {
    complain(error.message);
    return;
  }
  $("run").textContent = about.run;
  $("trained").textContent = `${about.recipe}, ${about.trunk}, ${about.checkpoint} checkpoint at step ${about.step.toLocaleString("en")}`;
  $("numbers").append(
    number("images", about.images.toLocaleString("en")),
    ...(about.classes ? [number("labels", about.classes.toLocaleString("en"))] : []),
    number("dimensions", about.dim.toLocaleString("en")),
    number(about.index === "exact" ? "search" : "index", about.index),
  );
  $("limits").textContent = `${about.kinds}, up to ${about.most_bytes / 1e6} MB`;
  $("debug").hidden = !about.debug;
  listen();
  follow();
  browse();
}

begin();
