// The tokenizers that langevin makes, from their tokenizer.json: a function from a text to token ids.

const WORD = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}²³¹¼-¾"; // what \w means where the tokenizer was made
const PIECES = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;

function tokenizerOf(json) {
  const { model, normalizer, pre_tokenizer: pre } = json;
  const known = pre && (normalizer === null || normalizer.type === "Lowercase");
  if (known && model.type === "WordLevel" && pre.type === "Split" && pre.pattern.Regex)
    return words(model, pre, normalizer);
  if (known && model.type === "BPE" && pre.type === "ByteLevel" && !pre.add_prefix_space) return bpe(model, pre);
  throw new Error("this tokenizer was not made by langevin: bytes, chars, words, spaces and bpe-N are read");
}

function words({ vocab, unk_token }, { pattern }, normalizer) {
  const regex = new RegExp(pattern.Regex.replaceAll("[^\\w", `[^${WORD}`).replaceAll("\\w", `[${WORD}]`), "gu");
  const lower = (text) => [...text].map((c) => c.toLowerCase()).join("");
  return (text) => {
    const found = (normalizer ? lower(text) : text).match(regex) ?? [];
    return found.map((word) => {
      const id = vocab[word] ?? vocab[unk_token];
      if (id === undefined) throw new Error(`the tokenizer does not know ${word}`);
      return id;
    });
  };
}

function bpe({ vocab, merges }, { use_regex }) {
  const rank = new Map(merges.map((pair, i) => [Array.isArray(pair) ? pair.join(" ") : pair, i]));
  const signs = byteSigns();
  const merged = (piece) => {
    const parts = Array.from(new TextEncoder().encode(piece), (byte) => signs[byte]);
    for (;;) {
      let [best, at] = [Infinity, -1];
      for (let i = 0; i + 1 < parts.length; i++) {
        const found = rank.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity;
        if (found < best) [best, at] = [found, i];
      }
      if (at < 0) return parts;
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  };
  return (text) => (use_regex ? (text.match(PIECES) ?? []) : [text]).flatMap(merged).map((part) => vocab[part]);
}

// Bytes that can be seen stand for themselves, the others for signs from 256 on, in order.
function byteSigns() {
  const seen = (b) => (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(seen(byte) ? byte : next++));
}
