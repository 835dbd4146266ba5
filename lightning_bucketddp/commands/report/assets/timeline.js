// One step: a group of lanes for each rank.

let step = null; // what is shown
let joined = []; // by bucket: the rank that launched it last, and when
let view = [0, 1]; // from when to when, in ms
const lanes = []; // by rank: the elements, and whether they can be seen

const isSharded = () => content.steps.some(({ ranks }) => ranks.some((lane) => lane?.gathers.length));
const isWait = ([name]) => WAITS.includes(name);
const isZoomed = () => view[0] > 0 || view[1] < step.length;
const share = (ms) => (100 * (ms - view[0])) / (view[1] - view[0]);

function makeLanes() {
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const lane = lanes[Number(target.dataset.place)];
      lane.isVisible = isIntersecting;
      drawLane(lane);
    }
  }, { root: byId("timeline"), rootMargin: "300px" });
  content.ranks.forEach(({ rank, host }, place) => {
    const row = element("div", "rank");
    const title = element("h3", "", `rank ${rank}`);
    const tracks = element("div", "tracks");
    row.dataset.place = place;
    row.append(title, tracks);
    byId("lanes").append(row);
    lanes.push({ rank, host, place, title, tracks, isVisible: false });
    watch.observe(row);
  });
  new ResizeObserver(() => lanes.forEach(drawLane)).observe(byId("timeline"));
  addLegend(byId("legend"), [
    ...["data", "forward", "backward", "exposed", "finish", "optimizer", "weights"]
      .filter((name) => name !== "weights" || isSharded())
      .filter((name) => name !== "finish" || content.steps.some(({ ranks }) => ranks.some((lane) => lane?.spans.some((_, i) => isFinish(lane, i)))))
      .map((name) => [name, PHASES[name]]),
    ["ready", "bucket complete"],
    ["held", "until launched: earlier buckets go first"],
    ["queued", "until it runs"],
    ["reduction", "reduction of a bucket"],
    ["meeting", "until the last rank has joined it"],
    ...(isSharded() ? [["gather", "exchange of a bucket's weights"]] : []),
    ["waited", "what the step waited for"],
  ]);
}

function showStep(shown) {
  step = shown;
  joined = whoJoinedLast();
  const own = step.ranks.map((lane) => lane && ownTime(lane));
  const late = latest(own);
  for (const lane of lanes) {
    const isLate = lane.place === late;
    lane.title.replaceChildren(`rank ${lane.rank}`, element("small", isLate ? "late" : "", isLate ? "slowest" : lane.host));
    lane.title.title = `rank ${lane.rank} on ${lane.host}`;
  }
  byId("slowest-rank").disabled = late < 0;
  setText(byId("step-text"), stepInWords(own, late));
  zoom([0, step.length]);
}

function zoom(to) {
  view = to;
  byId("zoom-all").disabled = !isZoomed();
  drawAxis();
  lanes.forEach(drawLane);
}

function showSlowestRank() {
  document.querySelector("#lanes .late").closest(".rank").scrollIntoView({ block: "center" });
}

// From shortly before the first rank waits to the end.
function zoomToTheWait() {
  const waits = step.ranks.flatMap((lane) => (lane ? lane.spans.filter(isWait) : []));
  if (!waits.length) return;
  const from = smallest(waits.map(([, start]) => start));
  const to = largest(waits.map(([, , end]) => end));
  const margin = 0.15 * (to - from);
  zoom([Math.max(from - margin, 0), Math.min(to + margin, step.length)]);
}

// No reduction gets anywhere before every rank has launched it.
function whoJoinedLast() {
  const buckets = Array.from({ length: largest(step.ranks.map((lane) => lane?.buckets.length ?? 0)) });
  return buckets.map((_, index) => {
    const launched = step.ranks.map((lane) => lane?.buckets[index]?.[1] ?? -Infinity);
    const at = largest(launched);
    return { at, rank: content.ranks[launched.indexOf(at)].rank };
  });
}

const waitedTime = (lane) => total(lane.spans.filter(isWait).map(([, from, to]) => to - from));
const ownTime = (lane) => total(lane.spans.map(([, from, to]) => to - from)) - waitedTime(lane);

function stepInWords(own, late) {
  const there = step.ranks.filter((lane) => lane);
  const waited = median(there.map(waitedTime));
  const buckets = bucketsOf(step.plan);
  const last = largest(there.map((lane) => lane.buckets.length)) - 1;
  const words = [`*${inMs(step.length)}* from the first rank's beginning to the last one's end.`];
  if (last >= 0) {
    const names = buckets[last]?.parameters.slice(0, 2).join(", ");
    words.push(
      `The ranks waited *${inMs(waited)}* (median) for communication, at last for *bucket ${last}*` +
      (names ? ` (${inBytes(bytesOf(buckets[last]))}: ${names}${buckets[last].parameters.length > 2 ? ", …" : ""}).` : "."),
    );
  }
  if (late >= 0) words.push(`*Rank ${content.ranks[late].rank}* took *${inMs(behind(own, late))}* longer than the others.`);
  return words.join(" ");
}

function ticks(from, to, most) {
  const rough = (to - from) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let i = Math.ceil(from / size); i * size <= to; i += 1) found.push(i * size);
  return { at: found, digits: Math.max(0, -Math.floor(Math.log10(size))) };
}

// What of a backward comes after the wait and launches nothing any more.
function isFinish({ spans, buckets }, i) {
  const [name, from, to] = spans[i];
  if (name !== "backward" || spans[i - 1]?.[0] !== "exposed") return false;
  return !buckets.some(([, launched]) => launched > from && launched < to);
}

const axisTicks = () => ticks(view[0], view[1], Math.max(byId("axis").clientWidth / 90, 2));

function drawAxis() {
  const { at, digits } = axisTicks();
  byId("axis").replaceChildren(...at.map((ms, i) => {
    const mark = element("span", "", number(ms, digits) + (i ? "" : " ms"));
    mark.style.left = `${share(ms)}%`;
    return mark;
  }));
  // A label that would be cut off stands on the other side of its line.
  const width = byId("axis").clientWidth;
  for (const mark of byId("axis").children) {
    mark.classList.toggle("before", mark.offsetLeft + mark.offsetWidth > width);
  }
}

function drawLane(lane) {
  const shown = step && step.ranks[lane.place];
  if (!lane.isVisible || !shown) {
    lane.tracks.replaceChildren(...(lane.isVisible && step ? [element("div", "absent", "This rank has not recorded the step.")] : []));
    return;
  }
  const compute = element("div", "track compute");
  const communication = element("div", "track communication");
  makeStop(compute, `rank ${lane.rank}, computation`);
  const gathers = shown.gathers.length ? `, ${count(shown.gathers.length, "exchange")} of weights` : "";
  makeStop(communication, `rank ${lane.rank}, ${count(shown.buckets.length, "reduction")}${gathers}`);
  compute.append(...shown.spans.flatMap(([name, ...times], i) => drawSpan(lane, isFinish(shown, i) ? "finish" : name, times)));
  communication.append(...shown.gathers.flatMap((gather) => drawGather(lane, shown, gather)));
  communication.append(...shown.buckets.flatMap((times, index) => drawBucket(lane, shown, times, index)));
  const lines = axisTicks().at.map((ms) => {
    const line = element("div", "gridline");
    line.style.left = `${share(ms)}%`;
    return line;
  });
  lane.tracks.replaceChildren(...lines, compute, communication);
}

// A bar from one moment to another, with the longest label that fits; nothing outside of the view.
function bar(lane, className, [from, to], labels = [], padding = 10) {
  if (to < view[0] || from > view[1]) return [];
  const made = element("div", className);
  const start = Math.max(from, view[0]);
  const width = share(Math.min(to, view[1])) - share(start);
  made.style.left = `${share(start)}%`;
  made.style.width = `${width}%`;
  const room = (width / 100) * lane.tracks.clientWidth - padding;
  made.textContent = labels.find((label) => label.length * 7 < room) ?? "";
  return [made];
}

function drawSpan(lane, name, [from, to]) {
  const words = PHASES[name] ?? name;
  const lasted = inMs(to - from);
  const labels = [`${words} ${lasted}`, words, `${SHORT[name] ?? name} ${lasted}`, SHORT[name] ?? ""];
  return bar(lane, name in PHASES ? name : "other", [from, to], labels).map((made) =>
    describe(makeItem(made), `${words}, ${lasted}`, () => ({
      title: `${words}, rank ${lane.rank}`,
      facts: [["lasted", lasted], ["from", inMs(from)], ["to", inMs(to)], ...(name === "finish" ? [["counts as", "backward"]] : [])],
    })));
}

function drawBucket(lane, shown, times, index) {
  const [ready, launched, from, to] = times;
  const bucket = bucketsOf(step.plan)[index];
  const size = inBytes(bytesOf(bucket));
  const label = `bucket ${index}, ${size}, reduction ${inMs(to - from)}`;
  const reduction = bar(lane, "reduction", [from, to], [`${index} · ${size}`, `${index}`], 5).map(makeItem);
  reduction.forEach((made) => showMeeting(made, [from, to], joined[index].at));
  const mark = bar(lane, "ready", [ready, ready]);
  mark.forEach((made) => made.style.removeProperty("width"));
  const parts = [
    ...(launched > ready ? bar(lane, "held", [ready, launched]) : []),
    ...(from > launched ? bar(lane, "queued", [launched, from]) : []),
    ...mark,
    ...reduction,
  ];
  for (const part of parts) {
    part.dataset.bucket = index;
    describe(part, label, () => bucketInWords(lane, shown, times, index));
  }
  return [...parts, ...drawWaits(lane, shown, "exposed", [from, to])];
}

// Where the step waited while something ran.
function drawWaits(lane, shown, phase, [from, to]) {
  const waits = shown.spans.filter(([name, start, end]) => name === phase && end > from && start < to);
  return waits.flatMap(([, start, end]) => bar(lane, "waited", [Math.max(start, from), Math.min(end, to)]));
}

const waitedFor = (shown, phase, [from, to]) =>
  total(shown.spans.filter(([name]) => name === phase).map(([, start, end]) => Math.max(Math.min(end, to) - Math.max(start, from), 0)));

// The weights of a bucket, which the step has changed.
function drawGather(lane, shown, [index, from, to]) {
  const bucket = bucketsOf(step.plan)[index];
  const what = bucket ? `weights of bucket ${index}` : "weights of another plan";
  const made = bar(lane, "gather", [from, to], bucket ? [`${index} · ${inBytes(bytesOf(bucket))}`, `${index}`] : [], 5).map(makeItem);
  for (const part of made) {
    describe(part, `${what}, exchange ${inMs(to - from)}`, () => ({
      title: `${what}, rank ${lane.rank}`,
      facts: [
        ...(bucket ? [["size", inBytes(bytesOf(bucket))]] : []),
        ["exchange", `${inMs(to - from)}, from ${inMs(from)} to ${inMs(to)}`],
        ["the step waited", inMs(waitedFor(shown, "weights", [from, to]))],
      ],
      items: parametersOf(bucket),
    }));
  }
  return [...made, ...drawWaits(lane, shown, "weights", [from, to])];
}

// The part of a reduction in which it waits for the last rank is paler.
function showMeeting(made, [from, to], met) {
  if (met <= from) return;
  const [start, end] = [Math.max(from, view[0]), Math.min(to, view[1])];
  made.classList.add("meeting");
  made.style.backgroundSize = `${100 * Math.min(Math.max((met - start) / (end - start), 0), 1)}% 100%`;
}

function bucketInWords(lane, shown, [ready, launched, from, to], index) {
  const bucket = bucketsOf(step.plan)[index];
  return {
    title: `bucket ${index}, rank ${lane.rank}`,
    facts: [
      ["size", `${inBytes(bytesOf(bucket))}${bucket?.sparse ? ", sparse" : ""}${bucket?.sharded ? `, sharded: ${bucket.collective}` : ""}`],
      ["complete", `at ${inMs(ready)}`],
      ["launched", `at ${inMs(launched)}`],
      ["reduction", `${inMs(to - from)}, from ${inMs(from)} to ${inMs(to)}`],
      ...(joined[index].at > from ? [["of that", `${inMs(Math.min(joined[index].at, to) - from)} until rank ${joined[index].rank} joined`]] : []),
      ["the step waited", inMs(waitedFor(shown, "exposed", [from, to]))],
      ["parameter tensors", number(bucket?.parameters.length ?? 0)],
    ],
    items: parametersOf(bucket),
  };
}

// Drag across the lanes to zoom in, double-click to see all.
function makeZoomable() {
  const timeline = byId("timeline");
  const selection = byId("selection");
  let begin = null;
  const at = (event) => {
    const box = lanes[0].tracks.getBoundingClientRect();
    return Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
  };
  timeline.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.target.closest(".tracks")) begin = at(event);
  });
  addEventListener("pointermove", (event) => {
    if (begin === null) return;
    const [from, to] = [begin, at(event)].sort((a, b) => a - b);
    const { offsetLeft, offsetWidth } = lanes[0].tracks;
    selection.hidden = to - from < 0.004;
    selection.style.left = `${offsetLeft + from * offsetWidth}px`;
    selection.style.width = `${(to - from) * offsetWidth}px`;
    selection.style.height = `${timeline.scrollHeight - 24}px`;
  });
  addEventListener("pointerup", (event) => {
    if (begin === null) return;
    const [from, to] = [begin, at(event)].sort((a, b) => a - b);
    begin = null;
    selection.hidden = true;
    const [start, end] = view;
    if (to - from >= 0.004) zoom([start + from * (end - start), start + to * (end - start)]);
  });
  timeline.addEventListener("dblclick", () => zoom([0, step.length]));
}
