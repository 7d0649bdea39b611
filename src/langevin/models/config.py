"""The configuration of langevin's own models."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from langevin.errors import UsageError, unknown
from langevin.mixers.mechanism import DIRECTIONS, Mechanism, check_heads, no_alibi
from langevin.mixers.spec import Spec, parse

CHOICES = {
    "positions": ("none", "learned", "sinusoidal", "rope", "alibi"),
    "mlp": ("gelu", "swiglu"),
    "norm": ("layernorm", "rmsnorm"),
    "candidates": ("none", "soft", "full"),
    "pooling": ("mean", "attention", "first", "last", "ends", "ngrams", "class"),
    "stem": ("patches", "convolutions"),
}


class LangevinConfig(PreTrainedConfig):
    """One pre-norm transformer whose mixer is a spec, or a list with one spec per layer.

    positions: none, learned, sinusoidal, rope or alibi; mlp: gelu or swiglu; norm: layernorm or rmsnorm.
    candidates: what positions of a masked model hold beside tokens, none, soft or full. pooling: how a
    classifier makes one vector of its tokens, mean, attention, first, last, ends or (of images) class, or
    ngrams: it has no layers; temperature: what its logits are divided by outside training.

    image_size: the side of the images that it reads instead of tokens, 0 for none, in patches of patch_size
    pixels, made by a stem, patches or convolutions; image_mean and image_std of the bytes of each channel.
    """

    model_type = "langevin"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 256
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 256
    mixer: str | list[str] = "softmax"
    positions: str = "rope"
    causal: bool = True
    mlp: str = "gelu"
    norm: str = "layernorm"
    qk_norm: bool = False
    dropout: float = 0.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    mask_token_id: int | None = None
    candidates: str = "none"
    pooling: str = "mean"
    temperature: float = 1.0
    image_size: int = 0
    patch_size: int = 4
    stem: str = "patches"
    image_mean: list[float] | tuple[float, ...] = (127.5, 127.5, 127.5)
    image_std: list[float] | tuple[float, ...] = (64.0, 64.0, 64.0)

    def __post_init__(self, **kwargs: Any) -> None:
        for kind, valid in CHOICES.items():
            if getattr(self, kind) not in valid:
                raise unknown(kind, str(getattr(self, kind)), valid)
        check_heads(self.hidden_size, self.num_attention_heads)
        if self.positions == "rope" and (self.hidden_size // self.num_attention_heads) % 2:
            raise UsageError("rope needs an even head width", "Choose another number of heads.")
        if self.pooling == "class" and not self.image_size:
            raise UsageError("a class token is for images", "Choose another pooling.")
        if self.image_size:
            self._check_images()
        if self.num_hidden_layers < 1:
            raise UsageError(f"a model needs at least one layer, not {self.num_hidden_layers}")
        direction = "causal" if self.causal else "bidirectional"
        placed = [s for s in self.mixers if isinstance(s.mixer, Mechanism)] or self.mixers
        for spec in self.mixers:
            if direction not in getattr(spec.mixer, "directions", DIRECTIONS):
                raise UsageError(
                    f"{spec} has no {direction} form, which this objective needs",
                    f"Choose another mixer; it is {' and '.join(spec.mixer.directions)} only.",
                )
            if self.positions == "alibi" and spec in placed and not getattr(spec.mixer, "has_alibi", False):
                raise no_alibi(spec)
            if self.candidates == "full" and (
                self.positions == "alibi"
                or not isinstance(spec.mixer, Mechanism)
                or getattr(spec.mixer, "decay", False)
            ):
                raise UsageError(
                    f"{spec} with positions={self.positions} counts tokens, and a full state has several"
                    " of them at one place",
                    "Choose a mixer of q, k and v without decay, and other positions than alibi.",
                )
        super().__post_init__(**kwargs)

    def _check_images(self) -> None:
        size, patch = self.image_size, self.patch_size
        if self.causal:
            raise UsageError("an image is seen from all sides", "Use --objective classify (causal=False).")
        if self.pooling == "ngrams":
            raise UsageError("a bag of n-grams reads texts", "Choose another pooling.")
        if patch < 1 or size % patch:
            raise UsageError(
                f"patches of {patch} pixels do not fill images of {size} × {size}",
                "Choose another --patch.",
            )
        if self.stem == "convolutions" and (patch < 2 or patch & (patch - 1)):
            raise UsageError(
                f"convolutions make patches of 2, 4, 8 ... pixels, not {patch}",
                "Choose another --patch, or --stem patches.",
            )
        if self.positions == "rope" and (self.hidden_size // self.num_attention_heads) % 4:
            raise UsageError(
                "rope in two dimensions needs a head width that 4 divides",
                "Choose another number of heads.",
            )
        for spec in self.mixers:
            if self.positions == "alibi" or getattr(spec.mixer, "decay", False):
                raise UsageError(
                    f"{spec} with positions={self.positions} measures distances along a line, and patches"
                    " stand in a grid",
                    "Choose other positions than alibi, and a mixer without decay.",
                )
            if self.pooling == "class" and not isinstance(spec.mixer, Mechanism):
                raise UsageError(
                    f"{spec} mixes neighbours in the image, and a class token has none",
                    "Choose the pooling mean or attention.",
                )

    @property
    def grid(self) -> tuple[int, int] | None:
        """Rows and columns of patches; None of a model that reads tokens."""
        side = self.image_size // self.patch_size
        return (side, side) if self.image_size else None

    @property
    def output_attentions(self) -> bool:
        """Any attn_implementation gives weights here: it is the mixer that chooses how to compute."""
        return bool(self._output_attentions)

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        self._output_attentions = value

    def validate_output_attentions(self) -> None:
        """Nothing: see above."""

    @property
    def mixers(self) -> list[Spec]:
        """The spec of every layer."""
        specs = [self.mixer] if isinstance(self.mixer, str) else list(self.mixer)
        if len(specs) not in (1, self.num_hidden_layers):
            raise UsageError(
                f"{len(specs)} mixers came for {self.num_hidden_layers} layers",
                "Give one mixer, or one for each layer.",
            )
        return [parse(s) for s in specs] * (self.num_hidden_layers if len(specs) == 1 else 1)


AutoConfig.register("langevin", LangevinConfig, exist_ok=True)
