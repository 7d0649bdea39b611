"""Pretrained models by name, and as a start for training: a saved model, a run, or a name on the Hub.

Nothing here imports torch before it must, so that a wrong name is answered at once.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from langevin.data.hub import data_root, reachable
from langevin.errors import MissingWeights, UsageError, WorkError

_COUNT_FROM_PADDING = (
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm"),
    *("mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def located(name: str | os.PathLike[str]) -> str:
    """The folder of a model: a run's best one, a saved one, or one of `$LANGEVIN_DATA/models/`; else the
    name itself, where the Hugging Face Hub, or what was fetched from there before, may have it."""
    name, root = os.fspath(name), data_root()
    places = [Path(name).expanduser(), *([] if root is None else [root / "models" / name])]
    for place in places:
        if name and place.is_dir():
            of_a_run = place / "model"
            return str(of_a_run if (of_a_run / "config.json").is_file() else place)
    searched = f"no folder {' or '.join(map(str, places))}"
    if _HUB_NAME.fullmatch(name) and not os.path.exists(name) and not os.path.isdir(os.path.dirname(name)):
        if _fetched(name) or reachable():
            return name
        searched += ", and the Hugging Face Hub cannot be reached"
    raise UsageError(
        f"there is no model {name!r}: {searched}",
        "Give a folder written by save_pretrained, a run, or a name on the Hub"
        + ("." if root else " (or under $LANGEVIN_DATA/models/)."),
    )


def _fetched(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # no name the Hub could have
        return False


def pretrained(name: str, spec: str | None) -> Any:
    """A causal language model to go on from, with its weights in float32 and mixing by `spec`; None leaves
    its mixers as they are."""
    from langevin.models.convert import convert, from_pretrained

    model = causal(from_pretrained(name, dtype="float32"), name)
    return model if spec is None else convert(model, spec)


def causal(model: Any, name: str) -> Any:
    """The model of this name, where it predicts the next token."""
    if not model.can_generate() or getattr(model.config, "is_encoder_decoder", False):
        raise UsageError(
            f"{name} is a {type(model).__name__}, which does not predict the next token",
            "Choose a causal language model.",
        )
    return model


def without_weights(name: str, spec: str) -> Any:
    """The model of a saved folder with no values in its weights, where it mixes by `spec` already: to be
    converted it must be tried, for which its weights must be there."""
    from transformers.initialization import no_init_weights

    from langevin.mixers import parse
    from langevin.models.convert import class_of, read_config

    where = located(name)
    config, _ = read_config(where, {})
    cls, building, specs = class_of(config, None, where)
    if not os.path.isdir(where) or {parse(spec)} != set(specs):
        raise UsageError(
            f"{name} does not mix by {spec} yet, and is not converted while it is spread over processes",
            f"langevin convert {name} {spec!r} --out FOLDER, then --init FOLDER.",
        )
    with no_init_weights():
        model = building(config)
    model.__class__ = cls
    model.tie_weights()
    return model


def encoder(name: str, head: Any, mixers: str | list[str], settings: dict[str, Any]) -> Any:
    """A model that sees both sides under a head that is new where its own does not fit: one of ours, whose
    mixers may be others of q, k and v, or for classes any that transformers has such a head for,
    converted."""
    import torch

    from langevin.models.config import LangevinConfig
    from langevin.models.convert import loaded, read_config

    where = located(name)
    config, _ = read_config(where, {})
    if not isinstance(config, LangevinConfig) and "id2label" in settings:
        return _classifier(where, config, mixers, settings)
    if not isinstance(config, LangevinConfig) or config.causal:
        raise UsageError(
            f"{name} is no langevin model that sees both sides",
            "Give a run of the objective masked, sparse or classify, or leave --init out.",
        )
    if config.pooling == "ngrams":
        raise UsageError(f"{name} is a bag of n-grams, without layers to start from", "Leave --init out.")
    for key in ("image_size", "patch_size", "stem"):
        mine = settings.get(key, getattr(LangevinConfig, key))
        if getattr(config, key) != mine:
            raise UsageError(
                f"{name} has {key}={getattr(config, key)!r}, not {mine!r}",
                "Give one that reads the same.",
            )
    vocab_size = config.vocab_size
    for key, value in {**settings, "mixer": mixers, "vocab_size": vocab_size}.items():
        setattr(config, key, value)
    own = own_mixer(name)
    misfit = UsageError(
        f"{name} mixes by {own}, and {config.mixer} cannot go on from its weights",
        "Leave --init out." if ";" in own else f"Give --mixer {own!r}, or leave --init out.",
    )
    try:
        model, info = loaded(head, where, config, {"dtype": torch.float32})
    except MissingWeights:
        if own == config.mixer:
            raise
        raise misfit from None
    other = sorted(key for key, *_ in info["mismatched_keys"] if key.startswith("model."))
    if other and own != config.mixer:
        raise misfit
    if other:
        raise WorkError(
            f"{name} has {len(other)} weights of other shapes, the first being {other[0]}",
            "Save the model again.",
        )
    return model


def _classifier(where: str, config: Any, mixers: str | list[str], settings: dict[str, Any]) -> Any:
    """A model of transformers with its own head for classes."""
    from langevin.models.convert import class_of, convert, loaded

    if settings["pooling"] != "mean":
        raise UsageError(
            f"{where} has a head of its own, which is not told how to pool", "Leave the pooling out."
        )
    cls, building, specs = class_of(config, "AutoModelForSequenceClassification", where)
    for key in ("id2label", "label2id", "pad_token_id"):
        setattr(config, key, settings[key])
    model, info = loaded(building, where, config, {"dtype": "float32"})
    model.__class__ = cls
    missing = sorted(key for key in info["missing_keys"] if re.search(r"\.\d+\.", key))
    if missing:
        raise WorkError(
            f"{where} has no weights for {len(missing)} parts of its layers, the first being {missing[0]}",
            "Give a folder written by save_pretrained.",
        )
    own = {str(spec) for spec in specs} or {"softmax"}
    return model if own == {str(mixers)} else convert(model, str(mixers))


def own_mixer(name: str) -> str:
    """The spec by which a saved model mixes as it stands, or one a layer separated by semicolons; a plain
    transformers model mixes by softmax."""
    from langevin.models.convert import class_of, read_config

    where = located(name)
    _, _, specs = class_of(read_config(where, {})[0], None, where)
    written = [str(spec) for spec in specs] or ["softmax"]
    return written[0] if len(set(written)) == 1 else "; ".join(written)


def trained_length(name: str) -> int:
    """The longest text it was made for; encoders like RoBERTa count positions from behind the padding."""
    from langevin.models.convert import read_config
    from langevin.models.convert_modules import train_length

    config, _ = read_config(located(name), {})
    rotary = getattr(config, "position_embedding_type", None) == "rotary"  # as most of esm are
    counted = config.model_type in _COUNT_FROM_PADDING and not rotary
    return train_length(config) - (config.pad_token_id + 1 if counted else 0)


def tokenizer_of(name: str) -> str:
    """The folder or name of its tokenizer."""
    where = located(name)
    if os.path.isdir(where) and not os.path.isfile(os.path.join(where, "tokenizer.json")):
        raise UsageError(f"{where} has no tokenizer", "Give --tokenizer.")
    return where


def save_tokenizer(name: str, folder: str | os.PathLike[str]) -> None:
    """Put a copy of its tokenizer into a folder, if it has one: not every model reads text."""
    from transformers import AutoTokenizer

    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "tokenizer.json")):
        return
    with contextlib.suppress(OSError, ValueError):
        AutoTokenizer.from_pretrained(name, trust_remote_code=False).save_pretrained(folder)
