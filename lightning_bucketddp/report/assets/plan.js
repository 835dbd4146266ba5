// The plan as a picture: boxes as wide as their buckets, in launch order.

let planShown = null;

function drawPlan(version) {
  if (version === planShown) return;
  planShown = version;
  const buckets = bucketsOf(version);
  const sizes = buckets.map(bytesOf);
  const all = total(sizes);
  const several = Object.keys(content.plans).length > 1;
  setText(byId("plan-text"), buckets.length
    ? `${several ? `*Plan ${version}*, which this step has used: ` : ""}*${count(buckets.length, "bucket")}*, *${inBytes(all)}*. ` +
      "They leave from left to right. A box is as wide as its bytes, a strip in it is a parameter."
    : "This step has used no plan: nothing was reduced.");
  // Many buckets need several rows; but none may be wider than one.
  const rows = Math.max(Math.min(Math.ceil(buckets.length / 16), 8, Math.floor(all / largest(sizes))), 1);
  const plan = byId("plan");
  makeStop(plan, `${count(buckets.length, "bucket")} in launch order`);
  plan.replaceChildren(...buckets.map((bucket, index) => drawBox(bucket, index, (100 * rows * sizes[index]) / (all || 1))));
}

function drawBox(bucket, index, width) {
  const box = element("div", `bucket${bucket.sparse ? " sparse" : ""}`);
  const strips = element("div", "strips");
  box.dataset.bucket = index;
  box.style.width = `${width}%`;
  const size = inBytes(bytesOf(bucket));
  const label = [`bucket ${index} · ${size}`, `${index} · ${size}`, `${index}`, ""];
  const room = (width / 100) * byId("plan").clientWidth - 4;
  box.append(element("div", "name", label.find((text) => text.length * 7 < room) ?? ""), strips);
  bucket.parameters.forEach((name, i) => {
    const strip = element("div", "strip");
    strip.style.flexGrow = bucket.sizes[i];
    strip.dataset.bucket = index;
    strips.append(describe(strip, name, () => ({
      title: name,
      facts: [["size", inBytes(bucket.sizes[i])], ["bucket", `${index}, ${size}, ${count(bucket.parameters.length, "parameter")}`]],
    })));
  });
  const items = parametersOf(bucket);
  return describe(makeItem(box), `bucket ${index}, ${size}, ${count(items.length, "parameter")}`, () => ({
    title: `bucket ${index}`,
    facts: [["size", size], ["parameters", number(items.length)]],
    items,
  }));
}
