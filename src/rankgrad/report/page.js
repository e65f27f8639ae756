"use strict";
// Makes the page explorable: filters for the queries, an enlarged view that follows neighbours, tooltips on the maps.
// Names of files and classes only ever become text, never markup.
(() => {
  const block = (name) => document.getElementById(`data-${name}`);
  const source = block("explorer");
  const mount = document.getElementById("explorer");
  if (!source || !mount) return;
  const { prefix, groups } = JSON.parse(source.textContent);
  const thumbnails = [];
  const positions = groups.map((group) => new Map(group.rows.map((row, item) => [row, item])));

  const create = (tag, properties, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children.filter((child) => child !== null && child !== ""));
    return node;
  };
  const count = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
  const nameOf = (group, item) => {
    const path = groups[group].paths[item];
    return groups[group].of_texts ? path : path.slice(path.lastIndexOf("/") + 1);
  };
  const frame = (group, item) =>
    create("span", { className: groups[group].of_texts ? "frame text" : "frame", textContent: nameOf(group, item) });

  function address(group, item) {
    // base64 between quotation marks, all thumbnails one after another
    thumbnails[group] ??= block(`thumbnails-${group}`).textContent;
    const { ends } = groups[group];
    const encoded = thumbnails[group].slice(1 + (item ? ends[item - 1] : 0), 1 + ends[item]);
    return encoded ? prefix + encoded : null;
  }

  function picture(group, item) {
    const { paths, classes } = groups[group];
    const about = `${classes[groups[group].class[item]]}, ${paths[item]}`;
    const src = address(group, item);
    const shown = src
      ? create("img", { src, alt: about })
      : frame(group, item);
    return create("button", { type: "button", className: "pic", title: about, onclick: () => open(group, item) }, shown);
  }

  function neighbours(group, run, item) {
    const { k, near, scores } = groups[group].runs[run];
    const list = create("ol", {});
    for (let at = item * k; at < (item + 1) * k && at < near.length; at++) {
      const other = near[at];
      const score = (scores[at] / 1000).toFixed(3).replace("-", "\u2212");
      if (other === -1) list.append(create("li", {}, create("span", { className: "frame", textContent: "distractor" }), score));
      if (other < 0) continue;
      const right = groups[group].label[other] === groups[group].label[item];
      const kind = groups[group].marked ? (right ? "right" : "wrong") : "";
      const mark = kind ? create("i", { textContent: right ? "\u2713" : "\u2715", ariaLabel: kind }) : null;
      const name = groups[group].classes[groups[group].class[other]];
      list.append(
        create("li", { className: kind }, picture(group, other), create("span", { title: name }, mark, name), create("small", {}, score)),
      );
    }
    return list;
  }

  function summary(group, run, item) {
    const { first, ap } = groups[group].runs[run];
    const parts = [];
    if (first[item]) parts.push(`first relevant at ${first[item].toLocaleString("en")}`);
    if (ap[item] !== null) parts.push(`AP ${ap[item].toFixed(1)}`);
    return parts.join(", ");
  }

  function strips(group, item) {
    const { runs } = groups[group];
    const all = create("div", { className: runs.length > 1 ? "strips several" : "strips" });
    runs.forEach((run, place) => {
      const told = [runs.length > 1 ? run.name : "", runs.length > 1 ? summary(group, place, item) : ""].filter(Boolean).join(": ");
      const strip = create("div", { className: "strip" }, told ? create("small", {}, told) : null);
      strip.append(neighbours(group, place, item));
      if (strip.querySelector("li")) all.append(strip);
    });
    return all;
  }

  function row(group, item) {
    const { paths, classes, category, runs } = groups[group];
    const query = create(
      "div",
      { className: "query" },
      picture(group, item),
      create("b", {}, classes[groups[group].class[item]]),
      groups[group].of_texts ? null : create("small", { title: paths[item] }, nameOf(group, item)),
      category.length && category[item] ? create("small", {}, category[item]) : null,
      runs.length === 1 ? create("small", {}, summary(group, 0, item)) : null,
    );
    return create("div", { className: "found" }, query, strips(group, item));
  }

  // ---- filters

  const state = { group: 0, run: 0, order: "worst", show: "all", label: -1, name: "" };
  let matches = [];
  let shown = 0;
  const rows = create("div", {});
  const told = create("p", { className: "quiet", role: "status" });
  const more = create("button", { type: "button", className: "more", onclick: () => append() }, "Show more");

  function find() {
    const group = groups[state.group];
    const { first, ap } = group.runs[state.run];
    const wanted = state.name.toLowerCase();
    matches = [];
    for (let item = 0; item < group.queries; item++) {
      const right = first[item] === 1;
      if (state.show !== "all" && right !== (state.show === "right")) continue;
      if (state.label >= 0 && group.class[item] !== state.label) continue;
      if (wanted && !group.paths[item].toLowerCase().includes(wanted)) continue;
      matches.push(item);
    }
    const rank = (item) => first[item] || Infinity;
    const worse = (a, b) => (rank(a) === rank(b) ? (ap[a] ?? 0) - (ap[b] ?? 0) : rank(b) > rank(a) ? 1 : -1);
    if (state.order === "name") matches.sort((a, b) => (group.paths[a] < group.paths[b] ? -1 : 1));
    else matches.sort((a, b) => (state.order === "worst" ? worse(a, b) : worse(b, a)) || a - b);
    rows.replaceChildren();
    shown = 0;
    append();
  }

  function append() {
    const group = groups[state.group];
    const next = matches.slice(shown, shown + (group.runs.length > 1 ? 3 : 8));
    rows.append(...next.map((item) => row(state.group, item)));
    shown += next.length;
    const some = shown < matches.length ? `, the first ${shown.toLocaleString("en")} are shown` : "";
    told.textContent = `${count(matches.length, "query", "queries")} of ${group.queries.toLocaleString("en")}${some}${group.note ? ` (${group.note})` : ""}.`;
    more.hidden = shown >= matches.length;
  }

  function choice(name, label, options) {
    const select = create("select", {
      ariaLabel: label,
      onchange: () => {
        state[name] = typeof state[name] === "number" ? Number(select.value) : select.value;
        if (name === "group") build();
        else find();
      },
    });
    select.append(...options.map(([value, title]) => create("option", { value, textContent: title })));
    select.value = state[name];
    return create("label", {}, label, select);
  }

  function build() {
    const group = groups[state.group];
    Object.assign(state, { run: 0, label: -1 });
    const [name, part, item] = group.of_texts ? ["Text", "part of a text", "text"] : ["File name", "part of a path", "picture"];
    const search = create("input", { type: "search", ariaLabel: name, value: state.name, placeholder: part });
    let waiting = 0;
    search.oninput = () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        state.name = search.value.trim();
        find();
      }, 150);
    };
    const controls = [
      groups.length > 1 ? choice("group", "Test", groups.map((each, place) => [place, each.title])) : null,
      group.runs.length > 1 ? choice("run", "Sorted by", group.runs.map((run, place) => [place, run.name])) : null,
      choice("order", "Order", [["worst", "Wrong first"], ["best", "Best first"], ["name", name]]),
      choice("show", "Show", [["all", "All"], ["wrong", "Wrong at rank 1"], ["right", "Right at rank 1"]]),
      choice("label", "Class", [[-1, "All classes"], ...group.classes.map((name, place) => [place, name])]),
      create("label", {}, name, search),
    ];
    mount.replaceChildren(
      create("p", { className: "quiet" }, `Click a ${item} to ${group.of_texts ? "" : "enlarge it and to "}see its own neighbours.`),
      create("form", { className: "controls", onsubmit: () => false }, ...controls),
      told,
      rows,
      more,
    );
    find();
  }

  // ---- enlarged view

  const viewer = create("dialog", { className: "viewer" });
  const trail = [];
  document.body.append(viewer);
  viewer.addEventListener("close", () => trail.splice(0));
  viewer.addEventListener("click", (event) => event.target === viewer && viewer.close());
  viewer.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) move(step);
    else if (event.key === "Backspace") back();
    else return;
    event.preventDefault();
  });

  function open(group, item) {
    const last = trail.at(-1);
    if (!last || last[0] !== group || last[1] !== item) trail.push([group, item]);
    show();
  }

  function back() {
    if (trail.length > 1) trail.pop();
    show();
  }

  function move(step) {
    const [group, item] = trail.at(-1);
    const at = group === state.group ? matches.indexOf(item) : -1;
    const next = matches[at + step];
    if (at < 0 || next === undefined) return;
    trail[trail.length - 1] = [group, next];
    show();
  }

  function show() {
    const [group, item] = trail.at(-1);
    const { paths, classes, category, runs } = groups[group];
    const src = address(group, item);
    const button = (title, onclick, disabled) => create("button", { type: "button", onclick, disabled }, title);
    const at = group === state.group ? matches.indexOf(item) : -1;
    const facts = create("div", { className: "facts" }, create("h3", {}, classes[groups[group].class[item]]));
    if (!groups[group].of_texts) facts.append(create("p", {}, paths[item]));
    if (category.length && category[item]) facts.append(create("p", {}, category[item]));
    if (runs.length === 1 && summary(group, 0, item)) facts.append(create("p", {}, summary(group, 0, item)));
    const found = strips(group, item);
    viewer.replaceChildren(
      create(
        "div",
        { className: "bar" },
        button("\u2190 Back", back, trail.length < 2),
        button("Previous", () => move(-1), at < 1),
        button("Next", () => move(1), at < 0 || at + 1 >= matches.length),
        button("Close", () => viewer.close(), false),
      ),
      create(
        "div",
        { className: "item" },
        src ? create("img", { src, alt: paths[item] }) : frame(group, item),
        facts,
      ),
      create("h4", {}, "Neighbours"),
      found.children.length ? create("div", { className: "found" }, found) : create("p", { className: "absent" }, "Not computed for this item."),
    );
    if (!viewer.open) viewer.showModal();
    viewer.scrollTop = 0;
  }

  // ---- pictures and points elsewhere on the page

  function locate(node) {
    const place = node?.closest?.("[data-item]")?.dataset.item;
    if (!place) return null;
    const [table, row] = place.split(" ").map(Number);
    const group = groups.findIndex((each) => each.tables.includes(table));
    const item = group < 0 ? undefined : positions[group].get(row);
    return item === undefined ? null : [group, item];
  }

  document.addEventListener("click", (event) => {
    const found = locate(event.target);
    if (found) open(...found);
  });

  const tip = create("div", { className: "tip", hidden: true });
  document.body.append(tip);
  for (const svg of document.querySelectorAll(".dots svg")) {
    const points = [...svg.querySelectorAll("circle[data-item]")];
    if (!points.length) continue;
    points.forEach((point) => point.querySelector("title")?.remove());
    const known = new Map(points.map((point) => [point, locate(point)]));
    svg.addEventListener("pointerover", (event) => {
      const found = known.get(event.target);
      if (!found) return;
      const [group, item] = found;
      const { paths, classes } = groups[group];
      const label = groups[group].class[item];
      svg.classList.add("picking");
      for (const [point, place] of known) point.classList.toggle("picked", place !== null && groups[place[0]].class[place[1]] === label);
      const src = address(group, item);
      tip.replaceChildren(
        ...(src ? [create("img", { src, alt: "" })] : []),
        create("b", {}, classes[label]),
        create("small", {}, nameOf(group, item)),
      );
      tip.hidden = false;
      const box = event.target.getBoundingClientRect();
      const right = box.right + 14;
      const fits = right + tip.offsetWidth < innerWidth - 8;
      tip.style.left = `${fits ? right : Math.max(box.left - tip.offsetWidth - 14, 8)}px`;
      tip.style.top = `${Math.min(Math.max(box.top - tip.offsetHeight / 2, 8), innerHeight - tip.offsetHeight - 8)}px`;
    });
    svg.addEventListener("pointerout", (event) => {
      if (!known.has(event.target)) return;
      svg.classList.remove("picking");
      tip.hidden = true;
    });
  }

  for (const part of document.querySelectorAll(".static")) part.hidden = true;
  mount.hidden = false;
  document.documentElement.classList.add("explorable");
  build();
})();
