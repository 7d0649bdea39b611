"""Models that read images: any mixer over a grid of patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageClassification

from langevin.errors import UsageError
from langevin.kernels.view import View
from langevin.mixers import build
from langevin.models.attention import apply_rotary, planar
from langevin.models.config import LangevinConfig
from langevin.models.cost import flops_of
from langevin.models.heads import LangevinForImageClassification
from langevin.models.patches import Patches
from langevin.training.optim import groups

MIXERS = (
    "softmax",
    "ssmax",
    "heat(t='head')",
    "sigmoid",
    "sima",
    "neighbor(kind='content', corners=True, mean=True)",
)


def config(**changes: Any) -> LangevinConfig:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "causal": False}
    small |= {"image_size": 8, "patch_size": 2, "max_position_embeddings": 16, "num_labels": 3}
    return LangevinConfig(**{**small, "vocab_size": 1, **changes})


@pytest.mark.parametrize("mixer", MIXERS)
def test_any_mixer_reads_images_and_is_found_again(mixer: str, tmp_path: Path) -> None:
    x = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    for changes in ({}, {"stem": "convolutions", "positions": "sinusoidal"}, {"pooling": "attention"}):
        model = LangevinForImageClassification(config(mixer=mixer, **changes)).eval()
        logits = model(x).logits
        assert logits.shape == (3, 3)
        assert torch.allclose(model(x.float()).logits, logits)
        assert torch.allclose(model(x[1:2]).logits, logits[1:2], atol=1e-5)
    model.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert type(again) is LangevinForImageClassification
    assert torch.equal(again(x).logits, model(x).logits)


def test_a_class_token_stands_behind_the_patches_and_says_the_class() -> None:
    model = LangevinForImageClassification(config(pooling="class", positions="learned")).eval()
    x = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    out = model(x, output_hidden_states=True, output_attentions=True)
    assert out.attentions[0].shape == (2, 2, 17, 17)
    assert torch.allclose(model.score(out.hidden_states[-1][:, -1]), out.logits, atol=1e-6)


def test_a_patch_is_a_linear_map_of_its_pixels() -> None:
    patches = Patches(config(image_mean=[10.0, 20.0, 30.0], image_std=[2.0, 4.0, 8.0], positions="none"))
    x = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8)
    scaled = (x - torch.tensor([10.0, 20, 30])[:, None, None]) / torch.tensor([2.0, 4, 8])[:, None, None]
    (map_,) = patches.stem
    own = scaled[0, :, 2:4, 6:8].flatten() @ map_.weight.flatten(1).T + map_.bias
    assert torch.allclose(patches(x)[0, 4 + 3], own, atol=1e-4)  # second row, fourth column


def test_rope_tells_rows_and_columns_apart_and_only_their_differences_count() -> None:
    q, k = torch.randn(2, 8, dtype=torch.double)

    def score(one: tuple[int, int], other: tuple[int, int]) -> float:
        a, b = (
            apply_rotary(x, *planar(torch.tensor([r * 5 + c]), (4, 5), 8, torch.double))
            for x, (r, c) in ((q[None], one), (k[None], other))
        )
        return float((a * b).sum())

    assert score((0, 0), (1, 3)) == pytest.approx(score((2, 1), (3, 4)), abs=1e-12)
    assert score((0, 0), (1, 3)) != pytest.approx(score((0, 0), (3, 1)), abs=1e-3)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "linear", "content"])
def test_neighbours_spread_over_the_grid_and_never_around_its_edges(kind: str, corners: bool) -> None:
    spec = f"neighbor(iters=2, kind='{kind}', corners={corners})"
    mixer: Any = build(spec, width=8, heads=2, causal=False, grid=(4, 5)).mixer.double()
    x = torch.randn(1, 20, 8, dtype=torch.double)
    view = View.of(20, 20, causal=False)
    for place in (0, 7, 19):
        moved = x.clone()
        moved[:, place] += 1
        heard = (mixer(moved, view)[0] != mixer(x, view)[0]).any(-1)[0]
        away = [(abs(i // 5 - place // 5), abs(i % 5 - place % 5)) for i in range(20)]
        if kind == "content":  # all distances at once, each along a line
            assert heard.tolist() == [max(a) <= 2 and (0 in a or (corners and a[0] == a[1])) for a in away]
        else:
            assert heard.tolist() == [(max(a) if corners else sum(a)) <= 2 for a in away]


def test_linear_neighbours_are_diffusion_on_a_lattice() -> None:
    place: Any = {"width": 4, "heads": 2, "causal": False, "grid": (3, 3)}
    mixer: Any = build("neighbor(iters=1, kind='linear')", **place).mixer
    x = torch.randn(1, 9, 4)
    h, tap = x.view(3, 3, 4), mixer.steps[0].tap
    padded = torch.nn.functional.pad(h, (0, 0, 1, 1, 1, 1))
    around = [padded[:-2, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:], padded[2:, 1:-1]]
    expected = 0.5 * h + 0.5 * sum(tap(part) for part in around)
    assert torch.allclose(mixer(x, View.of(9, 9, causal=False))[0].view(3, 3, 4), expected, atol=1e-6)


@pytest.mark.parametrize("mixer", ["neighbor(kind='linear')", "neighbor", "neighbor(kind='content')"])
@pytest.mark.parametrize("stem", ["convolutions", "patches"])
def test_flops_are_those_that_torch_counts(mixer: str, stem: str) -> None:
    model = LangevinForImageClassification(
        config(mixer=mixer, stem=stem, patch_size=4, num_labels=2)
    ).eval()
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 8, 8))
    tokens = 4
    assert flops_of(model, tokens) / 3 * tokens == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_muon_leaves_the_stem_alone() -> None:
    model = LangevinForImageClassification(config(stem="convolutions", patch_size=4))
    assert all(p.ndim == 2 for p in groups(model)["matrices"])
    assert sum(p.ndim == 4 for p in groups(model)["embeddings"]) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"causal": True}, "seen from all sides"),
        ({"pooling": "ngrams"}, "reads texts"),
        ({"patch_size": 3}, "do not fill images of 8 × 8"),
        ({"patch_size": 1, "stem": "convolutions"}, "convolutions make patches of 2, 4, 8"),
        ({"positions": "alibi"}, "along a line"),
        ({"mixer": "heat(t=0.2, alpha=1.0)"}, "along a line"),
        ({"mixer": "neighbor", "pooling": "class"}, "a class token has none"),
        ({"image_size": 0, "pooling": "class"}, "a class token is for images"),
        ({"hidden_size": 12}, "4 divides"),
    ],
)
def test_what_makes_no_sense_of_images_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        config(**changes)


def test_images_of_another_size_and_corners_of_texts_are_refused() -> None:
    model = LangevinForImageClassification(config())
    with pytest.raises(UsageError, match=r"expected \(batch, 3, 8, 8\)"):
        model(torch.zeros(1, 3, 9, 9))
    with pytest.raises(UsageError, match="tokens of a text have no corners"):
        build("neighbor(corners=True)", width=8, heads=2)
    with pytest.raises(UsageError, match="reads along a line"):
        LangevinForImageClassification(config(mixer="neighbor(kind='recurrent')"))
