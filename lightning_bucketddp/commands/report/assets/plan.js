// The plan as a picture: boxes as wide as their buckets, in launch order.

let planShown = null;

function drawPlan(version) {
  if (version === planShown) return;
  planShown = version;
  const buckets = bucketsOf(version);
  const sizes = buckets.map(bytesOf);
  const several = Object.keys(content.plans).length > 1;
  const { widths, isToScale } = layOut(sizes, byId("plan").clientWidth - 1);
  setText(byId("plan-text"), buckets.length
    ? `${several ? `*Plan ${version}*, which this step has used: ` : ""}*${count(buckets.length, "bucket")}*, *${inBytes(total(sizes))}*. ` +
      (buckets.length === 1
        ? "It leaves when all its gradients are there. A strip of the box is a parameter tensor."
        : `They leave from left to right. A box is as wide as its bytes${isToScale ? "" : "; small ones are drawn wider, to be seen"}. A strip in it is a parameter tensor.`)
    : "This step has used no plan: nothing was reduced.");
  const plan = byId("plan");
  makeStop(plan, `${count(buckets.length, "bucket")} in launch order`);
  plan.replaceChildren(...buckets.map((bucket, index) => drawBox(bucket, index, widths[index])));
}

const MOST_ROWS = 8;

// How wide boxes are, in pixels: as wide as they can be in one row, or in as many as they need. Each has room for its number.
function layOut(sizes, width) {
  const room = 8 + 7 * `${sizes.length - 1}`.length;
  const wanted = 1.5 * sizes.length; // so that most can be wider than that
  const least = Math.max(Math.min(room, (MOST_ROWS * width) / wanted), 3);
  const rows = Math.max(Math.min(Math.ceil((wanted * least) / width), MOST_ROWS), 1);
  const atScale = (scale) => sizes.map((bytes) => Math.max(bytes * scale, least));
  let [low, high] = [0, width / Math.max(largest(sizes), 1)];
  if (rowsOf(atScale(high), width) <= rows) low = high;
  for (let i = 0; i < 40 && low < high; i += 1) {
    const middle = (low + high) / 2;
    if (rowsOf(atScale(middle), width) <= rows) low = middle;
    else high = middle;
  }
  return { widths: atScale(low), isToScale: sizes.every((bytes) => bytes * low >= least) };
}

function rowsOf(widths, width) {
  let [rows, used] = [1, 0];
  for (const each of widths) {
    if (used + each > width) { rows += 1; used = 0; }
    used += each;
  }
  return rows;
}

function drawBox(bucket, index, width) {
  const box = element("div", `bucket${bucket.sparse ? " sparse" : ""}`);
  const strips = element("div", "strips");
  box.dataset.bucket = index;
  box.style.width = `${width.toFixed(2)}px`;
  const size = inBytes(bytesOf(bucket));
  const label = [`bucket ${index} · ${size}`, `${index} · ${size}`, `${index}`, ""];
  box.append(element("div", "name", label.find((text) => text.length * 7 < width - 4) ?? ""), strips);
  bucket.parameters.forEach((name, i) => {
    const strip = element("div", "strip");
    strip.style.flexGrow = bucket.sizes[i];
    strip.dataset.bucket = index;
    strips.append(describe(strip, name, () => ({
      title: name,
      facts: [["size", inBytes(bucket.sizes[i])], ["bucket", `${index}, ${size}, ${count(bucket.parameters.length, "parameter tensor")}`]],
    })));
  });
  const items = parametersOf(bucket);
  return describe(makeItem(box), `bucket ${index}, ${size}, ${count(items.length, "parameter tensor")}`, () => ({
    title: `bucket ${index}`,
    facts: [["size", size], ["parameter tensors", number(items.length)]],
    items,
  }));
}
