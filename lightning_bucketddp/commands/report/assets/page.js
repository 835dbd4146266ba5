// The page: what is chosen, and what is drawn anew for it.

const slider = byId("step");
const late = content.typical.straggler;

function drawPlots() {
  const chosen = content.steps[Number(slider.value)].number;
  drawHistory(byId("own-plot"), "own", late, chosen);
  drawHistory(byId("step-plot"), "step", late, chosen);
  if (content.sizes) drawSizes(byId("sizes-plot"));
}

function choose(place) {
  slider.value = place;
  const chosen = content.steps[place];
  const all = content.history.steps.length;
  const few = content.steps.length < all ? `, of ${number(all)} recorded` : "";
  byId("step-number").replaceChildren(
    `${number(chosen.number)} `,
    element("small", "", `(${number(place + 1)} of ${number(content.steps.length)}${few})`),
  );
  slider.setAttribute("aria-valuetext", `step ${chosen.number}`);
  showStep(chosen);
  drawPlan(chosen.plan);
  drawPlots();
}

function chooseNearest(number) {
  const away = content.steps.map((shown) => Math.abs(shown.number - number));
  choose(away.indexOf(smallest(away)));
}

drawHead();
makeLanes();
makeZoomable();
drawRankTable(late);
const isCut = [content.history.own, content.history.step].some((ms) => largest(ms.flat()) > HIGHEST * median(ms.flat()));
setText(byId("history-text"), `${historyInWords(late)} Click a plot to look at that step above.${isCut ? " What took much longer ends at the upper edge." : ""}`);
const MOST_NAMED = 16; // beyond, the table has the colours
const named = content.ranks.map(({ rank }, place) => [place === late ? "line late" : "line calm", `rank ${rank}`, colourOf(place)]);
addLegend(byId("history-legend"), named.length <= MOST_NAMED ? named : [
  ...(late < 0 ? [] : [named[late]]),
  ["", `${late < 0 ? "each rank has a colour of its own" : "the other ranks have colours of their own"}: see the table, or point at a line`],
]);
byId("advice").hidden = !content.suggestions.length;
byId("suggestions").append(...content.suggestions.map((text) => {
  const item = element("li");
  item.append(...text.split("`").map((part, i) => (i % 2 ? element("code", "", part) : part)));
  return item;
}));
byId("sizes").hidden = !Object.values(content.plans).some((buckets) => buckets.length);
byId("sizes").querySelector("figure").hidden = !content.sizes;
setText(byId("sizes-text"), content.sizes ? sizesInWords(late) : content.noSizes);
if (content.sizes) {
  addLegend(byId("sizes-legend"), [
    ["line sizes", "one size for all buckets"],
    ["line optimum", "computed optimum"],
    ...(content.sizes.current ? [["current", "the plan in use, at the size of its largest bucket"]] : []),
  ]);
}
slider.max = content.steps.length - 1;
slider.disabled = content.steps.length === 1;
slider.oninput = () => choose(Number(slider.value));
byId("zoom-all").onclick = () => zoom([0, step.length]);
byId("zoom-wait").onclick = zoomToTheWait;
byId("slowest-rank").onclick = showSlowestRank;
byId("slowest-step").onclick = () => {
  const lengths = content.steps.map(({ length }) => length);
  choose(lengths.indexOf(largest(lengths)));
};
new ResizeObserver(() => { drawAxis(); drawPlots(); planShown = null; drawPlan(step.plan); }).observe(document.querySelector("main"));
choose(content.steps.length - 1);
