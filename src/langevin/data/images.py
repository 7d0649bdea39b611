"""Images with a class each: cifar-10, the built-in digits, and folders with a folder for each class.

An image is three channels of bytes, scaled to a square. Splits are made as those of labelled texts: what
is missing is cut from train, class by class, and no image stands in two of them.

CACHE/images/NAME-SIZE-KEY/          KEY is a hash of all that the images depend on
    train.bin valid.bin test.bin     images of 3 · SIZE · SIZE bytes
    train.labels ...                 the class of each (int32)
    valid.json test.json             their names, to show mistakes
    manifest.json

`digits` are the 1,797 test images of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak,
1998; doi 10.24432/C50P49; the UCI Machine Learning Repository states CC BY 4.0), 8 × 8 with 17 greys.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from langevin.data import labelled, order
from langevin.data.examples import Labelled
from langevin.data.hub import HubTexts, cache_root, data_root, fetched
from langevin.data.local import SPLIT_NAMES
from langevin.data.shards import kept, seal
from langevin.data.sources import fingerprint
from langevin.data.texts import SPLITS
from langevin.errors import UsageError, one_line, unknown
from langevin.runs.files import sha256

FORMAT = 1
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff")
USUAL_SIZE = 64
TOLD = 3  # names of files that cannot be read
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

Read = Iterator[
    tuple[str, str, np.ndarray | None]
]  # a name, a label, and (3, H, W) bytes if it can be read


@dataclass(frozen=True)
class Images:
    """A set that was found: `read` gives the images of each split ("" is cut), scaled to a size, and adds
    to `notes` what one should know of them."""

    name: str
    identity: dict[str, Any]
    read: Callable[[int], dict[str, Read]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class HubImages(HubTexts):
    """Rows as a byte for the class and the bytes of the image, as in the official files of cifar-10."""

    def written(self, row: Mapping[str, Any]) -> bytes:
        pixels = np.asarray(row["img"].convert("RGB"), np.uint8)
        return bytes([row["label"]]) + pixels.transpose(2, 0, 1).tobytes()


CIFAR_FILES = {
    "train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    "test": ("test_batch.bin",),
}
CIFAR_ROWS, CIFAR_BYTES = 10_000, 1 + 3 * 32 * 32  # of each file, of each row
CIFAR_HUB = HubImages("uoft-cs/cifar10", {"data_batch_1.bin": ("train",), "test_batch.bin": ("test",)})
ABOUT = {
    "digits": "handwritten digits, 1,797 of 8 × 8 pixels",
    "cifar-10": "60,000 photographs of ten kinds of things, 32 × 32 pixels",
}
SIZES = {"digits": 8, "cifar-10": 32}  # of named sets


def find(name: str) -> Images:
    """The set of this name, or the folder; a UsageError says what is missing."""
    if name == "digits":
        content = files("langevin.data").joinpath("digits.xz").read_bytes()
        return Images(name, {"sha256": hashlib.sha256(content).hexdigest()}, partial(_digits, content))
    if name == "cifar-10":
        groups = _cifar_files()
        every = [path for some in groups.values() for path in some]
        identity = {"files": {path.name: fingerprint(path) for path in every}}
        return Images(name, identity, partial(_cifar, groups))
    path = Path(name).expanduser()
    if not name or not os.path.isdir(path):
        raise unknown("images", name, ABOUT, "Or a folder with a folder of images for each class.")
    path = path.resolve()
    names = sorted(
        at.relative_to(path).as_posix()
        for at in path.rglob("*")
        if at.suffix.lower() in SUFFIXES and at.is_file()
    )
    if not any("/" in name for name in names):
        raise UsageError(
            f"{path} has no folders with images", "Put the images of each class into a folder of its name."
        )
    identity = {"files": {name: fingerprint(path / name) for name in names}}
    notes: list[str] = []
    return Images(path.name, identity, partial(_folder, path, names, notes), notes)


def cifar_folder() -> Path | None:
    """The folder of the official files on this machine."""
    roots = [root / "cifar-10" for root in (data_root(), cache_root() / "sources") if root is not None]
    places = [place for root in roots for place in (root / "cifar-10-batches-bin", root)]
    return next((place for place in places if (place / "test_batch.bin").is_file()), None)


def _cifar_files() -> dict[str, list[Path]]:
    wanted = "cifar-10/cifar-10-batches-bin/test_batch.bin"
    folder = cifar_folder() or fetched("cifar-10", CIFAR_HUB, wanted)
    first, *others = (folder / file for file in CIFAR_FILES["train"])
    a_fifth = first.is_file() and first.stat().st_size == CIFAR_ROWS * CIFAR_BYTES
    official = a_fifth or any(path.is_file() for path in others)
    groups = {}
    for split, some in CIFAR_FILES.items():  # the Hub has one file of each split
        groups[split] = [folder / file for file in (some if official else some[:1])]
        rows = CIFAR_ROWS * len(some) // len(groups[split])
        for path in groups[split]:
            if not path.is_file() or path.stat().st_size != rows * CIFAR_BYTES:
                raise UsageError(
                    f"cifar-10 is not whole: {path} must have {rows * CIFAR_BYTES:,} bytes",
                    "Put it there, or fetch it again.",
                )
    return groups


def _cifar(groups: dict[str, list[Path]], size: int) -> dict[str, Read]:
    def rows(split: str) -> Read:
        for path in groups[split]:
            for i, row in enumerate(np.fromfile(path, np.uint8).reshape(-1, CIFAR_BYTES)):
                yield f"{path.stem} {i}", OBJECTS[row[0]], _scaled(row[1:].reshape(3, 32, 32), size)

    return {split: rows(split) for split in groups}


def _digits(content: bytes, size: int) -> dict[str, Read]:
    pixels, labels = np.split(np.frombuffer(lzma.decompress(content), np.uint8), [1797 * 64])
    greys = np.minimum(pixels.reshape(-1, 1, 8, 8) * np.uint16(16), 255).astype(np.uint8).repeat(3, 1)
    rows = ((f"digit {i}", str(labels[i]), _scaled(image, size)) for i, image in enumerate(greys))
    return {"": rows}


def _scaled(image: np.ndarray, size: int) -> np.ndarray:
    from PIL import Image

    if image.shape[-1] == size:
        return image
    return _bytes(Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))), size)


def _bytes(image: Any, size: int) -> np.ndarray:
    from PIL import Image

    if image.mode.startswith(("I", "F")):  # convert would cut them off at 255
        raise ValueError(f"its pixels are not bytes (mode {image.mode})")
    square = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(square, np.uint8).transpose(2, 0, 1))


def read_image(path: Path, size: int) -> tuple[np.ndarray, tuple[int, int]]:
    """(3, size, size) bytes of a file, and its width and height; a UsageError says why there are none."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            return _bytes(ImageOps.exif_transpose(image), size), image.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(
            f"{path} cannot be read as an image: {one_line(error)}", "Mend it, or leave it out."
        ) from error


def _folder(path: Path, names: list[str], notes: list[str], size: int) -> dict[str, Read]:
    """Images of train, valid and test where the folders say so; else all of them, to be cut."""
    tops = {name.partition("/")[0] for name in names if "/" in name}
    splits = {top: SPLIT_NAMES[top.lower()] for top in tops if top.lower() in SPLIT_NAMES}
    if "train" not in splits.values() or len(splits) < 2:
        splits = {}
    if len(splits) > len(set(splits.values())):
        raise UsageError(f"{path} has two names for one split: {', '.join(splits)}", "Keep one of them.")
    if others := sorted(tops - set(splits)) if splits else []:
        notes.append(f"{path.name} is split by its folders: {', '.join(others[:TOLD])} left out")
    sizes: Counter[tuple[int, int]] = Counter()

    def rows(below: str) -> Read:
        for name in names:
            if not name.startswith(below) or "/" not in name[len(below) :]:
                continue
            try:
                image, shape = read_image(path / name, size)
                sizes[shape] += 1
            except UsageError:
                image = None
            yield name, name[len(below) :].partition("/")[0], image

    def told() -> Read:
        if len(sizes) > 1:
            ends = " to ".join(f"{w} × {h}" for w, h in (min(sizes), max(sizes)))
            notes.append(f"images of {len(sizes)} sizes, {ends}, are scaled to {size} × {size}")
        yield from ()

    groups = {split: rows(f"{top}/") for top, split in splits.items()} or {"": rows("")}
    last = list(groups)[-1]
    return {**groups, last: chain(groups[last], told())}


def prepare(name: str, size: int, first: int | None = None, progress: bool = True) -> LabelledImages:
    """Read and scale images into `$LANGEVIN_CACHE`, or open what was made before.

    name: digits, cifar-10, or a folder. first: how many of the training images to take. progress: warn of
    what was left out.
    """
    source = find(name)
    recipe = {"format": FORMAT, "source": {"name": source.name, **source.identity}, "size": size}
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_root() / "images" / f"{source.name}-{size}-{key}"
    kept(folder, lambda place: _build(place, source, size, recipe), source.name)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    found = LabelledImages(folder, manifest, first)
    if progress:
        found.tell()
    return found


def _build(folder: Path, source: Images, size: int, recipe: dict[str, Any]) -> None:
    rows: dict[str, labelled.Rows] = {}
    found: dict[str, tuple[str, np.ndarray]] = {}  # by a hash of the image: the same one is one
    broken = []
    for split, some in source.read(size).items():
        rows[split] = []
        for name, label, image in some:
            if image is None:
                broken.append(name)
                continue
            key = hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest()
            found.setdefault(key, (name, image))
            rows[split].append((key, label))
    told = ", ".join(broken[:TOLD]) + (" ..." if broken[TOLD:] else "")
    if not found:
        raise UsageError(f"no image of {source.name} can be read", f"The first are {told}.")
    gone = Counter({f"images that cannot be read: {told}": len(broken)})
    splits, facts = labelled.apart(rows, source.name, gone)
    number = {label: i for i, label in enumerate(facts["classes"])}
    for split, chosen in splits.items():
        with open(folder / f"{split}.bin", "wb") as file:
            file.writelines(found[key][1].tobytes() for key, _ in chosen)
        np.array([number[label] for _, label in chosen], "<i4").tofile(folder / f"{split}.labels")
        if split != "train":
            (folder / f"{split}.json").write_text(json.dumps([found[key][0] for key, _ in chosen]))
    train = np.fromfile(folder / "train.bin", np.uint8).reshape(-1, 3, size * size)
    counts = np.stack([np.bincount(train[:, c].ravel(), minlength=256) for c in range(3)])
    share, level = counts / counts.sum(1, keepdims=True), np.arange(256)
    mean = share @ level
    deviation = np.sqrt(((level - mean[:, None]) ** 2 * share).sum(1))
    facts |= {"notes": source.notes, "mean": mean.round(4).tolist()}
    facts["deviation"] = deviation.clip(1.0).round(4).tolist()
    sums = {
        split: {
            "images": len(splits[split]),
            "sha256": sha256(folder / f"{split}.bin"),
            "labels_sha256": sha256(folder / f"{split}.labels"),
        }
        for split in SPLITS
    }
    seal(folder, {**recipe, "facts": facts, "splits": sums})


class LabelledImages(Labelled):
    """Prepared images with classes."""

    @property
    def size(self) -> int:
        return int(self.manifest["size"])

    @cached_property
    def tokenizer(self) -> Any:
        """What makes other images into such, for transformers."""
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        square = {"height": self.size, "width": self.size}
        return ViTImageProcessorPil(size=square, do_convert_rgb=True, do_rescale=False, do_normalize=False)

    def images(self, split: str) -> np.ndarray:
        """(N, 3, size, size) bytes, as they stand in the file."""
        return np.memmap(self.folder / f"{split}.bin", np.uint8, "r").reshape(-1, 3, self.size, self.size)

    def examples(self, step: int, *, seed: int, batch: int) -> np.ndarray:
        """The training images of a step, a pure function of (seed, step)."""
        return self.train[order.examples(len(self.train), step, seed=seed, batch=batch)]

    def rows(self, split: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"pixel_values": self.images(split)[rows], "labels": self.labels(split)[rows]}

    def in_batches(self, split: str, rows: np.ndarray, batch: int) -> Iterator[np.ndarray]:
        yield from np.array_split(rows, range(batch, len(rows), batch))
