"""A conversion is tried on a twin of the model, which shares its weights, before the model is touched.

A few tokens (or a blank image) go through the twin as it is; with our softmax in the place of its own: a
difference shows terms that no mixer would have; and with the mixers that are wanted, all at once and, where
the model is causal, from a cache.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from langevin.errors import UsageError, one_line
from langevin.mixers.mechanism import Mechanism
from langevin.mixers.spec import Spec, parse
from langevin.models.attention import QKV
from langevin.models.convert_attention import NAME, is_causal
from langevin.models.convert_modules import install

SOFTMAX = parse("softmax")
_TOKENS = 4
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}  # of the largest output
_COARSE = 0.3  # in half precision: after a rounding, a router of experts may choose another one
_ANOTHER = "The model is as it was: choose another, or another mixer."

Given = dict[str, Any]
Outputs = dict[str, Tensor]


def tried(
    model: PreTrainedModel, plan: Mapping[str, Spec], inputs: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """The scale by which each attention module multiplies q·k; a UsageError where the plan does not work.

    inputs are those of the model's forward; None: a few tokens or a blank image.
    """
    if any(p.is_meta for p in model.parameters()):
        raise UsageError(
            f"{type(model).__name__} has weights that are not here (on the meta device, or offloaded)",
            "Convert it where they are; langevin.from_pretrained loads the result with any device_map.",
        )
    try:
        twin = _Twin(model, plan)
    except Exception as error:  # a module may hold what nobody can copy, such as activations
        raise UsageError(
            f"{type(model).__name__} cannot be copied for a trial: {one_line(error)}",
            "Convert it right after it was loaded.",
        ) from error
    with torch.no_grad(), twin.same_random_numbers():
        before = twin.as_it_is(inputs)
        scales = twin.scales(before)
        install(twin.model, {name: replace(spec, wrappers=()) for name, spec in plan.items()}, scales)
        twin.continues()
    return scales


class _Twin:
    """The modules and configs of a model over again, around the same weights."""

    def __init__(self, model: PreTrainedModel, plan: Mapping[str, Spec]) -> None:
        weights = {id(x): x for x in (*model.parameters(), *model.buffers())}
        self.model: Any = copy.deepcopy(model, weights).eval()
        self.model.config._output_attentions = False
        modules = [self.model.get_submodule(name) for name in plan]
        if model.config._attn_implementation == NAME and not any(hasattr(m, "langevin") for m in modules):
            self.model.set_attn_implementation("sdpa")  # it was built of a converted model's config
        self.name, self.plan = type(model).__name__, plan
        self.spec = next((spec for spec in plan.values() if spec != SOFTMAX), SOFTMAX)
        self.called: Any = self.model
        self.given: Given = {}

    def same_random_numbers(self) -> Any:
        """Leave the generators as they are now: some models draw in evaluation too, and new weights do."""
        device = self.model.device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])

    def as_it_is(self, inputs: Mapping[str, Any] | None) -> Outputs:
        """What the attention modules put out before anything is changed, for inputs that reach them all."""
        attempts = list(self._tiny_calls()) if inputs is None else [(self.model, dict(inputs))]
        refusal = UsageError(
            f"{self.name} takes {self.model.main_input_name}, of which no tiny example is known",
            "Pass one: langevin.convert(model, spec, inputs={...}).",
        )
        for self.called, self.given in attempts:
            try:
                outputs, _ = self.run(self.given, "as it is")
            except UsageError as error:
                refusal = error
                continue
            missed = [name for name in self.plan if name not in outputs]
            if not missed:
                return outputs
            refusal = UsageError(
                f"{missed[0]} of {self.name} is not reached by {' and '.join(self.given)}: it attends to "
                "another sequence, or wants other inputs",
                "Mixers work on one sequence; other inputs: langevin.convert(model, spec, inputs={...}).",
            )
        raise refusal

    def _tiny_calls(self) -> Iterator[tuple[Any, Given]]:
        """Tokens, a blank image or both, for the model without its head, which may want more, and with."""
        main = self.model.main_input_name
        for called in dict.fromkeys((self.model.base_model, self.model)):
            takes = inspect.signature(called.forward).parameters
            known = {name: x for name, x in self._examples().items() if name in takes}
            if main in known:
                yield called, known
                if len(known) > 1:
                    yield called, {main: known[main]}

    def _examples(self) -> Given:
        config, device = self.model.config, self.model.device
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
        image = getattr(config, "vision_config", config)
        size = getattr(image, "image_size", None)
        examples: Given = {}
        if vocabulary is not None:
            ids = torch.arange(_TOKENS, device=device) + vocabulary // 2  # few are special there
            examples["input_ids"] = ids[None] % vocabulary
        if size is not None:
            size = size if isinstance(size, list | tuple) else (size, size)
            shape = (1, getattr(image, "num_channels", 3), *size)
            examples["pixel_values"] = torch.zeros(shape, dtype=self.model.dtype, device=device)
        return examples

    def run(self, given: Given, how: str, **options: Any) -> tuple[Outputs, Any]:
        """What each attention module of the plan puts out, by name, and the model."""
        outputs: Outputs = {}
        handles = []
        for name in self.plan:

            def keep(module: Any, args: Any, out: Any, name: str = name) -> None:
                outputs[name] = out[0] if isinstance(out, tuple) else out

            handles.append(self.model.get_submodule(name).register_forward_hook(keep))
        if "use_cache" in inspect.signature(self.called.forward).parameters:
            options.setdefault("use_cache", False)
        try:
            with self.same_random_numbers():
                result = self.called(**given, **options)
        except Exception as error:
            raise UsageError(f"{self.name} {how}: {one_line(error)}", _ANOTHER) from error
        finally:
            for handle in handles:
                handle.remove()
        return outputs, result

    def scales(self, before: Outputs) -> dict[str, float]:
        """What each module multiplies q·k by, seen with softmax in its place, which must change nothing."""
        names = [name for name, spec in self.plan.items() if isinstance(spec.mixer, Mechanism)]
        if not names:
            return {}
        fresh = not any(hasattr(self.model.get_submodule(name), "langevin") for name in names)
        install(self.model, dict.fromkeys(names, SOFTMAX))
        mixers: dict[str, QKV] = {name: self.model.get_submodule(name).langevin for name in names}
        asked = set()
        for name, mixer in mixers.items():
            mixer.register_forward_pre_hook(lambda *_, name=name: asked.add(name))
        after, _ = self.run(self.given, "with softmax")
        for name in names:
            if name not in asked:
                raise UsageError(f"{name} of {self.name} does not let its attention be switched", _ANOTHER)
            off = _difference(after[name], before[name]) if fresh else None
            if off is not None:
                raise UsageError(
                    f"{name} of {self.name} is no plain softmax of scaled scores: off by {off:.2g}",
                    _ANOTHER,
                )
        return {name: mixer.geometry.scale for name, mixer in mixers.items()}

    def continues(self) -> None:
        """Run the mixers, and refuse a causal model whose last token comes out otherwise from a cache."""
        whole, _ = self.run(self.given, f"with {self.spec}")
        causal = all(is_causal(self.model.get_submodule(name), {}) for name in self.plan)
        takes_cache = "past_key_values" in inspect.signature(self.called.forward).parameters
        if not (causal and takes_cache and set(self.given) == {"input_ids"}):
            return
        ids, how = self.given["input_ids"], f"with {self.spec} and a cache"
        _, result = self.run({"input_ids": ids[:, :-1]}, how, use_cache=True)
        cache = getattr(result, "past_key_values", None)
        if cache is None:
            return
        last, _ = self.run({"input_ids": ids[:, -1:]}, how, use_cache=True, past_key_values=cache)
        for name, out in last.items():
            off = _difference(out[:, -1], whole[name][:, -1])
            if off is not None:
                raise UsageError(
                    f"{name} of {self.name} with {self.plan[name]} is off by {off:.2g} from a cache",
                    _ANOTHER,
                )


def _difference(a: Tensor, b: Tensor) -> float | None:
    """How far a is from b, relative to b's largest number, where that is more than rounding."""
    off = float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
    return None if off <= _TOLERANCE.get(b.dtype, _COARSE) else off
