"""Images with classes: where they come from, how they are split, and what becomes of them in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from langevin.data import images, order
from langevin.data.augment import DRAWN, Changes
from langevin.errors import UsageError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LANGEVIN_DATA", str(tmp_path / "data"))


def draw(path: Path, shade: int, size: tuple[int, int] = (16, 16), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(shade).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def folder(path: Path, below: str = "", each: int = 12) -> Path:
    for c, name in enumerate(("cat", "dog")):
        for i in range(each):
            draw(path / below / name / f"{i}.png", 1000 * c + i + len(below) * 10_000)
    return path


def test_digits_are_built_in_and_split_class_by_class() -> None:
    found = images.prepare("digits", 8)
    sizes = {split: facts["images"] for split, facts in found.manifest["splits"].items()}
    assert sizes == {"train": 1444, "valid": 176, "test": 177}
    assert found.classes == [str(i) for i in range(10)]
    assert np.bincount(found.labels("valid")).min() == 17
    train = found.images("train").astype(float)
    assert found.manifest["facts"]["mean"][0] == pytest.approx(train.mean(), abs=1e-3)
    assert found.manifest["facts"]["deviation"][0] == pytest.approx(train.std(), abs=1e-3)
    apart = [{x.tobytes() for x in found.images(split)} for split in sizes]
    assert len(set.union(*apart)) == sum(sizes.values())


def test_a_broken_file_is_left_out_and_told_and_other_sizes_are_scaled(tmp_path: Path) -> None:
    path = folder(tmp_path / "pets")
    draw(path / "cat" / "wide.jpg", 5000, (40, 20))
    draw(path / "dog" / "grey.png", 5001, (9, 30), "L")
    whole = (path / "cat" / "0.png").read_bytes()
    (path / "dog" / "broken.png").write_bytes(whole[: len(whole) // 2])
    (path / "dog" / "notes.txt").write_text("no image")
    Image.fromarray(np.full((16, 16), 30_000, np.uint16)).save(path / "dog" / "deep.png")  # 16 bits of grey
    for _ in range(2):  # it is told also where the images are kept from the first time
        with pytest.warns() as told:
            found = images.prepare(str(path), 16)
        said = " ".join(str(warning.message) for warning in told)
        assert "2 images that cannot be read: dog/broken.png, dog/deep.png" in said
        assert "images of 3 sizes, 9 × 30 to 40 × 20, are scaled to 16 × 16" in said
    assert sum(facts["images"] for facts in found.manifest["splits"].values()) == 26
    assert found.images("train").shape[1:] == (3, 16, 16)
    names = found.texts("test") + found.texts("valid")
    assert all((path / name).is_file() for name in names)


def test_folders_say_what_is_train_and_test_and_no_image_is_in_both(tmp_path: Path) -> None:
    path = folder(folder(tmp_path / "pets", "train", 20), "val", 3)
    (path / "val" / "dog" / "again.png").write_bytes((path / "train" / "dog" / "7.png").read_bytes())
    with pytest.warns(match="1 train rows that also stand in valid or test"):
        found = images.prepare(str(path), 16)
    sizes = {split: facts["images"] for split, facts in found.manifest["splits"].items()}
    assert sizes == {"train": 35, "valid": 7, "test": 4}  # test is cut from train where there is none
    assert found.classes == ["cat", "dog"]


def test_the_official_files_of_cifar_10_and_what_the_hub_has_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert images.CIFAR_ROWS == 10_000
    monkeypatch.setattr(images, "CIFAR_ROWS", 30)
    with pytest.raises(UsageError, match=r"cifar-10 is not here: looked for .*test_batch\.bin"):
        images.prepare("cifar-10", 32)
    place = tmp_path / "data" / "cifar-10" / "cifar-10-batches-bin"
    place.mkdir(parents=True)
    draws, written = np.random.default_rng(0), b""
    for name in (*images.CIFAR_FILES["train"], *images.CIFAR_FILES["test"]):
        rows = draws.integers(0, 256, (30, 1 + 3072), np.uint8)
        rows[:, 0] = np.arange(30) % 10
        rows.tofile(place / name)
        written += rows.tobytes()
    found = images.prepare("cifar-10", 32)
    sizes = {split: facts["images"] for split, facts in found.manifest["splits"].items()}
    assert sizes == {"train": 140, "valid": 10, "test": 30}
    assert found.images("test").tobytes() == rows[:, 1:].tobytes()
    assert [found.classes[i] for i in found.labels("test")[:3]] == ["airplane", "automobile", "bird"]
    assert images.prepare("cifar-10", 16).images("test").shape == (30, 3, 16, 16)
    image = Image.fromarray(rows[2, 1:].reshape(3, 32, 32).transpose(1, 2, 0))
    assert images.CIFAR_HUB.written({"img": image, "label": 2}) == rows[2].tobytes()
    train = [place / name for name in images.CIFAR_FILES["train"]]
    short = train[4].read_bytes()[:-3073]  # a row less
    for path, content in ((place / "test_batch.bin", b"torn"), (train[4], short)):
        whole = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(UsageError, match=rf"not whole: .*{path.name} must have 92,190 bytes"):
            images.prepare("cifar-10", 32)
        path.write_bytes(whole)
    for path in train[1:]:
        path.unlink()
    with pytest.raises(UsageError, match=r"data_batch_2\.bin must have 92,190 bytes"):  # the first is whole
        images.prepare("cifar-10", 32)
    train[0].write_bytes(written[: 149 * 3073])
    with pytest.raises(UsageError, match=r"data_batch_1\.bin must have 460,950 bytes"):
        images.prepare("cifar-10", 32)
    train[0].write_bytes(written[: 150 * 3073])
    again = images.prepare("cifar-10", 32)
    assert {x.tobytes() for x in again.images("train")} == {x.tobytes() for x in found.images("train")}


@pytest.mark.parametrize("what", ["nowhere", "flat", "unreadable"])
def test_what_cannot_be_learned_from_is_refused_in_a_line(tmp_path: Path, what: str) -> None:
    path = tmp_path / "pets"
    if what == "flat":
        draw(path / "0.png", 0)
    elif what == "unreadable":
        (path / "cat").mkdir(parents=True)
        (path / "cat" / "0.png").write_bytes(b"")
    said = {"nowhere": "unknown images", "flat": "has no folders with images", "unreadable": "can be read"}
    with pytest.raises(UsageError, match=said[what]):
        images.prepare(str(path), 16)


def changed(changes: Changes, side: int = 12, rows: int = 64) -> tuple[Any, Any, Any]:
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (rows, 3, side, side), np.uint8))
    u = torch.from_numpy(order.uniforms(rows, DRAWN, 0, 7))
    return x.float(), *changes(x, u)


def test_an_image_is_moved_by_whole_pixels_and_mirrored() -> None:
    x, same, share = changed(Changes())
    assert torch.equal(same, x)
    assert (share == 1).all()
    x, y, _ = changed(Changes(crop=2, flip=True))
    wide = torch.nn.functional.pad(torch.cat([x, x.flip(-1)]), (2, 2, 2, 2), mode="reflect")
    wide[..., :2, :], wide[..., -2:, :] = wide[..., 2:4, :].flip(-2), wide[..., -4:-2, :].flip(-2)
    wide[..., :2], wide[..., -2:] = wide[..., 2:4].flip(-1), wide[..., -4:-2].flip(-1)
    seen = set()
    for i, image in enumerate(y):
        moves = [
            (mirrored, r, c)
            for mirrored in (0, 1)
            for r in range(5)
            for c in range(5)
            if torch.allclose(image, wide[i + 64 * mirrored, :, r : r + 12, c : c + 12], atol=0.01)
        ]
        assert len(moves) == 1
        seen |= set(moves)
    assert len(seen) > 30


def test_mixed_images_say_how_much_they_have_of_each() -> None:
    x, y, share = changed(Changes(mix=1.0))
    other = x[torch.arange(64) ^ 1]
    assert 0.4 < float(share.mean()) < 0.8
    mask = ((y - other) / torch.where(x == other, 1.0, x - other)).masked_fill(x == other, torch.nan)
    assert torch.allclose(mask.nanmean((1, 2, 3)), share, atol=0.03)
    blended = (mask.nan_to_num(0.5) - 0.5).abs() < 0.499
    assert 10 < int((blended.flatten(1).float().mean(1) > 0.5).sum()) < 54  # the others have a rectangle


def test_colours_change_and_squares_are_hidden_within_bounds() -> None:
    x, y, _ = changed(Changes(colour=0.5))
    assert y.min() >= 0
    assert y.max() <= 255
    assert (y - x).abs().mean() > 5
    x, y, _ = changed(Changes(erase=1.0))
    hidden = (y != x).any(1).flatten(1).float().mean(1)
    assert 0 < hidden.mean() < 0.25
    assert hidden.max() <= 0.3
