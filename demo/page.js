// Reads the files of an export, and classifies what is typed.

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function runtime() {
  const address = URL.createObjectURL(new Blob([await unpacked("runtime")], { type: "text/javascript" }));
  const ort = await import(address);
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmBinary = await unpacked("wasm");
  return ort;
}

async function opened(files) {
  const named = (test) => [...files].find((file) => test(file.name));
  const file = named((name) => name.endsWith(".onnx"));
  const [labels, tokenizer] = ["labels.json", "tokenizer.json"].map((name) => named((other) => other === name));
  if (!file || !labels || !tokenizer) throw new Error("choose three files: .onnx, tokenizer.json, labels.json");
  const { labels: names, context, before, behind } = JSON.parse(await labels.text());
  const encode = tokenizerOf(JSON.parse(await tokenizer.text()));
  const ort = await (runtime.once ??= runtime());
  const session = await ort.InferenceSession.create(new Uint8Array(await file.arrayBuffer()));
  return async (text) => {
    const own = encode(text.trim()).slice(0, context - before.length - behind.length);
    const ids = [...before, ...own, ...behind];
    const row = (type, values) => new ort.Tensor(type, values, [1, ids.length]);
    const found = await session.run({
      input_ids: row("int64", BigInt64Array.from(ids, BigInt)),
      attention_mask: row("bool", new Uint8Array(ids.length).fill(1)),
    });
    const shares = Array.from(found.probabilities.data);
    return { tokens: ids, probabilities: Object.fromEntries(names.map((name, i) => [name, shares[i]])) };
  };
}

const at = (id) => document.getElementById(id);
let classify = null;

async function show() {
  try {
    await answer();
  } catch (error) {
    at("answer").replaceChildren();
    at("state").textContent = error.message;
  }
}

async function answer() {
  const text = at("text").value;
  if (!classify || !text.trim()) return at("answer").replaceChildren();
  const begin = performance.now();
  const { tokens, probabilities } = await classify(text);
  const ms = performance.now() - begin;
  const sorted = Object.entries(probabilities).sort((a, b) => b[1] - a[1]);
  const rows = sorted.slice(0, 10).map(([name, share]) => {
    const row = at("row").content.cloneNode(true);
    row.querySelector(".name").textContent = name;
    row.querySelector("meter").value = share;
    row.querySelector(".share").textContent = `${(100 * share).toFixed(1)} %`;
    return row;
  });
  at("answer").replaceChildren(...rows);
  at("state").textContent = `${tokens.length} tokens, ${ms.toFixed(1)} ms`;
}

at("files").addEventListener("change", async (event) => {
  try {
    classify = null;
    at("state").textContent = "opening…";
    classify = await opened(event.target.files);
    at("state").textContent = "ready";
    await show();
  } catch (error) {
    at("state").textContent = error.message;
  }
});
at("text").addEventListener("input", show);
window.demo = { classify: (text) => classify(text), tokenizerOf };
