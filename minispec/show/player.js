"use strict";
// Plays a trace of the schema minispec-trace-1. A moment is a step and one of its four phases; `draw` shows it.

const trace = JSON.parse(document.getElementById("trace").textContent);
const steps = trace.steps;
const PHASES = ["draft", "score", "verify", "commit"];
const COMMIT = PHASES.length - 1;
const MARKS = { pending: "", accepted: "✓", rejected: "✗", untested: "", residual: "↻", own: "↻", bonus: "+" };
const WORDS = {
  pending: "pending: emitted, not yet read by the target", accepted: "accepted", rejected: "rejected",
  untested: "not tested", residual: "drawn in place of a rejected guess", own: "the target's own draw", bonus: "bonus token",
};
const FINAL = "final"; // the token that the target adds to the accepted run
const moment = { step: 0, phase: COMMIT };
let chosen = null; // the node clicked in this step
let timer = null;

// --- small helpers ---------------------------------------------------------------------------------------------

const by = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const word = (token) => (trace.texts[token] ?? String(token)).replaceAll("\n", "⏎").replaceAll(" ", "␣");
const brief = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
const many = (count) => `${count} ${count === 1 ? "token" : "tokens"}`;
const number = (value) => (value === null ? "none" : String(value));
const round = (value) => String(Number(value.toPrecision(4)));
const tiny = (value) => (value >= 0.9995 ? "1" : value < 0.0005 ? "<.001" : value.toFixed(value < 0.0995 ? 3 : 2).slice(1));
const sum = (values) => values.reduce((a, b) => a + b, 0);

// --- what the trace says about a moment ------------------------------------------------------------------------

function soFar(count) {
  const done = steps.slice(0, count);
  const total = (name) => sum(done.map((step) => step[name]));
  const tokens = sum(done.map((step) => step.emitted.length));
  const ms = sum(done.map((step) => step.ms.step));
  return {
    tokens, passes: done.length, accepted: total("accepted"), tested: total("tested"),
    speedUp: trace.plain_ms === null || ms === 0 ? null : (tokens * trace.plain_ms) / ms,
  };
}

// Class of each emitted token of a step: accepted guesses, then one token of the target's own.
const origin = (step, i) => (i < step.accepted ? "accepted" : step.how);

function standing(step) { // the node chosen, else the one that decided the step
  if (chosen !== null) return chosen;
  const rejected = step.nodes.findIndex((node) => node.state === "rejected");
  return rejected > 0 ? rejected : step.nodes.length > 1 ? (step.path.at(-1) || 1) : FINAL;
}

function ancestors(step, node) {
  const seen = new Set();
  for (let at = node; at >= 0; at = step.nodes[at].parent) seen.add(at);
  return seen;
}

// --- the panels ------------------------------------------------------------------------------------------------

function drawText(step) {
  const box = by("text");
  const shown = [el("span", { class: "tok prompt" }, trace.prompt_text)];
  const until = moment.phase === COMMIT ? moment.step + 1 : moment.step;
  steps.slice(0, until).forEach((one, k) => {
    const run = one.emitted.map((_, i) => el("span", { class: `tok ${origin(one, i)}` }, one.pieces[i]));
    if (k !== moment.step) return shown.push(...run);
    run.splice(one.accepted, 0, ...rejectedGuesses(one));
    shown.push(el("span", { class: "now" }, ...run));
  });
  box.replaceChildren(...shown);
  box.scrollTop = box.scrollHeight;
}

function rejectedGuesses(step) {
  return step.nodes
    .filter((node) => node.state === "rejected" && node.parent === step.path.at(-1))
    .map((node) => el("del", { class: "tok rejected" }, trace.texts[node.token]));
}

function drawFigures() {
  const now = soFar(moment.phase === COMMIT ? moment.step + 1 : moment.step);
  const figures = [
    ["tokens", String(now.tokens)],
    ["tokens a pass", now.passes ? (now.tokens / now.passes).toFixed(2) : "–"],
    ["accepted of tested", now.tested ? (now.accepted / now.tested).toFixed(2) : "–"],
    ["times plain decoding", now.speedUp === null ? "–" : now.speedUp.toFixed(2)],
  ];
  by("figures").replaceChildren(
    ...figures.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", { "data-figure": name }, value))));
  const most = Math.max(...steps.map((step) => step.emitted.length));
  const wide = 400 / steps.length;
  const bars = steps.map((step, k) => {
    const high = (40 * step.emitted.length) / most;
    const fill = k === moment.step ? "var(--focus)" : "var(--line)";
    return svg("rect", { x: k * wide, y: 42 - high, width: Math.max(wide - 1, 0.6), height: high, fill });
  });
  const label = `Tokens of each step: ${steps.map((step) => step.emitted.length).join(", ")}`;
  by("history").replaceChildren(
    svg("svg", { viewBox: "0 0 400 44", preserveAspectRatio: "none", role: "img", "aria-label": label }, ...bars));
}

function place(step) { // column (depth) and row (leaf) of every node, the final token a child of the path's end
  const children = step.nodes.map((_, i) => step.nodes.flatMap((n, k) => (k && n.parent === i && n.token >= 0 ? [k] : [])));
  const end = step.path.at(-1);
  if (step.how !== "cut") children[end].push(FINAL);
  const at = new Map();
  let leaf = 0;
  const visit = (node, depth) => {
    const below = node === FINAL ? [] : children[node];
    below.forEach((child) => visit(child, depth + 1));
    const rows = below.map((child) => at.get(child).row);
    at.set(node, { depth, row: rows.length ? (rows[0] + rows.at(-1)) / 2 : leaf++ });
  };
  visit(0, 0);
  return { at, leaves: leaf, depth: Math.max(...[...at.values()].map((spot) => spot.depth)) };
}

function drawTree(step) {
  const { at, leaves, depth } = place(step);
  const W = 104, H = 56, gapX = 22, gapY = 10;
  const room = by("tree").clientWidth || 700;
  const across = (depth + 1) * (W + gapX) <= room || leaves * (W + gapY) > room; // left to right, else top down
  const size = across ? [(depth + 1) * (W + gapX), leaves * (H + gapY)] : [leaves * (W + gapY), (depth + 1) * (H + gapX)];
  const spot = (node) => {
    const { depth: d, row } = at.get(node);
    return across ? [d * (W + gapX) + 6, row * (H + gapY) + 6] : [row * (W + gapY) + 6, d * (H + gapX) + 6];
  };
  const parts = [], boxes = [];
  const link = (from, to, kind) => {
    const [a, b] = [spot(from), spot(to)];
    const [x1, y1, x2, y2] = across
      ? [a[0] + W, a[1] + H / 2, b[0], b[1] + H / 2] : [a[0] + W / 2, a[1] + H, b[0] + W / 2, b[1]];
    parts.push(svg("path", { class: `edge ${kind}`, d: `M${x1} ${y1}L${x2} ${y2}` }));
  };
  const verified = moment.phase >= 2;
  step.nodes.forEach((node, i) => {
    if (!at.has(i)) return;
    if (i) link(node.parent, i, verified && node.state === "accepted" ? "on" : "");
    boxes.push(nodeBox(step, i, spot(i), W, H));
  });
  if (verified && step.how !== "cut") {
    link(step.path.at(-1), FINAL, "last");
    boxes.push(nodeBox(step, FINAL, spot(FINAL), W, H));
  }
  const guesses = step.nodes.filter((node, i) => i && node.token >= 0).length;
  const label = `Draft of ${many(guesses)}; choose a node to see its numbers`;
  const [w, h] = [size[0] + 12, size[1] + 12];
  const focused = document.activeElement?.closest?.(".node")?.dataset.node;
  by("tree").replaceChildren(svg("svg", { width: w, height: h, role: "group", "aria-label": label }, ...parts, ...boxes));
  const [x, y] = spot(at.has(standing(step)) ? standing(step) : 0); // a node that does not fit is scrolled to
  by("tree").scrollTo(x - (room - W) / 2, y - (by("tree").clientHeight - H) / 2);
  if (focused !== undefined) document.querySelector(`.node[data-node="${focused}"]`)?.focus();
}

function nodeBox(step, i, [x, y], W, H) {
  const node = i === FINAL ? { token: step.token, state: step.how } : step.nodes[i];
  const state = moment.phase >= 2 || i === 0 ? node.state : "untested";
  const test = node.test;
  let small = i === 0 ? "pending" : i === FINAL ? { residual: "residual", own: "own draw", bonus: "bonus" }[node.state] : "";
  const bars = [];
  if (test) {
    const both = [["p", moment.phase ? test.x.p : null], ["q", test.x.q]].filter(([, value]) => value !== null);
    small = both.map(([name, value]) => `${name} ${tiny(value)}`).join("  ");
    both.forEach(([name, value]) => bars.push(svg("rect", {
      class: `bar-${name}`, x: 8, y: name === "p" ? H - 13 : H - 8, width: Math.max((W - 16) * value, 1), height: 4, rx: 1,
    })));
  }
  const name = `${i === FINAL ? "Last token" : `Node ${i}`}, “${word(node.token)}”, ` +
    (moment.phase >= 2 || !test ? WORDS[state] : "drafted") +
    (test ? `, p ${number(test.x.p)}, q ${number(test.x.q)}` : "");
  const box = svg("g", {
    class: `node ${state}`, transform: `translate(${x} ${y})`, role: "button", tabindex: "0",
    "aria-label": name, "aria-pressed": String(standing(step) === i), "data-node": String(i),
  },
  svg("title", {}, name),
  svg("rect", { class: "box", width: W, height: H, rx: 7 }),
  svg("text", { class: "word", x: W / 2, y: test ? 19 : 25 }, brief(word(node.token), 10)),
  svg("text", { class: "small", x: W / 2, y: test ? 36 : 43 }, small),
  ...bars,
  svg("text", { class: "mark", x: W - 9, y: 17 }, MARKS[state] ?? ""));
  box.addEventListener("click", () => choose(i));
  return box;
}

function coinText(step, i) {
  if (i === FINAL) {
    return {
      residual: `Nothing else was accepted: drawn from what p has left over q.`,
      bonus: "All guesses on the path were accepted: one more token from p comes free.",
      own: step.proposed ? "The target's own draw y ~ p is no child of this place, and is emitted."
        : "Nothing was guessed here: the target's own draw from p.",
    }[step.how];
  }
  if (i === 0) return "The last token of the text. The pass reads it and all guesses at once.";
  const node = step.nodes[i];
  const coin = node.test.coin === null ? null : step.coins[node.test.coin];
  if (coin !== null) {
    const k = coin.node.indexOf(i);
    const fell = coin.outcome[k] ? "heads" : "tails";
    const verdict = node.state === "untested" ? "not reached, so it does not count" : node.state;
    return `Coin with probability ${number(coin.prob[k])}: ${fell}. ${verdict[0].toUpperCase()}${verdict.slice(1)}.`;
  }
  const pick = step.coins.find((one) => one.op === "pick" && one.node[0] === node.parent);
  if (pick && node.test.x.q === null) return `Accepted when the target draws it. It drew “${word(pick.outcome[0])}”: ${node.state}.`;
  if (pick && trace.rule !== "rrs" && step.coins.every((one) => one.op === "pick")) {
    return `The target drew “${word(pick.outcome[0])}”: ${node.state}.`;
  }
  return "Not tested: the path did not come here.";
}

function drawDetail(step) {
  const i = standing(step);
  const last = i === FINAL;
  const node = last ? { token: step.token } : step.nodes[i];
  const name = last ? "Last token" : i === 0 ? "Pending token" : `Node ${i}`;
  by("h-detail").textContent = `${name}: “${word(node.token)}”`;
  by("coin").textContent = moment.phase >= 2 || i === 0 ? coinText(step, i) : "Drafted; the coin falls in the phase “verify”.";
  const test = node.test;
  const numbers = [];
  if (test) {
    numbers.push(["p", number(test.x.p)], ["q", number(test.x.q)]);
    if (test.x.q !== null) {
      numbers.push(["min(p, q)", number(Math.min(test.x.p, test.x.q))], ["min(1, p/q)", number(test.ratio)]);
      numbers.push(["Σ min(p, q)", number(test.alpha)]);
    }
  }
  by("numbers").replaceChildren(...numbers.map(([term, value]) =>
    el("div", {}, el("dt", {}, term), el("dd", { "data-number": term }, value))));
  const laws = test ? test.laws : last ? step.law : node.next;
  if (!laws) return by("laws").replaceChildren("This page was kept small: it has the distributions of tested nodes only.");
  by("laws").replaceChildren(lawTable(laws, node.token, test?.alpha ?? null, last, step));
}

function lawTable(laws, x, alpha, last, step) {
  const both = Array.isArray(laws.q);
  const left = both && alpha < 1 ? 1 - alpha : 0;
  const only = last && step.how === "residual" ? "r" : "p";
  const columns = both ? ["p", "q", "min", "r"] : [only];
  const residual = (k) => (left ? Math.max(laws.p[k] - laws.q[k], 0) / left : 0);
  const scale = Math.max(...laws.p, ...(both ? laws.q : []), ...(both ? laws.p.map((_, k) => residual(k)) : []));
  const cells = (p, q, r) => {
    const all = { p, q, min: Math.min(p, q), r };
    return columns.map((name) => {
      const value = both ? all[name] : p;
      if (value === null) return el("td", {}, "");
      const text = name === "p" || name === "q" || !both ? number(value) : round(value);
      return el("td", { class: name, style: `--v:${Math.min((100 * value) / scale, 100).toFixed(2)}%` }, text);
    });
  };
  const order = laws.token.map((_, k) => k).sort((a, b) =>
    Math.max(laws.p[b], both ? laws.q[b] : 0) - Math.max(laws.p[a], both ? laws.q[a] : 0));
  const rows = order.map((k) => {
    const q = both ? laws.q[k] : 0;
    const token = laws.token[k];
    return el("tr", { class: token === x ? "x" : "", "data-token": String(token) },
      el("th", { scope: "row" }, brief(word(token), 14)), ...cells(laws.p[k], q, residual(k)));
  });
  rows.push(el("tr", { "data-token": "rest" }, el("th", { scope: "row" }, "all others"), ...cells(laws.rest, both ? laws.q_rest : 0, null)));
  const titles = { p: "p", q: "q", min: "min(p, q)", r: "residual r" };
  return el("table", { class: both ? "" : "one" },
    el("caption", { class: "hidden" }, "Probabilities of the likeliest tokens"),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "token"), ...columns.map((name) => el("th", { scope: "col" }, titles[name])))),
    el("tbody", {}, ...rows));
}

function cells(kinds, first, textAt) {
  const marks = { kept: "✓", gathered: "←", gone: "×" };
  const list = kinds.slice(first).map((kind, k) =>
    el("i", { class: `cell ${kind}`, title: `slot ${first + k}: ${textAt(first + k)}` }, marks[kind] ?? ""));
  if (first) list.unshift(el("i", { class: "cell more" }, `0…${first - 1}`));
  return list;
}

function drawCache(id, name, before, end, after, moved, base, readAt, step) {
  const kinds = [];
  for (let slot = 0; slot < Math.max(end, before); slot++) {
    if (slot < Math.min(before, base)) kinds.push("old");
    else if (moment.phase < readAt) kinds.push(slot < before ? "old" : "");
    else if (moment.phase < COMMIT) kinds.push(slot < end ? "new" : "gone");
    else kinds.push(slot >= after ? "gone" : moved.includes(slot - (step.n - 1)) ? "gathered" : "kept");
  }
  while (kinds.length && kinds.at(-1) === "") kinds.pop();
  const row = [...trace.prompt, ...trace.tokens];
  const textAt = (slot) => (slot < step.n ? word(row[slot]) : "a draft node");
  const say = moment.phase === COMMIT
    ? `${before} entries before, ${end - base} read, ${after} after: ${Math.max(end, before) - after} rolled back`
    : moment.phase < readAt ? `${before} entries` : `${before} entries before, ${end - base} read`;
  by(id).replaceChildren(
    el("p", {}, el("strong", {}, name), ` ${say}`),
    el("div", { class: "cells", role: "img", "aria-label": `${name}: ${say}` }, ...cells(kinds, Math.max(0, base - 48), textAt)));
}

function drawCaches(step) {
  const { target, draft } = step.cache;
  drawCache("target-cache", "Target", target.before, target.before + target.read, target.after, target.moved, target.before, 1, step);
  if (draft === null) by("draft-cache").replaceChildren(el("p", {}, el("strong", {}, "Draft"), " has no cache"));
  else drawCache("draft-cache", "Draft", draft.before, draft.end, draft.after, draft.moved, draft.rolled_back, 0, step);
}

function drawMask(step) {
  const there = step.nodes.flatMap((node, i) => (node.token >= 0 ? [i] : []));
  const width = by("mask").clientWidth || 480;
  const [left, past, letters] = width > 420 ? [112, 72, 13] : [84, 46, 9];
  const room = width - left - past - 10, top = 24;
  const C = Math.min(Math.max(Math.floor(room / there.length) - 2, 10), 22);
  const tiny = C < 16 ? "tiny" : "";
  const base = C / 2 + 5;
  const parts = [];
  const sentences = [];
  const on = moment.phase >= 1;
  there.forEach((i, r) => {
    const sees = ancestors(step, i);
    const y = top + r * (C + 2);
    parts.push(svg("text", { x: left - 8, y: y + base, "text-anchor": "end", class: tiny }, brief(`${i} ${word(step.nodes[i].token)}`, letters)));
    parts.push(svg("rect", { class: on ? "past" : "blind", x: left, y, width: past, height: C, rx: 3 }));
    if (on) parts.push(svg("text", { class: `in ${tiny}`, x: left + past / 2, y: y + base, "text-anchor": "middle" }, step.n > 1 ? `0…${step.n - 2}` : "empty"));
    there.forEach((j, c) => {
      const kind = !on || !sees.has(j) ? "blind" : i === j ? "self" : "see";
      parts.push(svg("rect", { class: kind, x: left + past + 6 + c * (C + 2), y, width: C, height: C, rx: 3, "data-mask": `${i},${j}` }));
    });
    sentences.push(`Node ${i} sees the ${step.n - 1} tokens of the cache and nodes ${[...sees].sort((a, b) => a - b).join(", ")}.`);
  });
  there.forEach((j, c) => parts.push(svg("text", { class: tiny, x: left + past + 6 + C / 2 + c * (C + 2), y: 16, "text-anchor": "middle" }, String(j))));
  parts.push(svg("text", { x: left + past / 2, y: 16, "text-anchor": "middle" }, "cache"));
  const w = left + past + 10 + there.length * (C + 2), h = top + there.length * (C + 2) + 4;
  by("mask").replaceChildren(
    svg("svg", { width: w, height: h, "aria-hidden": "true" }, ...parts),
    el("ul", { class: "hidden" }, ...sentences.map((text) => el("li", {}, text))));
}

function sentence(step) {
  const guesses = step.nodes.filter((node, i) => i && node.token >= 0).length;
  const last = { residual: "one token drawn in place of the rejected", own: "the target's own token", bonus: "a bonus token", cut: "ended by a stop token" };
  const said = [
    `${guesses} guessed in ${step.ms.draft} ms`, `one target pass over ${many(step.nodes.length)}, ${step.ms.target} ms`,
    `${step.accepted} of ${guesses} accepted`, `${step.accepted} accepted and ${last[step.how]}: ${many(step.emitted.length)} from one pass`,
  ];
  return `Step ${moment.step + 1} of ${steps.length}, ${PHASES[moment.phase]}: ${said[moment.phase]}.`;
}

function draw() {
  if (!steps.length) {
    by("where").textContent = "This run has no step.";
    by("text").textContent = trace.prompt_text;
    return;
  }
  const step = steps[moment.step];
  document.body.dataset.step = String(moment.step);
  document.body.dataset.phase = PHASES[moment.phase];
  document.body.dataset.playing = String(timer !== null);
  by("where").setAttribute("aria-live", timer === null ? "polite" : "off"); // while it plays, speech could not keep up
  by("where").textContent = sentence(step);
  by("seek").value = String(moment.step + 1);
  by("seek").setAttribute("aria-valuetext", `Step ${moment.step + 1} of ${steps.length}`);
  by("phases").replaceChildren(...PHASES.map((name, k) =>
    el("li", k === moment.phase ? { "aria-current": "step" } : {}, name)));
  drawText(step);
  drawFigures();
  drawTree(step);
  drawDetail(step);
  drawCaches(step);
  drawMask(step);
}

// --- moving through the run ------------------------------------------------------------------------------------

function go(step, phase) {
  const to = Math.min(Math.max(step, 0), steps.length - 1);
  if (to !== moment.step) chosen = null;
  moment.step = to;
  moment.phase = phase;
  draw();
}

function phaseBy(delta) {
  const at = moment.step * PHASES.length + moment.phase + delta;
  if (at >= 0 && at < steps.length * PHASES.length) go(Math.floor(at / PHASES.length), at % PHASES.length);
}

function choose(i) {
  chosen = i;
  draw();
}

function pause() {
  clearTimeout(timer);
  timer = null;
  by("play").textContent = "Play";
  by("play").setAttribute("aria-label", "Play");
  document.body.dataset.playing = "false";
}

function tick() {
  if (moment.step === steps.length - 1 && moment.phase === COMMIT) return pause();
  phaseBy(1);
  timer = setTimeout(tick, 900 / Number(by("speed").value));
}

function play() {
  if (timer !== null || !steps.length) return pause();
  if (moment.step === steps.length - 1 && moment.phase === COMMIT) go(0, 0);
  by("play").textContent = "Pause";
  by("play").setAttribute("aria-label", "Pause");
  timer = setTimeout(tick, 0);
}

const jump = (step) => { pause(); go(step, COMMIT); };
const actions = {
  first: () => jump(0), back: () => jump(moment.step - 1), next: () => jump(moment.step + 1),
  last: () => jump(steps.length - 1), play, theme,
};

function theme() {
  const dark = document.documentElement.dataset.theme !== "dark";
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  by("theme").textContent = dark ? "Light" : "Dark";
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.target.matches("select, input")) return;
  const node = event.target.closest?.(".node");
  const button = event.target.closest?.("button");
  if (node && (event.key === "Enter" || event.key === " ")) choose(node.dataset.node === FINAL ? FINAL : Number(node.dataset.node));
  else if (button && (event.key === "Enter" || event.key === " ")) return;
  else if (event.key === " ") play();
  else if (event.key === "ArrowRight") event.shiftKey ? (pause(), phaseBy(1)) : actions.next();
  else if (event.key === "ArrowLeft") event.shiftKey ? (pause(), phaseBy(-1)) : actions.back();
  else if (event.key === "Home") actions.first();
  else if (event.key === "End") actions.last();
  else if (event.key === "t") theme();
  else return;
  event.preventDefault();
});

for (const [id, action] of Object.entries(actions)) by(id).addEventListener("click", action);
by("seek").max = String(Math.max(steps.length, 1));
by("seek").addEventListener("input", () => jump(Number(by("seek").value) - 1));
addEventListener("resize", draw);
const wanted = matchMedia("(prefers-color-scheme: dark)");
const follow = () => { if ((document.documentElement.dataset.theme === "dark") !== wanted.matches) theme(); };
wanted.addEventListener("change", follow);
follow();

const { temperature, top_k: topK, top_p: topP } = trace.sampling;
by("about").textContent = [
  `rule ${trace.rule}`, trace.drafter, temperature === 0 ? "greedy" : `temperature ${temperature}`,
  topK === null ? "" : `top-k ${topK}`, topP === null ? "" : `top-p ${topP}`,
  trace.seed === null ? "" : `seed ${trace.seed}`, trace.device, `minispec ${trace.minispec}`,
].filter(Boolean).join(" · ");
draw();
