"""`langevin bench edge`: what a text classifier costs to train and to run, by the length of texts.

Classifiers of the same shape, one for each mixer, whose MLPs are made so wide that all have as many
parameters as softmax; beside them a transformers model of DistilBERT's shape with fused attention, and on a
GPU also with attention that is materialised. Weights are random. All are there at once and take turns at
the same batch, length and precision. Memory is that of tensors:

    training    weights, gradients, AdamW's moments and activations, at the peak of a step
    inference   weights and activations, at the peak of a forward pass
    int8        the ONNX file that is run, on one thread of the processor

Where a batch does not fit, or takes too long, the largest half, quarter, ... that does not is trained.
"""

import copy
import itertools
import math
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from langevin.bench.mixers import BASELINE, DTYPES, beside_baseline, median_ratio, peak_memory
from langevin.bench.training import finished
from langevin.environment import can_compile, environment, pick_device
from langevin.errors import UsageError
from langevin.evaluation.cost import parameter_count
from langevin.export.runtime import INPUTS
from langevin.models.heads import LangevinForSequenceClassification
from langevin.settings import TrainConfig
from langevin.training.start import model_config

ARMS = ("neighbor(kind='content', hops='dilated', mean=True)", "neighbor", "sima")
DISTILBERT: dict[str, Any] = {"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072}
CLASSES, VOCABULARY = 2, 30_522
ROOM = 0.9  # of free memory may be filled
SLOWEST = 30.0  # seconds of a run


class Arm:
    """A model that trains (in float32, under autocast) and its copy that runs (in the type itself)."""

    def __init__(self, name: str, make: Callable[[], Any], device: str, dtype: torch.dtype, compiled: bool):
        torch.manual_seed(0)
        self.name, self.make, self.device, self.dtype = name, make, device, dtype
        self.trained = make().to(device).train()
        self.running = copy.deepcopy(self.trained).to(dtype).eval()
        self.optimizer = torch.optim.AdamW(self.trained.parameters(), lr=1e-5)
        self.parameters = parameter_count(self.trained)
        if compiled:
            self.trained.compile(dynamic=False)
            self.running.compile(dynamic=False)

    def _texts(self, batch: int, length: int) -> torch.Tensor:
        some = np.random.default_rng(0).integers(self.trained.config.vocab_size, size=(batch, length))
        return torch.from_numpy(some).to(self.device)

    def step(self, batch: int, length: int) -> Callable[[], None]:
        """A training step on texts that are the same every time."""
        texts, labels = self._texts(batch, length), torch.zeros(batch, dtype=torch.long, device=self.device)

        def run() -> None:
            with torch.autocast(texts.device.type, self.dtype, enabled=self.dtype != torch.float32):
                loss = self.trained(input_ids=texts, labels=labels).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

        return run

    def export(self, file: Path) -> None:
        """As an ONNX file in int8, on one thread of the processor."""
        import onnx

        from langevin.export.runtime import session_of
        from langevin.export.to_onnx import graph_of, quantised

        onnx.save(quantised(graph_of(self.make().eval())), file)
        self.session, self.bytes = session_of(file, threads=1), file.stat().st_size

    def exported(self, batch: int, length: int) -> Callable[[], None]:
        ids = self._texts(batch, length).cpu().numpy()
        rows = dict(zip(INPUTS, (ids, np.ones_like(ids, bool)), strict=True))
        return lambda: self.session.run(None, rows)

    def forward(self, batch: int, length: int) -> Callable[[], None]:
        texts = self._texts(batch, length)

        @torch.no_grad()
        def run() -> None:
            self.running(input_ids=texts)

        return run

    @property
    def held(self) -> int:
        """Bytes that training holds between steps: weights and AdamW's moments."""
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        every = [*self.trained.parameters(), *(x for x in states if isinstance(x, torch.Tensor))]
        return sum(x.numel() * x.element_size() for x in every)

    def flops(self, length: int) -> int:
        """Of a forward pass over one text: those of matrix products outside kernels of our own."""
        whole = sdpa_kernel(SDPBackend.MATH)
        with FakeTensorMode(), whole, FlopCounterMode(display=False) as counted, torch.no_grad():
            self.make().eval()(input_ids=torch.zeros((1, length), dtype=torch.long))
        return int(counted.get_total_flops())


@torch._dynamo.config.patch(recompile_limit=64)  # a graph for each length and batch
def bench_edge(
    specs: list[str],
    config: TrainConfig,
    *,
    vocab: int,
    lengths: tuple[int, ...],
    dtype: str = "float32",
    compiled: bool = False,
    int8: bool = False,
    inference: bool = True,
    repeats: int = 10,
    distilbert: dict[str, Any] = DISTILBERT,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """A row of training and, unless they are left out, two of inference (one text, and a batch) for each
    model and length, and one of its ONNX file in int8 if asked for; left_out says what did not fit."""
    device = pick_device(config.device)
    if compiled and not can_compile(device):
        raise UsageError("torch.compile needs gcc or g++, which is not here", "Leave out --compile.")
    specs = beside_baseline(specs or ARMS)
    makers = _makers(specs, replace(config, context=max(lengths)), vocab, distilbert, device)
    arms = []
    for name, make in makers.items():
        progress(f"{name}: making it")
        arms.append(Arm(name, make, device, DTYPES[dtype], compiled))
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    parts = [("training", config.batch)]
    parts += [("inference", b) for b in dict.fromkeys((1, config.batch)) if inference]
    with tempfile.TemporaryDirectory() as folder:
        if int8:
            parts.append(("int8", 1))
            for i, arm in enumerate(arms):
                progress(f"{arm.name}: exporting it")
                arm.export(Path(folder) / f"{i}.onnx")
    for length, (part, batch) in itertools.product(sorted(lengths), parts):
        what = f"{part}, {batch} texts of {length:,} tokens"
        cases = {}
        for arm in arms:
            progress(f"{what}: memory of {arm.name}")
            cases[arm.name] = _largest(arm, part, batch, length)
        left_out += [f"{name}: {what}" for name, case in cases.items() if case is None]
        calls = {name: case[0] for name, case in cases.items() if case is not None}
        progress(f"{what}: {repeats} runs in turn")
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                times[name].append(finished(call, device))
        for arm in arms:
            case, base = cases[arm.name], cases[BASELINE]
            if case is None:
                continue
            seconds, (_, texts, peak) = times[arm.name], case
            row = {
                **{"part": part, "model": arm.name, "length": length, "batch": texts},
                **{f"ms_p{at}": 1000 * float(np.percentile(seconds, at)) for at in (50, 90, 99)},
                "tokens_per_second": texts * length / statistics.median(seconds),
                "mib": peak / 2**20,
                "mib_a_text": peak / 2**20 / texts,
                "ratio": math.nan,
            }
            if base is not None:
                row["ratio"] = median_ratio(times[arm.name], times[BASELINE]) * base[1] / case[1]
            row |= {"parameters": arm.parameters, "gflops": arm.flops(length) / 1e9}
            rows.append(row)
    shape = {name: getattr(config, name) for name in ("layers", "width", "heads", "batch", "positions")}
    settings = {**shape, "vocab": vocab, "dtype": dtype, "compile": compiled, "repeats": repeats}
    return {
        "settings": {**settings, "distilbert": distilbert},
        "machine": environment(device),
        "rows": rows,
        "left_out": left_out,
    }


def _makers(
    specs: list[str], config: TrainConfig, vocab: int, distilbert: dict[str, Any], device: str
) -> dict[str, Callable[[], Any]]:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    def ours(spec: str, width: int | None = None) -> Callable[[], Any]:
        own = replace(config, mixer=spec, mlp_width=width or config.mlp_width, objective="classify")
        settings = model_config(own, vocab_size=vocab, num_labels=CLASSES)
        return lambda: LangevinForSequenceClassification(settings)

    def count(spec: str, width: int) -> int:
        with torch.device("meta"):
            return parameter_count(ours(spec, width)())

    def theirs(attention: str) -> Any:
        settings = DistilBertConfig(
            vocab_size=VOCABULARY, max_position_embeddings=config.context, num_labels=CLASSES, **distilbert
        )
        return DistilBertForSequenceClassification._from_config(settings, attn_implementation=attention)

    wide = config.mlp_width or 4 * config.width
    target = count(BASELINE, wide)
    makers = {}
    for spec in specs:
        one = count(spec, wide + 1) - count(spec, wide)  # parameters of a unit of every layer's MLP
        makers[spec] = ours(spec, max(8, wide + round((target - count(spec, wide)) / one)))
    makers["DistilBERT-shaped"] = lambda: theirs("sdpa")
    if device != "cpu":
        makers["DistilBERT-shaped, materialised"] = lambda: theirs("eager")
    return makers


def _largest(arm: Arm, part: str, batch: int, length: int) -> tuple[Callable[[], None], int, float] | None:
    """The call on a batch, or in training on the largest half, quarter, ... of it that fits; its texts and
    its peak of bytes. What a batch takes is foretold from one text."""
    training = part == "training"
    make = {"training": arm.step, "inference": arm.forward, "int8": arm.exported}[part]
    try:
        make(1, length)()
        if part == "int8":
            return make(1, length), 1, arm.bytes
        weights = sum(p.numel() * p.element_size() for p in arm.running.parameters())
        held, fixed = (arm.held, 4 * arm.parameters) if training else (weights, 0)  # fixed: gradients
        seconds = finished(make(1, length), arm.device)
        a_text = max(0.0, peak_memory(make(1, length), arm.device) - fixed)
        while fixed + batch * a_text > ROOM * _free(arm.device) or batch * seconds > SLOWEST:
            if batch == 1 or not training:
                return None
            batch //= 2
        call = make(batch, length)
        call()
        return call, batch, held + peak_memory(call, arm.device)
    except torch.OutOfMemoryError:
        arm.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return None


def _free(device: str) -> float:
    if device.startswith("cuda"):
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return float(torch.cuda.mem_get_info()[0] + unused)
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def draw(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Training memory a text, and the time of one text, by length: two pictures."""
    from langevin import figures

    made = []
    for name, part, key, label in (
        ("training-memory.png", "training", "mib_a_text", "training memory (MiB a text)"),
        ("latency.png", "inference", "ms_p50", "one text (ms, median)"),
    ):
        own = [row for row in rows if row["part"] == part and (part == "training" or row["batch"] == 1)]
        figures.save(figures.by_length(own, "model", key, label)[1], folder / name)
        made.append(folder / name)
    return made
