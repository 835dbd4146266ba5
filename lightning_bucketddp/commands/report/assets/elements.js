// Elements, numbers in words, and the tip that describes what is pointed at.

const content = JSON.parse(document.getElementById("content").textContent);
const byId = (id) => document.getElementById(id);

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
}

// Sentences with figures that stand out: what is between asterisks is bold.
function setText(target, text) {
  target.replaceChildren(...text.split("*").map((part, i) => (i % 2 ? element("b", "", part) : part)));
}

function key(className, colour = "") {
  const made = element("span", `key ${className}`);
  if (colour) made.style.setProperty("--rank", colour);
  return made;
}

function addLegend(list, entries) {
  for (const [className, text, colour] of entries) {
    const item = element("li");
    item.append(key(className, colour), element("span"));
    setText(item.lastChild, text);
    list.append(item);
  }
}

const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
// Three digits or more, and none behind the point where they would be noise.
const inMs = (ms) => `${number(ms, ms === 0 || Math.abs(ms) >= 1000 ? 0 : Math.abs(ms) < 1 ? 3 : Math.abs(ms) < 10 ? 2 : 1)} ms`;
const percent = (share) => `${number(100 * share, share > 0 && share < 0.1 ? 1 : 0)}%`;

function inBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (bytes >= 1000 && power < units.length - 1) { bytes /= 1024; power += 1; }
  return `${number(bytes, power && bytes < 100 ? 1 : 0)} ${units[power]}`;
}

const count = (many, noun) => `${number(many)} ${noun}${many === 1 ? "" : "s"}`;
const total = (values) => values.reduce((sum, value) => sum + value, 0);
// Not `Math.max(...values)`: a call takes only so many arguments.
const largest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
const smallest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);

function median(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// Who is slower than all others by more than this share is named.
const LATE_BY = 0.03;

// The place of the largest value, if it is clearly larger than the median of the others; else -1.
function latest(values) {
  const known = values.map((value) => value ?? -Infinity);
  const place = known.indexOf(largest(known));
  const others = values.filter((value, i) => i !== place && value !== null);
  return others.length && values[place] > (1 + LATE_BY) * median(others) ? place : -1;
}

const behind = (values, place) => values[place] - median(values.filter((_, i) => i !== place));

// --- Ranks

// No two are alike, neighbours differ most, and none is near the orange of what is late.
function colourOf(place) {
  const hue = 50 + ((155 + (310 * place) / content.ranks.length) % 310);
  return `hsl(${hue.toFixed(1)} 60% calc(var(--curves) + ${[0, 12, -12][place % 3]}%))`;
}

// --- Buckets

const bucketsOf = (plan) => content.plans[plan] ?? [];
const bytesOf = (bucket) => (bucket ? total(bucket.sizes) : 0);
const parametersOf = (bucket) => (bucket ? bucket.parameters.map((name, i) => [name, inBytes(bucket.sizes[i])]) : []);

// --- The tip

const descriptions = new WeakMap();
const MOST_ITEMS = 14;

// Give an element words: `describe` returns its title, facts as pairs, and items as pairs.
function describe(target, label, describeIt) {
  target.setAttribute("aria-label", label);
  descriptions.set(target, describeIt);
  return target;
}

function pairs(list, tag, [first, second]) {
  return list.map((pair) => {
    const made = element(tag);
    made.append(element(first, "", pair[0]), element(second, "", pair[1]));
    return made;
  });
}

function showTip(target, place) {
  const { title, facts = [], items = [] } = descriptions.get(target)();
  const tip = byId("tip");
  const terms = element("dl");
  for (const [term, fact] of facts) terms.append(element("dt", "", term), element("dd", "", fact));
  tip.replaceChildren(element("strong", "", title), terms);
  if (items.length) {
    const list = element("ul");
    list.append(...pairs(items.slice(0, MOST_ITEMS), "li", ["span", "span"]));
    if (items.length > MOST_ITEMS) list.append(element("li", "", `and ${items.length - MOST_ITEMS} more`));
    tip.append(list);
  }
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = place.x + 16 + width > innerWidth ? place.x - width - 16 : place.x + 16;
  const top = place.y + 18 + height > innerHeight ? place.y - height - 12 : place.y + 18;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${Math.max(top, 4)}px`;
  light(target.dataset.bucket);
}

function hideTip() {
  byId("tip").hidden = true;
  light(undefined);
}

let lit;

// Show one bucket wherever it is: on all ranks, and in the plan.
function light(bucket) {
  if (bucket === lit) return;
  lit = bucket;
  document.querySelectorAll(".lit[data-bucket]").forEach((found) => found.classList.remove("lit"));
  if (bucket !== undefined) {
    document.querySelectorAll(`[data-bucket="${bucket}"]`).forEach((found) => found.classList.add("lit"));
  }
}

function described(node) {
  while (node instanceof Element && !descriptions.has(node)) node = node.parentElement;
  return node instanceof Element ? node : null;
}

document.addEventListener("pointermove", (event) => {
  const target = event.buttons ? null : described(event.target);
  if (target) showTip(target, event);
  else if (!document.activeElement || !descriptions.has(document.activeElement)) hideTip();
});
document.addEventListener("focusin", (event) => {
  if (!descriptions.has(event.target)) { hideTip(); return; }
  const box = event.target.getBoundingClientRect();
  showTip(event.target, { x: box.left, y: box.bottom });
});
document.addEventListener("focusout", hideTip);

// One stop for Tab; the arrow keys go from one described element in it to the next.
function makeStop(group, label) {
  group.tabIndex = 0;
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", label);
  group.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") { group.focus(); hideTip(); }
    if (!step) return;
    event.preventDefault();
    const items = [...group.querySelectorAll('[tabindex="-1"]')];
    const here = items.indexOf(document.activeElement);
    items[here < 0 ? (step > 0 ? 0 : items.length - 1) : Math.min(Math.max(here + step, 0), items.length - 1)]?.focus();
  };
}

function makeItem(item) {
  item.tabIndex = -1;
  item.setAttribute("role", "img");
  return item;
}
