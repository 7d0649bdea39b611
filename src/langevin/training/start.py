"""From a config to a run that is ready to train: its data, its model, its folder."""

import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from langevin.data import names
from langevin.environment import can_compile, pick_device, session
from langevin.errors import UsageError
from langevin.mixers import parse
from langevin.models import heads
from langevin.models.config import LangevinConfig
from langevin.models.pretrained import encoder, located, pretrained, trained_length, without_weights
from langevin.objectives import OBJECTIVES
from langevin.runs.files import write_text
from langevin.runs.folder import Lock, add_session, check_data, opened
from langevin.runs.load import weight_files
from langevin.settings import BUDGET, TrainConfig
from langevin.tasks import TASKS
from langevin.training import checkpoint, parallel, track
from langevin.training.fitting import budget, seconds_a_step
from langevin.training.loop import Trainer
from langevin.training.parallel import World
from langevin.training.progress import Progress, cut_metrics

# Settings that may change when a run goes on: they do not change what is computed, or say how far it goes.
MAY_CHANGE = (
    *("device", "keep", "checkpoint_every", "accumulate", "parallel", "graphs", "track"),
    *BUDGET,
    *("data", "tokenizer"),  # where they are: their hashes are compared
)
# What a pretrained model decides.
SHAPE = ("layers", "width", "heads", "kv_heads", "positions", "mlp", "mlp_width", "norm", "qk_norm", "tie")
LONGEST = 1024  # the context of a pretrained model that was made for longer ones, unless --context says so


def prepared(
    config: TrainConfig,
    out: Path | None = None,
    *,
    resume: bool = False,
    quiet: bool = False,
    world: World | None = None,
    device: str | None = None,
) -> tuple[Trainer, Progress]:
    """A run that is ready to train: its folder, data and model, at its last checkpoint if it has one."""
    world = world or World()
    device = device or pick_device(config.device)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # streams and random numbers go where the model is
    config = resolved(config, device)
    folder = out or default_folder(config)
    console = Console(stderr=True, quiet=quiet or not world.first)
    locks: list[Lock] = []

    def claimed() -> TrainConfig | None:
        locks.append(Lock(folder))
        return _open(folder, config, resume)

    before = world.ask_first(claimed)
    if before is not None and not any(given is not None for given in _budget(config)):
        config = replace(config, **{name: getattr(before, name) for name in BUDGET})
    kinds = track.chosen(config.track)
    data = TASKS.parse(config.task).prepare(config, progress=not quiet and world.first)
    if before is not None:
        check_data(folder, data.manifest, config.data)
    torch.manual_seed(config.seed)
    spread = world.size > 1 and config.parallel == "fsdp"
    files = weight_files(Path(located(config.init))) if spread and config.init is not None else ()
    model = parallel.built(lambda: build(config, data, spread), config.parallel, world, device, files)
    trainer = Trainer(config, model, data, folder, world)
    if not world.first:
        torch.manual_seed(hash((config.seed, world.rank)))
    if before is not None:
        _go_on(trainer, console)
        if _budget(config) != _budget(before):
            _go_further(trainer, console)
    if world.first:
        write_text(folder / "config.yaml", config.as_yaml())
        cut_metrics(folder / "metrics.jsonl", trainer.state.step)
        add_session(folder, session(device, trainer.state.step, data.manifest))
    trackers = [kind(folder, asdict(config), trainer.state.step) for kind in kinds if world.first]
    lock = locks[0] if locks else None
    return trainer, Progress(folder, quiet, writes=world.first, trackers=trackers, lock=lock)


def _go_on(trainer: Trainer, console: Console) -> None:
    refused: list[str] = []
    world, folder = trainer.world, trainer.folder / "checkpoints"
    last = world.ask_first(lambda: checkpoint.newest(folder, trainer.held(), refused))
    for problem in refused:
        console.print(f"refused checkpoint {problem}; the one before it is used", style="yellow")
    if last is not None and not last.is_dir():
        raise UsageError(
            f"process {world.rank} does not see {last}", "Put --out on a disk that all machines share."
        )
    if last is not None:
        trainer.resume(last)
    console.print(f"going on from step {trainer.state.step}")


def _go_further(trainer: Trainer, console: Console) -> None:
    """Another budget than the run had: count its steps anew."""
    state, total = trainer.state, int(trainer.world.agree(budget(trainer)))
    if total < state.step:
        raise UsageError(
            f"{trainer.folder} is at step {state.step} already, beyond a budget of {total} steps",
            "Give a larger budget, or another --out.",
        )
    state.total, state.looks = total, 0
    console.print(f"up to step {total}, with the learning rates of a run of that length")


def _budget(config: TrainConfig) -> tuple[float | None, ...]:
    return tuple(getattr(config, name) for name in BUDGET)


def resolved(config: TrainConfig, device: str) -> TrainConfig:
    """The config with what `auto` means on this device spelled out; what it names must be known."""
    TASKS.parse(config.task)
    objective = OBJECTIVES.parse(config.objective)
    for spec in config.mixer.split(";"):
        parse(spec.strip())
    if config.compile in ("on", "loss") and not can_compile(device):
        raise UsageError("torch.compile needs gcc or g++, which is not here", "Use --compile off.")
    on_gpu = device.startswith("cuda")
    half: Literal["bf16", "fp32"] = "bf16" if on_gpu and torch.cuda.is_bf16_supported(False) else "fp32"
    whole: Literal["on", "off"] = "on" if on_gpu and can_compile(device) else "off"
    config = replace(
        config,
        data=_absolute(config.data),
        precision=half if config.precision == "auto" else config.precision,
        compile=whole if config.compile == "auto" else config.compile,
    )
    if config.init is None:
        model_config(config, vocab_size=2)  # what cannot be built should not wait for the data
    else:
        config = _like_the_pretrained(config)
    objective.check(config)
    return config


def _absolute(data: str) -> str:
    """A path that will be right from any folder; a name stays one."""
    place = Path(data).expanduser()
    return (
        str(place.absolute()) if place.exists() and data not in {row["name"] for row in names()} else data
    )


def build(config: TrainConfig, data: Any, spread: bool = False) -> Any:
    """The model of a config, for the data it reads: new, or from pretrained weights, which one that is to
    be spread over processes does not get here."""
    settings = TASKS.parse(config.task).model_settings(config, data)
    if config.init is None:
        return getattr(heads, head_of(config))(model_config(config, **settings)).train()
    objective, task = OBJECTIVES.parse(config.objective), TASKS.parse(config.task)
    if not objective.causal:
        own = {**settings, **objective.model_settings(), **task.input_settings(config)}
        model = encoder(config.init, getattr(heads, head_of(config)), config.mixers, own)
    else:
        model = (without_weights if spread else pretrained)(config.init, config.mixer)
    tokens = getattr(model.get_input_embeddings(), "num_embeddings", settings["vocab_size"])
    if settings["vocab_size"] > tokens:
        raise UsageError(
            f"the tokenizer has {settings['vocab_size']} tokens, {config.init} only {tokens}",
            "Leave --tokenizer out: the model's own is used.",
        )
    return model.train()


def _like_the_pretrained(config: TrainConfig) -> TrainConfig:
    """The config of a run that starts from pretrained weights, which decide the shape of the model."""
    default = TrainConfig()
    for name in SHAPE:
        if getattr(config, name) != getattr(default, name):
            raise UsageError(
                f"--{name.replace('_', '-')} comes from the pretrained model {config.init}",
                "Leave it out, or leave --init out.",
            )
    if ";" in config.mixer:
        raise UsageError("a pretrained model takes one mixer for all layers", "Give --mixer one spec.")
    length = trained_length(config.init or "")
    if config.context > length:
        raise UsageError(
            f"{config.init} was made for {length} tokens, not {config.context}", "Use a shorter --context."
        )
    return replace(config, context=config.context or min(LONGEST, length))


def head_of(config: TrainConfig) -> str:
    """The class of models/heads.py that is trained."""
    return TASKS.parse(config.task).head or OBJECTIVES.parse(config.objective).head


def model_config(config: TrainConfig, *, vocab_size: int, **settings: Any) -> LangevinConfig:
    """The model of a config, for data of so many tokens."""
    objective = OBJECTIVES.parse(config.objective)
    return LangevinConfig(
        vocab_size=vocab_size + objective.extra_tokens,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.context,
        mixer=config.mixers,
        positions=config.positions,
        mlp=config.mlp,
        intermediate_size=config.mlp_width,
        norm=config.norm,
        qk_norm=config.qk_norm,
        dropout=config.dropout,
        tie_word_embeddings=config.tie,
        causal=objective.causal,
        **objective.model_settings(),
        **TASKS.parse(config.task).input_settings(config),
        **settings,
    )


def estimate(config: TrainConfig) -> dict[str, Any]:
    """Parameters, FLOPs, memory and time of a run, before it is made.

    Memory is that of weights, gradients and two moments in float32; activations are not in it. The time
    comes from a few backward passes on this device.
    """
    device = pick_device(config.device)
    config = resolved(config, device)
    data = TASKS.parse(config.task).prepare(config)
    model = build(config, data).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    trainer = Trainer(replace(config, compile="off", track=None), model, data, Path())
    flops = trainer.objective.flops(model, config.context)
    steps = None if config.minutes else budget(trainer)
    seconds, unit = seconds_a_step(trainer), trainer.task.unit
    return {
        "parameters": parameters,
        "of which embeddings": sum(p.numel() for p in model.get_input_embeddings().parameters()),
        f"{unit} a step": trainer.a_step,
        "steps": round(60 * (config.minutes or 0) / seconds) if steps is None else steps,
        "FLOPs a token": round(flops),
        "FLOPs in all": f"{flops * steps * trainer.a_step:.3g}" if steps and unit == "tokens" else None,
        "bytes of weights, gradients and moments": 16 * parameters,
        "parts a step": trainer.parts,
        f"seconds a step on this {device}": f"{seconds:.3g}",
        "minutes in all": f"{config.minutes or (steps or 0) * seconds / 60:.3g}",
    }


def default_folder(config: TrainConfig) -> Path:
    name = re.sub(r"[^a-z0-9.]+", "-", f"{Path(config.data).stem}-{config.mixer}".lower()).strip("-")
    return Path("runs") / f"{name}-{config.seed}"


def _open(folder: Path, config: TrainConfig, resume: bool) -> TrainConfig | None:
    """The settings of the run that the folder holds, to go on with; raises where that was not asked for."""
    if opened(folder, resume) != "trained":
        return None
    before = TrainConfig.read(folder / "config.yaml")
    for f in fields(TrainConfig):
        then, now = getattr(before, f.name), getattr(config, f.name)
        if then != now and f.name not in MAY_CHANGE:
            raise UsageError(
                f"{folder} was trained with {f.name}={then!r}, not {now!r}",
                "Give the same settings, or another --out.",
            )
    return before
