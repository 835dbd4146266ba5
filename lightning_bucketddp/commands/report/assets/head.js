// What run this is, and its usual step.

const PHASES = {
  data: "waiting for data",
  weights: "waiting for weights",
  forward: "forward",
  backward: "backward",
  exposed: "waiting for communication",
  finish: "after the wait: buffers, checks",
  optimizer: "optimizer",
};

// Those in which a step waits for other ranks.
const WAITS = ["exposed", "weights"];

// Where there is no room for more.
const SHORT = { data: "data", weights: "wait", forward: "fwd", backward: "bwd", exposed: "wait", finish: "end", optimizer: "opt" };

function drawHead() {
  const { run, typical, history, ranks } = content;
  const hosts = new Set(ranks.map(({ host }) => host)).size;
  const first = history.steps[0];
  const last = history.steps[history.steps.length - 1];
  const options = Object.entries(run.options).filter(([, value]) => value !== null);
  setText(byId("about"), [
    `*${count(run.worldSize, "rank")}* on ${count(hosts, "host")}`,
    `*${run.device}*`,
    `${run.backend}`,
    `*${inBytes(run.gradientBytes)}* of gradients, ${count(run.numParameters, "element")}`,
    `*${count(history.steps.length, "step")}* recorded, ${number(first)} to ${number(last)}`,
  ].join(" · "));
  setText(byId("options"), options.map(([name, value]) => `${name}=${typeof value === "object" ? JSON.stringify(value) : value}`).join(" · "));
  document.title = `bucketddp: ${count(run.worldSize, "rank")}, ${inMs(typical.step)} per step`;
  byId("problems").hidden = !content.problems.length;
  byId("problems").append(...content.problems.map((problem) => element("li", "", problem)));
  setText(byId("footer"), `Made by bucketddp ${content.version} from ${content.folder}`);
  drawNumbers();
  drawSplit();
}

function drawNumbers() {
  const { typical, ranks, run, history } = content;
  const late = typical.straggler;
  const waiting = total(WAITS.map((name) => typical.phases[name] ?? 0));
  const numbers = [
    ["Step", inMs(typical.step), ""],
    ["Waiting for communication", inMs(waiting), percent(waiting / typical.step)],
    ["Communication", inMs(typical.communication), typical.communication ? `${percent(typical.overlap)} hidden` : ""],
    ["Slowest rank", late < 0 ? "none" : `rank ${ranks[late].rank}`, late < 0 ? "all alike" : `+${inMs(typical.stragglerBy)}`],
  ];
  if (typical.exchange) numbers.splice(3, 0, ["Exchange of weights", inMs(typical.exchange), `${inMs(typical.phases.weights ?? 0)} waited for`]);
  const replayed = history.replayed.filter(Boolean).length;
  if (replayed) numbers.push(["Replayed as CUDA graphs", count(replayed, "step"), `of ${number(history.steps.length)}`]);
  if (run.memoryBytes) numbers.push(["Memory, at most", inBytes(run.memoryBytes), ""]);
  for (const [term, value, note] of numbers) {
    const pair = element("div");
    const fact = element("dd", "", `${value} `);
    fact.append(element("small", "", note));
    pair.append(element("dt", "", term), fact);
    byId("numbers").append(pair);
  }
}

function drawSplit() {
  const phases = Object.entries(content.typical.phases).filter(([, ms]) => ms > 0);
  const all = total(phases.map(([, ms]) => ms));
  for (const [name, ms] of phases) {
    const share = ms / all;
    const bar = element("div", name, share > 0.08 ? percent(share) : "");
    bar.style.flex = `${ms} 1 0`;
    bar.title = `${PHASES[name]}: ${inMs(ms)}`;
    byId("split").append(bar);
  }
  byId("split").setAttribute("aria-label", phases.map(([name, ms]) => `${PHASES[name]} ${inMs(ms)}`).join(", "));
  addLegend(byId("split-legend"), phases.map(([name, ms]) => [name, `${PHASES[name]} *${inMs(ms)}*`]));
}
