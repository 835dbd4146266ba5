// Lines over steps, and over bucket sizes.

const MARGIN = { left: 52, right: 14, top: 12, bottom: 26 };

function shape(svg, tag, className, attributes) {
  const made = document.createElementNS(svg.namespaceURI, tag);
  made.setAttribute("class", className);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  svg.append(made);
  return made;
}

function write(svg, text, x, y, anchor = "middle", className = "") {
  shape(svg, "text", className, { x, y, "text-anchor": anchor }).textContent = text;
}

// Axes; returns where things are. `x.log`: each doubling is as wide as the next.
function drawAxes(svg, x, y) {
  svg.replaceChildren();
  const [width, height] = [svg.clientWidth, svg.clientHeight];
  const scale = (log) => (log ? Math.log2 : (value) => value);
  const to = (range, from, until) => {
    const f = scale(range.log);
    const span = f(range.max) - f(range.min) || 1;
    return (value) => from + ((f(value) - f(range.min)) / span) * (until - from);
  };
  const atX = to(x, MARGIN.left, width - MARGIN.right);
  const atY = to(y, height - MARGIN.bottom, MARGIN.top);
  const yTicks = ticks(y.min, y.max, 5);
  for (const value of yTicks.at) {
    shape(svg, "line", "gridlines", { x1: MARGIN.left, x2: width - MARGIN.right, y1: atY(value), y2: atY(value) });
    write(svg, number(value, yTicks.digits), MARGIN.left - 8, atY(value) + 4, "end");
  }
  for (const value of x.ticks ?? ticks(x.min, x.max, Math.max(width / 70, 2)).at.filter(Number.isInteger)) {
    const label = number(value, Number.isInteger(value) ? 0 : 2);
    const isCut = atX(value) + 3.8 * label.length > width;
    write(svg, label, isCut ? width - 1 : atX(value), height - 8, isCut ? "end" : "middle");
  }
  return { atX, atY };
}

const path = (points) => {
  let isUp = true; // a step that was not recorded leaves a gap
  return points.map((point) => {
    const command = point === null ? "" : isUp ? `M${point}L${point}` : `L${point}`;
    isUp = point === null;
    return command;
  }).join("");
};

// --- Every recorded step

// A first step that took ten times as long must not flatten all others: it ends at the upper edge.
const HIGHEST = 2.5;

function drawHistory(svg, kind, late, chosen) {
  const { steps, [kind]: values } = content.history;
  const known = values.flat().filter((value) => value !== null);
  const top = Math.min(largest(known), HIGHEST * median(known));
  const low = smallest(known);
  const room = 0.1 * (top - low) || 0.05 * top;
  const y = { min: Math.max(low - room, 0), max: top + room };
  const { atX, atY } = drawAxes(svg, { min: steps[0], max: steps[steps.length - 1] }, y);
  shape(svg, "line", "now", { x1: atX(chosen), x2: atX(chosen), y1: MARGIN.top, y2: svg.clientHeight - MARGIN.bottom });
  const inOrder = values.map((_, place) => place).sort((a, b) => (a === late) - (b === late));
  const curves = new Map(inOrder.map((place) => [place, shape(svg, "path", `curve${place === late ? " late" : ""}`, {
    "data-rank": content.ranks[place].rank,
    style: `--rank: ${colourOf(place)}`,
    d: path(values[place].map((ms, i) => (ms === null ? null : `${atX(steps[i]).toFixed(1)},${atY(Math.min(ms, y.max)).toFixed(1)}`))),
  })]));
  svg.setAttribute("aria-label", `${kind === "own" ? "own time" : "step time"} of ${count(values.length, "rank")} by step; the table below has the typical step`);
  const nearest = (event) => nearestPoint(event, svg, { steps, values, atX, atY });
  describe(svg, svg.getAttribute("aria-label"), () => {
    const { place, i } = nearest(hovered);
    curves.forEach((curve, other) => curve.classList.toggle("lit", other === place));
    return {
      title: `rank ${content.ranks[place].rank}, step ${number(steps[i])}`,
      facts: [["own time", inMs(content.history.own[place][i])], ["step", inMs(content.history.step[place][i])]],
    };
  });
  svg.onpointerleave = () => curves.forEach((curve) => curve.classList.remove("lit"));
  svg.onclick = (event) => chooseNearest(steps[nearest(event).i]);
}

let hovered = { clientX: 0, clientY: 0 };
document.addEventListener("pointermove", (event) => { hovered = event; }, { capture: true });

function nearestPoint(event, svg, { steps, values, atX, atY }) {
  const box = svg.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const away = steps.map((number) => Math.abs(atX(number) - x));
  const i = away.indexOf(smallest(away));
  const heights = values.map((ofRank) => (ofRank[i] === null ? Infinity : Math.abs(atY(ofRank[i]) - y)));
  return { place: heights.indexOf(smallest(heights)), i };
}

function historyInWords(late) {
  if (content.ranks.length === 1) return "One rank only.";
  if (late < 0) return "No rank is clearly slower than the others.";
  return `*Rank ${content.ranks[late].rank}* usually takes *${inMs(content.typical.stragglerBy)}* longer than the others, and all wait for it.`;
}

function drawRankTable(late) {
  const table = byId("ranks");
  const row = (cells, tag) => {
    const made = element("tr");
    made.append(...cells.map((cell) => element(tag, "", cell)));
    table.append(made);
    return made;
  };
  row(["rank", "host", "own time", "step", ""], "th");
  content.ranks.forEach(({ rank, host, own, step }, place) => {
    const cells = [`${rank}`, host, inMs(own), inMs(step), place === late ? "slowest" : ""];
    row(cells, "td").firstChild.prepend(key(place === late ? "line late" : "line calm", colourOf(place)));
  });
}

// --- Other bucket sizes

function drawSizes(svg) {
  const { byCap, current, optimum } = content.sizes;
  const caps = byCap.map(({ cap }) => cap);
  const powers = caps.filter((cap) => Number.isInteger(Math.log2(cap)));
  const highest = largest([...byCap, optimum, ...(current ? [current] : [])].map(({ exposed }) => exposed));
  const x = { min: smallest([...caps, current?.cap ?? caps[0]]), max: largest([...caps, current?.cap ?? 0]), log: true, ticks: powers };
  const { atX, atY } = drawAxes(svg, x, { min: 0, max: 1.08 * highest || 1 });
  const right = svg.clientWidth - MARGIN.right;
  shape(svg, "path", "curve sizes", { d: path(byCap.map(({ cap, exposed }) => `${atX(cap)},${atY(exposed)}`)) });
  shape(svg, "path", "optimum", { d: `M${MARGIN.left},${atY(optimum.exposed)}H${right}` });
  const inWords = (what, { cap, buckets, exposed }) => [what, () => ({
    title: what,
    facts: [["predicted wait", inMs(exposed)], ["buckets", number(buckets)], ["largest", `${number(cap, 2)} MiB`]],
  })];
  const marked = (className, radius, what, prediction) => describe(
    makeItem(shape(svg, "circle", className, { cx: atX(prediction.cap), cy: atY(prediction.exposed), r: radius })),
    ...inWords(what, prediction),
  );
  makeStop(svg, "predicted wait for communication by bucket size");
  for (const prediction of byCap) marked("dot", 4, `bucket_cap_mb=${Number(prediction.cap.toPrecision(3))}`, prediction);
  if (current) marked("current", 7, "the plan in use", current);
}

function sizesInWords(late) {
  const { current, optimum, byCap } = content.sizes;
  const best = byCap.reduce((a, b) => (b.exposed <= a.exposed ? b : a));
  const words = [
    `The simulator repeats the recorded backward with other plans. The computed optimum has *${count(optimum.buckets, "bucket")}* and waits *${inMs(optimum.exposed)}*;`,
    `the best single size, *${Number(best.cap.toPrecision(3))} MiB*, waits ${inMs(best.exposed)}.`,
  ];
  if (current) {
    words.push(`The plan in use is predicted to wait *${inMs(current.exposed)}*, and was measured to wait ${inMs(content.typical.phases.exposed)}.`);
  }
  if (late >= 0) {
    words.push(`The simulator knows no slow ranks, so compare it with rank ${content.ranks[late].rank}, which waits for no other: ${inMs(content.ranks[late].exposed)}.`);
  }
  if (content.tuning) {
    words.push(`bucket_cap_mb="auto" has tried what the simulator thinks best, and what was measured has decided: ${content.tuning}.`);
  }
  return words.join(" ");
}
