"""Classifying images: any mixer over a grid of patches."""

from dataclasses import dataclass
from typing import Any, Literal

from langevin.errors import UsageError
from langevin.settings import TrainConfig, check_count
from langevin.tasks.classify import Labelled, names_of
from langevin.tasks.task import register

SIDE = 8  # patches, unless told otherwise


@register("images")
@dataclass(frozen=True)
class Images(Labelled):
    size: int | None = None
    """Pixels of a side, to which images are scaled; default: 64, or that of a named set."""
    patch: int | None = None
    """Pixels of a side of a patch; default: an eighth of the image, or the power of two below it."""
    stem: Literal["patches", "convolutions"] = "convolutions"
    """How tokens are made: a linear map of each patch, or a few convolutions, where patches overlap."""
    crop: int | None = None
    """Pixels by which training images are moved at random; default: an eighth; digits: none."""
    flip: bool | None = None
    """Whether training images are mirrored at random; default: all but digits."""
    turn: float = 0.0
    """Degrees by which training images are turned at random."""
    colour: float = 0.0
    """How much brightness, contrast and saturation of training images change, 0 to 1."""
    erase: float = 0.0
    """Share of training images of which a square is hidden."""
    mix: float = 0.0
    """Share of training images that are mixed with another: half blended, half by a rectangle."""

    head = "LangevinForImageClassification"
    reads = "image"
    usual = {"data": "digits"}  # noqa: RUF012

    def __post_init__(self) -> None:
        for name in ("size", "patch"):
            check_count(name, getattr(self, name))
        for name in ("crop", "turn"):
            check_count(name, getattr(self, name), above=None)
        for name in ("colour", "erase", "mix"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name}={getattr(self, name)} must be from 0 to 1")

    def shape(self, config: TrainConfig) -> tuple[int, int]:
        """Pixels of a side of images and of patches."""
        from langevin.data.images import SIZES, USUAL_SIZE

        size = self.size or SIZES.get(config.data, USUAL_SIZE)
        return size, self.patch or max(2, 1 << max(1, size // SIDE).bit_length() - 1)

    def context(self, config: TrainConfig) -> int:
        size, patch = self.shape(config)
        return max(1, size // patch) ** 2

    def input_settings(self, config: TrainConfig) -> dict[str, Any]:
        size, patch = self.shape(config)
        if config.context != self.context(config):
            raise UsageError(
                f"context={config.context}, but images of {size} × {size} pixels in patches of {patch} are "
                f"{self.context(config)} tokens",
                "Leave --context out.",
            )
        return {"image_size": size, "patch_size": patch, "stem": self.stem}

    def prepare(self, config: TrainConfig, progress: bool = False) -> Any:
        self.check(config)
        size = self.input_settings(config)["image_size"]
        from langevin.data import images

        if config.tokenizer is not None:
            raise UsageError("images have no tokenizer", "Leave --tokenizer out.")
        return images.prepare(config.data, size, config.train_tokens, progress)

    def model_settings(self, config: TrainConfig, data: Any) -> dict[str, Any]:
        facts = data.manifest["facts"]
        scale = {"image_mean": facts["mean"], "image_std": facts["deviation"]}
        return {"vocab_size": 1, **scale, **names_of(data.classes)}

    def feed(self, data: Any, config: TrainConfig, device: Any, share: Any) -> Any:
        from langevin.data.augment import Changes, ImageFeed

        plain = config.data == "digits"  # they stand in the middle, and mean nothing in a mirror
        crop = (0 if plain else data.size // SIDE) if self.crop is None else self.crop
        flip = not plain if self.flip is None else self.flip
        changes = Changes(crop, flip, self.turn, self.colour, self.erase, self.mix)
        return ImageFeed(config, data, changes, self.held_out(data, config), device, share)
