// The page's state is its address: #item=12 searches from image 12 of the gallery, #upload=1 with the second image that was
// dropped, #text=... with a text, #link=... with an embedding that somebody shared; &k=48, &label=cat and &box=0.1,0.2,0.5,0.9 refine it. So Back,
// reload and links work as everywhere.

const $ = (id) => document.getElementById(id);
const SKELETONS = 12;
const uploads = [];      // {file, url}, by the number in the address
const answers = new Map();
let about = null;
let seed = 0;
let shown = 0;
let turn = 0;            // of the newest search; answers to older ones are dropped
let typing = null;       // timer that waits for the end of a word
let link = "";           // of the newest answer, for sharing

// what the address says, without what is not understood
function place() {
  const given = new URLSearchParams(location.hash.slice(1));
  const number = (name) => (/^\d{1,15}$/.test(given.get(name) || "") ? given.get(name) : null);
  const box = /^(?:[01](?:\.\d{1,6})?,){3}[01](?:\.\d{1,6})?$/.test(given.get("box") || "") ? given.get("box") : null;
  const shared = /^[\w-]{1,12000}$/.test(given.get("link") || "") ? given.get("link") : null;
  const text = about && about.of_texts ? given.get("text") : null;
  return { item: number("item"), upload: number("upload"), text, link: shared, k: number("k"), label: given.get("label"), box };
}

function address(changes) {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries({ ...place(), ...changes })) if (value) given.set(name, value);
  // commas are fine in an address
  return `#${given.toString().replaceAll("%2C", ",")}`;
}

// the choices that stay from one query to the next
const kept = () => address({ item: null, upload: null, text: null, link: null, box: null }).slice(1);
const query = (start) => (kept() ? `#${start}&${kept()}` : `#${start}`);

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
const named = (item) => item.label || item.text || item.name.split("/").pop();
// what the gallery holds, in numbers
const counted = (number) => (about.of_texts ? count(number, "text", "texts") : count(number, "image", "images"));
const others = (number) => (about.of_texts ? count(number, "other text", "other texts") : count(number, "other image", "other images"));
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
  if (about.of_texts) {
    const frame = element("span", "frame words");
    frame.append(element("q", "", item.text));
    return frame;
  }
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
  link.dataset.id = item.id;
  link.href = query(`item=${item.id}`);
  link.title = [item.label, item.category, item.name].filter(Boolean).join("\n");
  const frame = picture(item);
  const line = element("span", "line");
  line.append(element("span", "label", named(item)));
  link.append(frame, line);
  if (item.rank === undefined) {
    link.setAttribute("aria-label", `Search from ${named(item)}, ${about.of_texts ? "text" : "image"} ${item.id}`);
    return link;
  }
  frame.append(element("span", "rank", item.rank));
  line.append(element("span", "score", item.score.toFixed(3)));
  const bar = element("span", "bar");
  const filled = element("i");
  filled.style.setProperty("--score", Math.min(1, Math.max(0, item.score)));
  bar.append(filled);
  link.append(bar);
  if (item.label && !about.of_texts) link.append(element("span", "file-name", item.name.split("/").pop()));
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
  $("query-frame").hidden = about.of_texts;
  if (!about.of_texts) {
    $("query-image").src = address;
    $("query-image").alt = label ? `The query, ${label}` : "The query";
  }
  $("found").hidden = false;
  document.body.classList.add("searching");
  $("gallery-title").textContent = "The gallery";
}

function tallied(answer) {
  const found = answer.results.length;
  const seconds = answer.seconds < 0.1 ? `${Math.max(1, Math.round(1000 * answer.seconds))} ms` : `${answer.seconds.toFixed(1)} s`;
  if (!found) return place().label ? "No label contains this text." : "Nothing was found.";
  const query = answer.query;
  if (!query || !query.label) return `${counted(found)} in ${seconds}`;
  const right = answer.results.filter((item) => item.right).length;
  // the image that a part is of is found, too
  const rest = query.class_size - (place().box ? 0 : 1);
  if (place().label) return `${counted(found)} in ${seconds}`;
  if (!rest) return `${counted(found)} in ${seconds}; no other ${about.of_texts ? "text" : "image"} has its label`;
  const all = place().box ? counted(rest) : others(rest);
  return `${right} of the ${all} of its label among the first ${found}, in ${seconds}`;
}

function showResults(answer) {
  $("results").replaceChildren(...listed(answer.results));
  $("tally").textContent = tallied(answer);
  $("status").textContent = `${counted(answer.results.length)} found. ${$("tally").textContent}`;
}

function reset() {
  complain();
  $("found").hidden = true;
  $("results").replaceChildren();
  document.body.classList.remove("searching");
  $("gallery-title").textContent = "Or start from the gallery";
  document.title = `${about.run} · rankgrad search`;
}

function showBox(box) {
  $("box").hidden = !box;
  $("whole").hidden = !box;
  if (!box) return;
  const [left, top, right, bottom] = box.split(",").map(Number);
  const shown = shownImage();
  const frame = $("query-frame").getBoundingClientRect();
  const style = $("box").style;
  style.setProperty("--left", `${shown.left - frame.left + left * shown.width}px`);
  style.setProperty("--top", `${shown.top - frame.top + top * shown.height}px`);
  style.setProperty("--width", `${(right - left) * shown.width}px`);
  style.setProperty("--height", `${(bottom - top) * shown.height}px`);
}

// where the picture itself is inside its frame, which it does not fill
function shownImage() {
  const image = $("query-image");
  const frame = image.getBoundingClientRect();
  const scale = Math.min(frame.width / (image.naturalWidth || 1), frame.height / (image.naturalHeight || 1));
  const width = scale * image.naturalWidth;
  const height = scale * image.naturalHeight;
  return { left: frame.left + (frame.width - width) / 2, top: frame.top + (frame.height - height) / 2, width, height };
}

function request(at, upload) {
  const asked = new URLSearchParams();
  for (const name of ["item", "text", "link", "k", "label", "box"]) if (at[name]) asked.set(name, at[name]);
  if (!upload) return ask(`/api/search?${asked}`);
  const form = new FormData();
  form.append("image", upload.file);
  return ask(`/api/search?${asked}`, { method: "POST", body: form });
}

async function follow() {
  const at = place();
  const mine = ++turn;
  const upload = at.upload === null ? null : uploads[Number(at.upload)];
  for (const tile of $("items").querySelectorAll(".tile")) tile.href = query(`item=${tile.dataset.id}`);
  if (document.activeElement !== $("only")) $("only").value = at.label || "";
  $("count").value = [...$("count").options].some((option) => option.value === at.k) ? at.k : "24";
  if (document.activeElement !== $("text")) $("text").value = at.text || "";
  if (at.item === null && !upload && !at.link && !at.text) {
    // dropped images do not outlive the page
    if (at.upload !== null) history.replaceState(null, "", location.pathname);
    reset();
    return;
  }
  complain();
  if (at.text) showQuery("Your text", at.text, "", "");
  else if (upload) showQuery("Your image", upload.file.name || "Pasted image", "", upload.url);
  else if (at.link) showQuery("A shared search", about.of_texts ? "The text was not shared" : "The image was not shared", "", "/icon.svg");
  else showQuery("From the gallery", `${about.of_texts ? "Text" : "Image"} ${at.item}`, "", `/thumb/${at.item}?v=${about.version}`);
  $("box-hint").hidden = Boolean(at.link) || about.of_texts;
  showBox(at.box);
  const key = location.hash;
  const slow = setTimeout(wait, answers.has(key) ? 1e6 : 120);
  $("results").setAttribute("aria-busy", "true");
  scrollTo({ top: 0 });
  try {
    if (!answers.has(key)) answers.set(key, await request(at, upload));
    if (mine !== turn) return;
    const answer = answers.get(key);
    link = answer.link || "";
    if (answer.query) {
      const { text, name, label } = answer.query;
      if (about.of_texts) showQuery("From the gallery", text, label, "");
      else showQuery("From the gallery", named(answer.query), name, thumb(answer.query));
    }
    showBox(at.box);
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

let copied = 0;

// the address of what is shown, for other people on this server
async function share() {
  const at = place();
  const hash = at.item === null && !at.text && link ? address({ upload: null, box: null, link }) : location.hash;
  const text = new URL(hash, location.href).href;
  try {
    await navigator.clipboard.writeText(text);
    $("status").textContent = "Link copied.";
    $("link").textContent = "Copied";
  } catch {
    prompt("Copy this link:", text);
  }
  // the end of an earlier copy must not take back what this one says
  clearTimeout(copied);
  copied = setTimeout(() => { $("link").textContent = "Copy link"; }, 1500);
}

function drawBox(event) {
  if (event.button !== 0 || place().link) return;
  const shown = shownImage();
  const share = (value, start, size) => Math.min(1, Math.max(0, (value - start) / size));
  const corner = (at) => [share(at.clientX, shown.left, shown.width), share(at.clientY, shown.top, shown.height)];
  const [x, y] = corner(event);
  const box = (at) => {
    const [right, bottom] = corner(at);
    return [Math.min(x, right), Math.min(y, bottom), Math.max(x, right), Math.max(y, bottom)];
  };
  const text = (edges) => edges.map((edge) => edge.toFixed(4)).join(",");
  const frame = $("query-frame");
  frame.setPointerCapture(event.pointerId);
  frame.onpointermove = (at) => showBox(text(box(at)));
  frame.onpointercancel = () => { frame.onpointermove = null; showBox(place().box); };
  frame.onpointerup = (at) => {
    frame.onpointermove = null;
    const [left, top, right, bottom] = box(at);
    // a click, or a slip of the hand
    if (right - left < 0.03 || bottom - top < 0.03) return showBox(place().box);
    location.hash = address({ box: text([left, top, right, bottom]) });
  };
}

// arrows move between pictures, / goes to the filter, Escape back to the whole image and then to the start
function pressed(event) {
  const typingText = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "file";
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    if (typingText) event.target.blur();
    else if (place().box) location.hash = address({ box: null });
    else if (location.hash) location.hash = "";
  } else if (event.key === "/" && !typingText) {
    event.preventDefault();
    ($("found").hidden ? $("label") : $("only")).focus();
  } else if (event.key.startsWith("Arrow") && event.target.closest(".tile")) {
    const tiles = [...event.target.closest("ol, ul").querySelectorAll(".tile")];
    const columns = tiles.filter((tile) => tile.getBoundingClientRect().top === tiles[0].getBoundingClientRect().top).length;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    const next = tiles[tiles.indexOf(event.target.closest(".tile")) + step];
    if (next) {
      event.preventDefault();
      next.focus();
    }
  }
}

function take(files) {
  const file = [...(files || [])].find((one) => one.type.startsWith("image/")) || (files || [])[0];
  if (!file) return complain("That was not a file: drop an image from your disk, or paste one.");
  if (file.size > about.most_bytes) return complain(`The file is larger than ${about.most_bytes / 1e6} MB. Choose a smaller one.`);
  uploads.push({ file, url: URL.createObjectURL(file) });
  location.hash = query(`upload=${uploads.length - 1}`);
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
  $("ask-text").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("text").value.trim();
    if (text.length > about.most_letters) return complain(`The text is longer than ${about.most_letters.toLocaleString("en")} characters.`);
    if (text) location.hash = address({ item: null, upload: null, link: null, box: null, text });
  });
  if (about.of_texts) return listenToTools();
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
  $("query-frame").addEventListener("pointerdown", drawBox);
  $("query-image").addEventListener("load", () => showBox(place().box));
  addEventListener("resize", () => showBox(place().box));
  listenToTools();
}

function listenToTools() {
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
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("only").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => { location.hash = address({ label: $("only").value.trim() }); }, 300);
  });
  $("count").addEventListener("change", () => {
    location.hash = address({ k: $("count").value === "24" ? null : $("count").value });
  });
  $("whole").addEventListener("click", () => { location.hash = address({ box: null }); });
  $("link").addEventListener("click", share);
  addEventListener("keydown", pressed);
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
    number(about.of_texts ? "texts" : "images", about.images.toLocaleString("en")),
    ...(about.classes ? [number("labels", about.classes.toLocaleString("en"))] : []),
    number("dimensions", about.dim.toLocaleString("en")),
    number(about.index === "exact" ? "search" : "index", about.index),
  );
  $("limits").textContent = `${about.kinds}, up to ${about.most_bytes / 1e6} MB`;
  $("debug").hidden = !about.debug;
  $("ask-text").hidden = !about.of_texts;
  $("ask-image").hidden = about.of_texts;
  if (about.of_texts) $("results-title").textContent = "Nearest texts";
  listen();
  follow();
  browse();
}

begin();
