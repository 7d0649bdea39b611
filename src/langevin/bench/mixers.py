"""`langevin bench mixers`: what each mixer costs, as a ratio to plain softmax in the same run.

Every mixer is timed as the module x -> x it is in a model: projections, rotary positions, the mixing and
the output projection, so that attention-free mixers stand beside the others. The baseline is the same
module around torch's scaled_dot_product_attention. Runs of the mixers alternate, so that a machine that
slows down slows all of them. Also timed is the core alone: q, k, v in, mixed values out.
"""

import itertools
import statistics
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from langevin.environment import can_compile, environment, pick_device
from langevin.errors import UsageError
from langevin.mixers import Mechanism, attend, build, parse

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BASELINE = "softmax"
_CASES = itertools.count()
# GPU cycles of waiting before a timed run, so that the host's launches are queued and not measured.
_HEAD_START = 20_000_000


@dataclass(frozen=True)
class Settings:
    lengths: tuple[int, ...] = (256, 1024, 2048)
    width: int = 256
    heads: int = 4
    tokens: int = 2048  # per batch: long sequences come in small batches
    causal: bool = True
    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = False
    repeats: int = 10
    warmup: int = 2


def bench_mixers(
    specs: list[str], settings: Settings, progress: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Time and peak memory of every spec at every length, with what they were measured on."""
    _check(settings)
    specs = beside_baseline(specs)
    rows: list[dict[str, Any]] = []
    for length in settings.lengths:
        for part in ("module", "core"):
            rows += _compare(specs, length, part, settings, progress)
    return {"settings": asdict(settings), "machine": environment(settings.device), "rows": rows}


def beside_baseline(specs: Sequence[str]) -> list[str]:
    """The specs as they are written in full, softmax first."""
    return list(dict.fromkeys((BASELINE, *(str(parse(spec)) for spec in specs))))


def _compare(
    specs: list[str], length: int, part: str, settings: Settings, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for each spec; a ratio is the median over the runs of this / softmax, run by run."""
    batch = max(1, settings.tokens // length)
    made = {s: _case(s, part, batch, length, settings) for s in specs}
    cases = {s: case for s, case in made.items() if case is not None}
    times: dict[str, dict[str, list[float]]] = {s: {"forward": [], "both": []} for s in cases}
    peaks: dict[str, float] = {}
    for spec, (forward, both) in cases.items():
        progress(f"{part} {spec} at {length}: warm-up")
        for _ in range(settings.warmup):
            forward()
            both()
        peaks[spec] = peak_memory(both, settings.device)
    for turn in range(settings.repeats):
        progress(f"{part} at {length}: run {turn + 1} of {settings.repeats}")
        for spec, (forward, both) in cases.items():
            times[spec]["forward"].append(_seconds(forward, settings.device))
            times[spec]["both"].append(_seconds(both, settings.device))
    rows = []
    for spec, timed in times.items():
        row: dict[str, Any] = {"mixer": spec, "length": length, "batch": batch, "part": part}
        for what, seconds in timed.items():
            row[f"{what}_ms"] = statistics.median(seconds) * 1e3
            row[f"{what}_spread_ms"] = spread(seconds) * 1e3
            row[f"{what}_ratio"] = median_ratio(seconds, times[BASELINE][what])
        row["peak_mib"] = peaks[spec] / 2**20
        row["peak_ratio"] = peaks[spec] / max(peaks[BASELINE], 1.0)
        rows.append(row)
    return rows


def _case(
    spec: str, part: str, batch: int, length: int, settings: Settings
) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """(forward, forward and backward) of one mixer; None where there is no core of q, k and v."""
    dtype, device = DTYPES[settings.dtype], settings.device
    torch.manual_seed(0)
    parsed = parse(spec)
    is_attention = isinstance(parsed.mixer, Mechanism)
    run: Callable[..., Any]
    inputs: list[Tensor]
    if part == "core":
        if not is_attention:
            return None
        d = settings.width // settings.heads
        shape = (batch, settings.heads, length, d)
        inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3)]

        def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return attend(q, k, v, parsed, causal=settings.causal)

        parameters: list[nn.Parameter] = []
    else:
        options: dict[str, Any] = {"positions": "rope"} if is_attention else {}
        module = build(
            parsed,
            width=settings.width,
            heads=settings.heads,
            causal=settings.causal,
            max_length=length,
            **options,
        ).to(device=device, dtype=dtype)
        x = torch.randn(batch, length, settings.width, device=device).to(dtype)
        inputs, run = [x.requires_grad_()], module
        parameters = list(module.parameters())
    if settings.compile:
        run = torch.compile(_with_own_code(run), fullgraph=True)

    def forward() -> Any:
        with torch.no_grad():
            return run(*inputs)

    cotangent = torch.randn_like(forward())

    def both() -> Any:
        return torch.autograd.grad(run(*inputs), [*inputs, *parameters], cotangent)

    return forward, both


def _with_own_code(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function under a code object of its own: torch.compile keeps its results by code object,
    and cases that shared one would crowd each other out."""

    def case(*inputs: Tensor) -> Any:
        return run(*inputs)

    code = case.__code__.replace(co_name=f"case_{next(_CASES)}")
    return types.FunctionType(code, globals(), code.co_name, None, case.__closure__)


def _seconds(function: Callable[[], Any], device: str) -> float:
    if device.startswith("cuda"):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(_HEAD_START)
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(stop)) / 1e3
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def peak_memory(function: Callable[[], Any], device: str = "cpu") -> float:
    """The most bytes of tensors alive at once during a call, beyond those alive before it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before)
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
        function()
    kineto: Any = profile.profiler.kineto_results
    events = [e for e in kineto.events() if e.name() == "[memory]"]  # of releases with negative sizes
    levels = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return float(max(levels, default=0))


def spread(values: list[float]) -> float:
    """The interquartile range."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def median_ratio(ours: list[float], base: list[float]) -> float:
    """Run by run."""
    return statistics.median(a / b for a, b in zip(ours, base, strict=True))


def _check(settings: Settings) -> None:
    if settings.compile and not can_compile(settings.device):
        raise UsageError("torch.compile needs gcc or g++, which is not here", "Leave out --compile.")
    if settings.dtype not in DTYPES:
        raise UsageError(f"unknown dtype {settings.dtype!r}", f"Use one of {', '.join(DTYPES)}.")
    pick_device(settings.device)
    if settings.width % settings.heads or (settings.width // settings.heads) % 2:
        raise UsageError(
            f"{settings.heads} heads do not divide a width of {settings.width} into even head widths"
        )
    if min(settings.lengths) < 1 or settings.repeats < 1:
        raise UsageError("lengths and repeats must be 1 or more")
