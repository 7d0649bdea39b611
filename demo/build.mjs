// One page that needs no server: onnxruntime-web and its WebAssembly stand inside it, packed.
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";

const from = "node_modules/onnxruntime-web/dist/";
const packed = (file) => gzipSync(readFileSync(from + file), { level: 9 }).toString("base64");
const parts = {
  RUNTIME: packed("ort.wasm.bundle.min.mjs"),
  WASM: packed("ort-wasm-simd-threaded.wasm"),
  TOKENIZER: readFileSync("tokenizer.js", "utf8"),
  PAGE: readFileSync("page.js", "utf8"),
};
const page = readFileSync("index.html", "utf8").replace(/\{\{(\w+)\}\}/g, (_, name) => parts[name]);
mkdirSync("dist", { recursive: true });
writeFileSync("dist/classify.html", page);
