"""What the texts are worth that a run writes, beside as many real ones that it was not trained on.

The run's own sampler writes them from nothing, at several temperatures; a judge, any causal language model,
reads them and the real ones alike (`langevin.evaluation.judge`).

    judge gap        nats a judge token, samples less real; compared at the entropy of real text, because a
                     judge likes dull texts, and any sampler is duller when it is colder
    entropy          -Σ_v p_v ln p_v, p the shares of tokens among the first `width` of a text; the mean
                     over the texts that have so many; width: nine in ten real texts do
    distinct-n       different n-grams / n-grams, of so many tokens as half of the real texts hold
    repetition-n     n-grams that stood in the same text before / n-grams
    duplicates       texts that came before / texts
    memorised        20-grams that stand in the training text / 20-grams
    MAUVE            see `frontier_area`, with that of real against other real text as its ceiling

Tokens are the run's own, texts are resampled for intervals, and a number at the entropy of real text lies
on the line between the two temperatures around it. QUALITY holds against samplers that are made to cheat
(words at random, bigrams, real phrases over and over); DIVERSITY does not, and is not quality.

N texts.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from langevin.data.corpus import Corpus
from langevin.data.tokenizers import encoder
from langevin.environment import environment
from langevin.errors import UsageError, WorkError, one_line
from langevin.evaluation.judge import LOGITS_AT_ONCE, Judge, Judged, frontier_area
from langevin.evaluation.likelihood import bootstrap
from langevin.evaluation.rows import Row
from langevin.runs import files
from langevin.sampling.text import Request, Sampling, Text

Told = Callable[[str, int, int | None], None]  # what is done, how much of it, of how much
Tokens = NDArray[np.int64]
Array = NDArray[np.float64]

QUALITY = ("judge_gap", "mauve")
DIVERSITY = (
    *("unigram_entropy", "distinct_1", "distinct_2", "distinct_3", "distinct_4"),
    *("repetition_2", "repetition_4", "repetition_8", "duplicates", "memorised_20"),
)
COSTS = ("ms_per_text", "calls_per_text")
OF_SETS = ("judge_nll", *QUALITY, *DIVERSITY, *COSTS)  # what sets of texts have beside each other
REPEATED, MEMORISED, DISTINCT = (2, 4, 8), 20, (1, 2, 3, 4)
RATIOS = ("judge_nll", *(name for name in DIVERSITY if not name.startswith("distinct")))
PLAIN = ("mauve", *(f"distinct_{n}" for n in DISTINCT))
ENTROPY = RATIOS.index("unigram_entropy")
TEMPERATURES = (0.7, 0.8, 0.9, 1.0)
AT_ONCE = 256  # texts, or fewer where their logits would be too large
TIMED = 3  # texts, after one that is not
SHORT = 0.1  # of the real texts have fewer tokens than the width
INFILLED, GAPS = 256, (0.1, 0.3, 0.5)  # texts, and the share of each that is taken from its middle
CORRUPTED = 0.1
CHUNK = 1 << 22  # training tokens at a time
REAL = {"text": "real"}


@dataclass(frozen=True)
class Wanted:
    """How many texts, written how, and who judges them."""

    samples: int
    judge: str
    sampling: Sampling
    temperatures: tuple[float, ...] = TEMPERATURES

    def at(self, temperature: float) -> Sampling:
        return replace(self.sampling, temperature=temperature)

    def check(self) -> None:
        if self.samples < 2:
            raise UsageError(f"samples={self.samples} must be 2 or more")
        if not self.temperatures or sorted(set(self.temperatures)) != list(self.temperatures):
            raise UsageError(
                f"temperatures {list(self.temperatures)} must grow", "Write --temperatures 0.7,0.8,0.9,1.0."
            )
        if getattr(self.sampling, "infill", ()):
            raise UsageError("texts that are judged are written from nothing", "Leave --infill out.")
        for temperature in self.temperatures:
            self.at(temperature).check()


def usual(objective: Any, context: int) -> Sampling:
    """The sampler's own settings, with room for a text as long as the context."""
    own: type[Sampling] = objective.sampling()
    return own(tokens=max(1, context - 1)) if own().tokens else own()


@dataclass(frozen=True, eq=False)
class Texts:
    """A set of texts, where its rows stand, and what is known of them."""

    at: dict[str, Any]
    texts: list[str]
    tokens: list[Tokens]
    judged: Judged
    costs: dict[str, float]


def measure(
    run: Any,
    corpus: Corpus,
    split: str,
    wanted: Wanted,
    *,
    device: str,
    resamples: int = 1000,
    told: Told = lambda what, done, total: None,
) -> tuple[list[Row], dict[str, Any]]:
    """Rows of every set of texts, at {"temperature": t} or {"text": "real"}, and those at the entropy of
    real text, which stand nowhere in particular; and what else is to be said."""
    wanted.check()
    run.objective.sampler()  # which may refuse
    real, others = held_out(corpus, split, wanted, run.config.context)
    judge, encode = Judge.read(wanted.judge, device), encoder(run.tokenizer)
    run.model.to(device)

    def read(at: dict[str, Any], texts: list[str], costs: dict[str, float]) -> Texts:
        judged = judge.judged(texts, lambda done: told(f"judging {_name(at)}", done, len(texts)))
        return Texts(at, texts, [ids for ids, _ in encode(texts, False)], judged, costs)

    sets = [read(REAL, real, {})]
    for temperature in wanted.temperatures:
        texts, costs = written(run, wanted.at(temperature), wanted.samples, device, told)
        sets.append(read({"temperature": temperature}, texts, costs))
    ceiling = frontier_area(judge.judged(others).features_ND, sets[0].judged.features_ND)
    rows, details = compared(sets, corpus.tokens("train"), ceiling, resamples)
    whole = [ids[: details["width"]] for ids in sets[0].tokens if len(ids) >= details["width"]]
    filled, how = infilled(run, whole, wanted.sampling, device, told)
    repaired, by = recovery(run, whole, wanted.sampling, device)
    details |= {"judge": wanted.judge, "judge_sha256": judge.sha256, "samples": wanted.samples}
    details |= {"sampling": asdict(wanted.sampling), "infill": how, "recovery": by}
    return [*rows, *filled, *repaired], details


def compared(
    sets: list[Texts], train: NDArray[Any], ceiling: float, resamples: int = 1000
) -> tuple[list[Row], dict[str, Any]]:
    """The rows of sets of equally many texts, the real ones first, the others by temperature."""
    real, N = sets[0], len(sets[0].texts)
    width = max(1, int(np.percentile([len(ids) for ids in real.tokens], 100 * SHORT)))
    amount = max(1, sum(map(len, real.tokens)) // 2)
    memorised = in_training(train, [ids for one in sets for ids in one.tokens])
    columns = np.concatenate(
        [_sums(one, memorised[i * N : (i + 1) * N], width) for i, one in enumerate(sets)], 1
    )
    areas = [frontier_area(one.judged.features_ND, real.judged.features_ND) for one in sets[1:]]
    different = [[distinct(one.tokens, n, amount) for n in DISTINCT] for one in sets]
    plain = np.column_stack([[ceiling, *areas], different])

    def ratios(totals: Array) -> Array:
        """(..., sets, RATIOS)"""
        parts = totals.reshape(*totals.shape[:-1], len(sets), len(RATIOS), 2)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(parts[..., 0] / parts[..., 1])

    entropy = ratios(columns.sum(0))[:, ENTROPY]
    pair = _around(entropy)

    def every(totals: Array) -> Array:
        found = ratios(totals)
        gap = found[..., :1] - found[..., :1, :1]
        found = matched(np.concatenate([gap, found], -1), found[..., ENTROPY], pair)
        return found.reshape(*totals.shape[:-1], -1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a set in which no text is as long as the width
        estimates = bootstrap(columns, every, resamples=resamples, seed=0)
    places = [*(one.at for one in sets), *([] if pair is None else [{}])]
    names = product(places, ("judge_gap", *RATIOS))
    rows = [
        Row.of(name, found, _kind(name), N, at)
        for (at, name), found in zip(names, estimates, strict=True)
        if (name, at) != ("judge_gap", REAL)
    ]
    for at, values in zip(places, matched(plain, entropy, pair), strict=True):
        rows += [Row(name, float(x), _kind(name), at, n=N) for name, x in zip(PLAIN, values, strict=True)]
    rows += [Row(name, value, "cost", one.at) for one in sets for name, value in one.costs.items()]
    details: dict[str, Any] = {"width": width, "matched": None, "said": _apart(entropy, width)}
    if pair is not None:
        cold, warm = (one.at["temperature"] for one in sets[pair : pair + 2])
        details["matched"] = cold + float(_share(entropy, pair)) * (warm - cold)
        details["said"] = (
            f"At the entropy of real text, {entropy[0]:.3f} nats, a temperature of "
            f"{details['matched']:.3f}: on the line from {cold:g} to {warm:g}."
        )
    return [row for row in rows if math.isfinite(row.value)], details


def matched(values: Array, entropy: Array, pair: int | None) -> Array:
    """Values (..., sets, K) with those at the entropy of real text, on the line between the pair."""
    if pair is None:
        return values
    low, high = values[..., pair, :], values[..., pair + 1, :]
    found = low + _share(entropy, pair)[..., None] * (high - low)
    return np.concatenate([values, found[..., None, :]], -2)


def _around(entropy: Array) -> int | None:
    """The first of two neighbours between whose entropies that of real text lies, which comes first."""
    side = np.sign(entropy[1:] - entropy[0])
    found = np.flatnonzero((side[:-1] * side[1:] <= 0) & (entropy[1:-1] != entropy[2:]))
    return int(found[0]) + 1 if len(found) else None


def _share(entropy: Array, pair: int) -> Array:
    """How far from one of the pair to the other the entropy of real text is; of resamples in which it is
    outside, no further than once their distance."""
    low, high = entropy[..., pair], entropy[..., pair + 1]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.clip((entropy[..., 0] - low) / (high - low), -1, 2)


def _apart(entropy: Array, width: int) -> str:
    """Why there is nothing at the entropy of real text."""
    if np.isnan(entropy[1:]).all():
        return f"No text that was written has {width} tokens, of which entropies are: none is comparable."
    found = ", ".join("none" if math.isnan(x) else f"{x:.3f}" for x in entropy[1:])
    above = bool(np.nanmin(entropy[1:]) > entropy[0])
    return (
        f"No two neighbouring temperatures lie around the entropy of real text, {entropy[0]:.3f} nats ("
        f"they have {found}): none is comparable. Try {'lower' if above else 'higher'} --temperatures."
    )


def _kind(name: str) -> Any:
    return "diagnostic" if name in ("judge_nll", *DIVERSITY) else "exact"


def _name(at: dict[str, Any]) -> str:
    return "real texts" if at == REAL else f"texts at temperature {at['temperature']:g}"


def _sums(one: Texts, memorised: Array, width: int) -> Array:
    """(N, 2 · RATIOS): what each text adds above and below the line of each ratio."""
    before: set[str] = set()
    rows = []
    for i, (text, ids) in enumerate(zip(one.texts, one.tokens, strict=True)):
        whole = len(ids) >= width
        row = [one.judged.nll[i], one.judged.tokens[i], entropy_of(ids[:width]) if whole else 0.0, whole]
        for n in REPEATED:
            grams = ngrams(ids, n)
            row += [len(grams) - len(np.unique(grams)), len(grams)]
        rows.append([*row, text in before, 1, memorised[i], max(0, len(ids) - MEMORISED + 1)])
        before.add(text)
    return np.array(rows, np.float64)


def entropy_of(ids: Tokens) -> float:
    """Of the shares of tokens, in nats."""
    p = np.unique(ids, return_counts=True)[1] / max(1, len(ids))
    return float(-(p * np.log(p)).sum())


def distinct(tokens: list[Tokens], n: int, amount: int) -> float:
    """Different n-grams among the n-grams of the first so many tokens."""
    grams = np.concatenate([ngrams(ids, n) for ids in tokens])[:amount]
    return len(np.unique(grams)) / max(1, len(grams))


def ngrams(ids: NDArray[Any], n: int) -> NDArray[np.uint64]:
    """Σ_j t_j m_j modulo 2⁶⁴ of every n neighbours, m fixed odd numbers: equal for equal n-grams, and for
    others next to never."""
    count = max(0, len(ids) - n + 1)
    factors = np.random.default_rng(n).integers(0, 2**63, n, np.uint64) * np.uint64(2) + np.uint64(1)
    ids, total = ids.astype(np.uint64) + np.uint64(1), np.zeros(count, np.uint64)
    for j, factor in enumerate(factors):
        total += ids[j : j + count] * factor
    return total


def in_training(train: NDArray[Any], texts: list[Tokens]) -> Array:
    """How many 20-grams of each text stand in the training text, which is read in parts."""
    own = [ngrams(ids, MEMORISED) for ids in texts]
    asked = np.unique(np.concatenate(own))
    known = np.zeros(len(asked), bool)
    for at in range(0, len(train) if len(asked) else 0, CHUNK):
        grams = ngrams(train[at : at + CHUNK + MEMORISED - 1], MEMORISED)
        place = np.minimum(np.searchsorted(asked, grams), len(asked) - 1)
        known[place[asked[place] == grams]] = True
    return np.array([known[np.searchsorted(asked, grams)].sum() for grams in own], np.float64)


def held_out(corpus: Corpus, split: str, wanted: Wanted, context: int) -> tuple[list[str], list[str]]:
    """As many real texts of a split as will be written, and others of another split for the ceiling of
    MAUVE; refused where there are too few, which is known before anything is trained."""
    other = "valid" if split == "test" else "test"
    longest = wanted.sampling.tokens or context - 1
    real = real_texts(corpus, split, wanted.samples, longest)
    return real, real_texts(corpus, other, wanted.samples, longest, fewer=True)


def real_texts(corpus: Corpus, split: str, count: int, longest: int, fewer: bool = False) -> list[str]:
    """The first documents of a split, or the first pieces of a text without, of so many tokens at most;
    fewer: as many as there are, where these are too few."""
    stream, starts = corpus.tokens(split), corpus.documents(split)
    bounds = [*starts[: count + 1].tolist(), len(stream)]
    if not corpus.has_documents:
        bounds = list(range(0, len(stream) + 1, longest))
    pieces = list(pairwise(bounds))[:count]
    if len(pieces) < (2 if fewer else count):
        raise UsageError(
            f"{split} holds {len(pieces)} texts to compare with, and --samples asks for {count}",
            f"Ask for {len(pieces)} or fewer." if len(pieces) > 1 else "Use data with more held-out text.",
        )
    texts = [stream[a:b] for a, b in pieces]
    if corpus.has_documents:
        texts = [ids[ids != corpus.separator] for ids in texts]
    return [corpus.tokenizer.decode(ids[:longest], skip_special_tokens=True) for ids in texts]


def written(
    run: Any, sampling: Sampling, count: int, device: str, told: Told
) -> tuple[list[str], dict[str, float]]:
    """Texts of the seeds 0 .. count - 1 from nothing, and what one costs alone. They are kept in the run
    folder, and not written again with the same weights, settings, code and device."""
    about = {"model": run.model_sha256, "objective": run.config.objective, "sampling": asdict(sampling)}
    about |= {"batch": at_once(run, device), **environment(device)}
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    place = run.path / "evaluated" / f"samples-{key}.json"
    shape = {"costs": {str: float}, "texts": [str]}
    known = files.read_json(place, shape, "Delete it.", optional=True)
    if known is None or len(known["texts"]) < count:
        what, done = f"writing {_name({'temperature': sampling.temperature})}", iter(range(1, count + 1))
        told(what, 0, count)
        requests = [Request("", seed) for seed in range(count)]
        texts = write(run, sampling, requests, device, lambda i, text: told(what, next(done), count))
        known = {**about, "costs": _timed(run, sampling, device), "texts": [text.text for text in texts]}
        try:
            place.parent.mkdir(exist_ok=True)
            files.write_json(place, known)
        except (OSError, WorkError) as error:
            warnings.warn(f"the texts are not kept: {one_line(error)}", stacklevel=2)
    return known["texts"][:count], known["costs"]


def at_once(run: Any, device: str) -> int:
    """Rows whose logits fit."""
    kind = device.partition(":")[0]
    return max(1, min(AT_ONCE, LOGITS_AT_ONCE[kind] // (run.config.context * run.model.config.vocab_size)))


def write(
    run: Any,
    sampling: Sampling,
    requests: list[Request],
    device: str,
    finished: Callable[[int, Text], None] = lambda index, text: None,
) -> list[Text]:
    """By the run's sampler; on a GPU in the precision that it was trained with."""
    half = device != "cpu" and run.config.precision == "bf16"
    known = {"data": run.environment["data"], "context": run.config.context}
    with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=half):
        texts: list[Text] = run.objective.sampler()(
            run.model,
            run.tokenizer,
            requests,
            sampling,
            batch=at_once(run, device),
            finished=finished,
            **known,
        )
    return texts


def _timed(run: Any, sampling: Sampling, device: str) -> dict[str, float]:
    """Milliseconds of a text that is written alone, the median, and calls of the network, the mean."""
    times, calls = [], []
    for seed in range(1 + TIMED):
        begin = time.perf_counter()
        (text,) = write(run, sampling, [Request("", seed)], device)
        times.append(1000 * (time.perf_counter() - begin))
        calls.append(text.calls)
    return {"ms_per_text": statistics.median(times[1:]), "calls_per_text": statistics.mean(calls[1:])}


def infilled(
    run: Any, real: list[Tokens], sampling: Sampling, device: str, told: Told
) -> tuple[list[Row], str]:
    """How many tokens of real texts of one length come back when their middle is taken away, always with
    the likeliest token; and how that was asked. A sampler that fills no gaps sees what is before them."""
    said = "only the text before the gap was given"
    if hasattr(sampling, "infill"):
        try:
            return _restored(run, real, sampling, device, told, True), "both sides were given"
        except UsageError as error:
            said += f": {error.cause}"
    return _restored(run, real, sampling, device, told, False), said


def _restored(
    run: Any, real: list[Tokens], sampling: Sampling, device: str, told: Told, fills: bool
) -> list[Row]:
    rows: list[Row] = []
    every: list[Array] = []
    for at, gap in enumerate(GAPS):
        told("filling gaps", at, len(GAPS))
        asked = list(islice(_cut(run.tokenizer, real, gap), INFILLED))
        if not asked:
            continue
        texts = [f"{before}___{after}" if fills else before for before, _, after in asked]
        own: dict[str, Any] = {"infill": tuple(texts)} if fills else {}
        own |= {"temperature": 0.0, "tokens": len(asked[0][1])}
        found = write(run, replace(sampling, **own), [Request(text) for text in texts], device)
        right = [
            [sum(a == b for a, b in zip(text.ids, true, strict=False)), len(true)]
            for text, (_, true, _) in zip(found, asked, strict=True)
        ]
        every.append(np.array(right, np.float64))
        rows.append(_ratio("infill_accuracy", every[-1], {"gap": gap}))
    return [*rows, _ratio("infill_accuracy", np.concatenate(every), {})] if rows else []


def _cut(tokenizer: Any, real: list[Tokens], gap: float) -> Iterator[tuple[str, list[int], str]]:
    """What is before the gap of each text, its tokens, and what is after it. Texts that do not come apart
    into the same tokens there are left out."""
    encode = encoder(tokenizer)
    for ids in real:
        tokens = max(1, round(gap * len(ids)))
        first = (len(ids) - tokens) // 2
        sides = [ids[:first], ids[first + tokens :]]
        before, after = map(tokenizer.decode, sides)
        again = [found.tolist() for found, _ in encode([before, after], False)]
        plain = before.strip() and after.strip() and before == before.rstrip() and "_" not in before + after
        if plain and again == [side.tolist() for side in sides]:
            yield before, ids[first : first + tokens].tolist(), after


def _ratio(name: str, counts: Array, at: dict[str, Any]) -> Row:
    """Of texts with so many right, of so many."""
    (found,) = bootstrap(counts, lambda sums: sums[..., :1] / sums[..., 1:], resamples=1000, seed=0)
    return Row.of(name, found, _kind(name), len(counts), at)


def recovery(run: Any, real: list[Tokens], sampling: Sampling, device: str) -> tuple[list[Row], str]:
    """Of real texts of one length in which a tenth of the tokens was replaced by random ones: the share of
    these that the sampler puts right again, always with the likeliest token, and the share of the others
    that it spoils. One that never opens what is committed does neither."""
    draw, true = np.random.default_rng(0), np.stack(real[:INFILLED])
    others = draw.choice(np.concatenate(real), true.shape)
    wrong = (draw.random(true.shape) < CORRUPTED) & (others != true)
    canvas = torch.from_numpy(np.where(wrong, others, true)).to(device)
    own = replace(sampling, temperature=0.0)
    parts = [run.objective.repaired(run.model, part, own) for part in canvas.split(64)]
    names = ("corruption_recovery", "corruption_spoiled")
    if parts[0] is None and getattr(sampling, "remask", "none") != "none":
        return [], "not measured: a model of blocks does not see what comes after a token"
    if parts[0] is None:
        return [Row(name, 0.0, "exact") for name in names], "what is committed stays: nothing is repaired"
    right = torch.cat(parts).cpu().numpy() == true
    rows = []
    for name, of, found in zip(names, (wrong, ~wrong), (right, ~right), strict=True):
        counts = np.stack([(found & of).sum(1), of.sum(1)], 1).astype(np.float64)
        rows.append(_ratio(name, counts, {}))
    said, again = "what the rest of a text speaks against is written anew", "all of it is drawn again"
    if getattr(own, "sweeps", 0):
        said = again if getattr(own, "remask", "none") == "none" else f"{said}, and {again}"
    return rows, said
