"""Needle retrieval: is a value found again by its key, however long the text and wherever it stands?"""

from dataclasses import dataclass
from typing import Any, Literal

from langevin.errors import UsageError
from langevin.evaluation.rows import Metric, Row
from langevin.settings import TrainConfig, read_numbers
from langevin.tasks.lengths import contexts, read_lengths
from langevin.tasks.task import Task, objective_of, register

NOISE = "noise"
TIMES = (1, 2, 4, 8)
MOST = 1_000_000  # needles, keys, values, words or rows
IN_WORDS = (128, 256, 512, 1024, 2048)  # lengths a saved model is tried at, as far as it was made for


@register("needle")
@dataclass(frozen=True)
class Needle(Task):
    form: Literal["needle", "mqar"] = "needle"
    """needle: one key is asked for, at the end. mqar: all needles first, then every key is asked for once
    (multi-query associative recall)."""
    needles: int = 4
    """Keys with a value in a row: one that is asked for, and distractors."""
    keys: int = 16
    values: int = 16
    words: int = 16
    """Of the haystack, where --data is noise."""
    lengths: str = ""
    """Tokens that are read, such as 128,1024,4096; default: 1, 2, 4 and 8 contexts, with learned positions
    1."""
    depths: str = "0,0.25,0.5,0.75,1"
    """Where the needle stands: 0 first, 1 last."""
    rows: int = 500
    """Rows at every length and depth."""
    at: int | None = None
    """The length that verdicts are about; default: the longest."""

    metrics = (
        Metric("accuracy", "retrieval accuracy", "fraction", "higher"),
        Metric("answers_of_other_keys", "answers of other keys", "fraction", "neither"),
    )
    primary = "accuracy"
    reported = ("accuracy", "answers_of_other_keys")
    used_by = ""
    shows_training = True
    budget = 1_500_000
    usual = {  # noqa: RUF012
        **{"data": NOISE, "mixer": "neighbor(iters=1); ssmax", "positions": "none", "optimizer": "muon"},
        **{"layers": 2, "width": 64, "heads": 2, "context": 64},
    }

    def __post_init__(self) -> None:
        for name in ("needles", "keys", "values", "words", "rows"):
            if not 1 <= getattr(self, name) <= MOST:
                raise UsageError(f"needle({name}={getattr(self, name)}) must be from 1 to {MOST:,}")
        if self.needles > min(self.keys, self.values):
            few = f"{self.keys} keys and {self.values} values"
            raise UsageError(
                f"{self.needles} needles are more than {few} allow",
                "Use fewer --needles, or more --keys and --values.",
            )
        for depth in self.tried_depths:
            if not 0 <= depth <= 1:
                raise UsageError(
                    f"a depth of {depth:g} is outside 0 to 1, the first place and the last",
                    "Give --depths such as 0,0.5,1.",
                )

    @property
    def tried_depths(self) -> list[float]:
        return sorted(set(read_numbers(self.depths, "depths", float, "0,0.5,1"))) or [0.5]

    def tried(self, config: TrainConfig) -> list[int]:
        lengths = contexts(self.lengths, config, TIMES, self.at)
        least = max(8, 4 * self.needles if self.form == "mqar" else 2 * self.needles + 2)
        for length in (config.context, *lengths):
            if length < least:
                raise UsageError(
                    f"a length of {length} has no room for {self.needles} needles",
                    f"Use a --context and --lengths of {least} or more, or fewer --needles.",
                )
        return lengths

    def prepare(self, config: TrainConfig, progress: bool = False) -> Any:
        if objective_of(config).likelihood != "exact":
            raise UsageError(
                f"the objective {config.objective} does not predict what comes last",
                "Use the objective ar.",
            )
        if config.init is not None:
            raise UsageError(
                "keys and values are tokens of their own, which a pretrained model does not know",
                "Leave --init out; to try a model as it is: langevin evaluate MODEL --task needle.",
            )
        if config.train_tokens is not None:
            raise UsageError(f"haystacks of {config.data} have no use for --train-tokens", "Leave it out.")
        if config.data == NOISE and config.tokenizer is not None:
            raise UsageError("haystacks of noise have no use for --tokenizer", "Leave it out.")
        self.tried(config)
        from langevin import data
        from langevin.data.synthetic.needle import Haystack

        if config.data == NOISE:
            return Haystack(self.words, self.keys, self.values)
        corpus = data.prepare(config.data, tokenizer=config.tokenizer, progress=progress)
        return Haystack(corpus.vocab_size, self.keys, self.values, corpus)

    def model_settings(self, config: TrainConfig, data: Any) -> dict[str, Any]:
        return {"vocab_size": data.vocab_size}

    def batch(self, data: Any, config: TrainConfig, step: int) -> dict[str, Any]:
        from langevin.data.synthetic import needle

        draw, shape = needle.Draw(1, config.seed, step), (config.batch, config.context, self.needles)
        if self.form == "mqar":
            places, which = needle.queried(draw, *shape)
            which = which % needle.easy_and_hard(draw, config.batch, self.needles)
        else:
            places, which = needle.recurring(draw, *shape)
        return dict(data.rows(draw, "train", (places, which), self.needles))

    def held_out(self, data: Any, config: TrainConfig) -> list[dict[str, Any]]:
        from langevin.data.synthetic.needle import Draw

        rows = max(1, config.eval_tokens // config.context)
        sizes = [min(config.batch, rows - i) for i in range(0, rows, config.batch)]
        return [self.trial(data, Draw(2, i), "valid", size, config.context) for i, size in enumerate(sizes)]

    def trial(
        self, data: Any, draw: Any, split: str, rows: int, length: int, depth: float | None = None
    ) -> dict[str, Any]:
        """Rows to be tried on: with the needle at a depth, or anywhere."""
        import numpy as np

        from langevin.data.synthetic import needle

        if self.form == "mqar":
            layout = needle.queried(draw, rows, length, self.needles)
        else:
            last = length - 3
            place = np.full(rows, min(last, int((depth or 0) * length)))
            place = draw.below(last + 1, rows) if depth is None else place
            layout = needle.hidden(draw, place, length, self.needles)
        return dict(data.rows(draw, split, layout, self.needles))

    def measure(
        self,
        run: Any,
        model: Any,
        split: str,
        *,
        device: str = "cpu",
        batch: int = 16,
        limit: int | None = None,
        data: Any = None,
    ) -> tuple[list[Row], dict[str, Any]]:
        """Every cell has `rows` rows, the same for every model."""
        import numpy as np
        import torch

        from langevin.data.synthetic.needle import Draw
        from langevin.evaluation.likelihood import wilson
        from langevin.evaluation.retrieval import by_length_and_depth, likeliest

        data, lengths = data or self.prepare(run.config), self.tried(run.config)
        at, model = self.at or lengths[-1], model.to(device).eval()

        def tried(length: int, depth: float) -> tuple[np.ndarray, np.ndarray]:
            """(rows, answers of a row): right, and another key's."""
            draw = Draw(3 + (split == "test"), length, round(1e6 * depth))
            rows = self.trial(data, draw, split, self.rows, length, depth)
            tokens, scored = (torch.from_numpy(rows[name]) for name in ("tokens", "scored"))
            at_once = max(1, batch * run.config.context // length)
            said = likeliest(model, tokens, scored, at_once, device).reshape(self.rows, -1)
            right = said == tokens[scored].reshape(said.shape)
            there = (tokens[:, None, :] == said[:, :, None]).any(-1) & (
                said >= data.vocab_size - self.values
            )
            return right.numpy(), (there & ~right).numpy()

        details: dict[str, Any] = {
            "context": run.config.context,
            "at": at,
            "rows of a cell": self.rows,
            "guessing": {"any value": 1 / self.values, "a value of the row": 1 / self.needles},
        }
        if self.form == "needle":

            def cell(length: int, depth: float) -> tuple[np.ndarray, np.ndarray, int]:
                right, other = tried(length, depth)
                return right[:, 0], other[:, 0], int(depth * length)

            rows, examples = by_length_and_depth(cell, lengths, self.tried_depths, at)
            return rows, {**details, "examples": examples}
        from langevin.evaluation.cost import state_bytes

        # Answers of a row are not independent: intervals count rows.
        found = {n: tried(n, 0.0)[0].mean(1) for n in lengths}
        share = {n: wilson(float(x.sum()), self.rows) for n, x in found.items()}
        rows = [Row.of("accuracy", share[at], "exact", self.rows)]
        rows += [Row.of("accuracy", share[n], "exact", self.rows, {"length": n}) for n in lengths]
        rows.append(Row.of("accuracy", share[at], "exact", self.rows, {"state": state_bytes(model, at)}))
        return rows, {**details, "examples": found[at].tolist()}

    def try_saved(
        self, model: Any, tokenizer: Any, *, data: str, device: str = "cpu", batch: int = 16
    ) -> tuple[list[Row], dict[str, Any]]:
        """Needles in words, in a text of the data."""
        from langevin.data import prepare
        from langevin.evaluation.retrieval import InWords, by_length_and_depth, refuse_beyond_positions

        if self.form != "needle":
            raise UsageError("recall of many keys is for models trained on it", "Leave form out.")
        corpus = prepare(data, tokenizer=tokenizer.name_or_path, progress=False)
        words = InWords(model.to(device).eval(), tokenizer, corpus, self.needles, self.rows)
        made_for = refuse_beyond_positions(model, 0)
        made_for = made_for or int(getattr(model.config, "max_position_embeddings", None) or IN_WORDS[-1])
        usual = [n for n in IN_WORDS if n <= made_for] or [made_for]
        lengths = read_lengths(self.lengths, usual, self.at)
        at, longest = self.at or lengths[-1], lengths[-1]
        refuse_beyond_positions(model, longest)
        if longest >= len(words.text):
            raise UsageError(f"the text has {len(words.text)} tokens, too few for {longest}")
        at_once = {n: max(1, batch * 128 // n) for n in lengths}
        rows, _ = by_length_and_depth(
            lambda n, depth: words.trial(n, depth, at_once[n], device), lengths, self.tried_depths, at
        )
        guessing = {"a number of the row": 1 / self.needles}
        return rows, {"at": at, "rows of a cell": self.rows, "guessing": guessing}
