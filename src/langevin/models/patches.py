"""Images as tokens: one for each patch, row by row, with its absolute position, and perhaps a class token.

    patches         x_rc  =  W · pixels of patch (r, c) + b
    convolutions    3 × 3, one at full size and one for each halving, GELU between them: patches overlap

B batch, H and W height and width of images, L patches.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import initialization as init

from langevin.models.attention import planar
from langevin.models.config import LangevinConfig


class Convolution(nn.Conv2d):
    """Pixels of unit variance become tokens of about that."""

    def start(self) -> None:
        init.normal_(self.weight, mean=0.0, std=math.sqrt(1 / self.weight[0].numel()))
        init.zeros_(self.bias)


class Patches(nn.Module):
    def __init__(self, config: LangevinConfig) -> None:
        super().__init__()
        self.config = config
        width, patch, grid = config.hidden_size, config.patch_size, config.grid
        assert grid is not None
        layers: list[nn.Module] = [Convolution(3, width, patch, patch)]
        if config.stem == "convolutions":
            halvings = int(math.log2(patch))
            widths = [width >> (halvings - i) for i in range(halvings + 1)]
            layers = [Convolution(3, widths[0], 3, padding=1)]
            for narrow, wide in pairwise(widths):
                layers += [nn.GELU(), Convolution(narrow, wide, 3, 2, padding=1)]
        self.stem = nn.Sequential(*layers)
        learned = config.positions == "learned"
        self.places = nn.Embedding(grid[0] * grid[1], width) if learned else None
        self.token = nn.Parameter(torch.zeros(width)) if config.pooling == "class" else None

    @property
    def products(self) -> int:
        """Of weights and pixels, for one image."""
        side, found = self.config.image_size, 0
        for layer in self.stem:
            if isinstance(layer, Convolution):
                side //= layer.stride[0]
                found += layer.weight.numel() * side * side
        return found

    def forward(self, pixels_B3HW: Tensor) -> Tensor:
        """Tokens (B, L, width), or (B, L + 1, width) with a class token behind them; pixels are bytes, or
        numbers from 0 to 255."""
        config, dtype = self.config, next(self.parameters()).dtype
        channels = zip(pixels_B3HW.to(dtype).unbind(1), config.image_mean, config.image_std, strict=True)
        x_BCHW = self.stem(torch.stack([(x - mean) / std for x, mean, std in channels], 1))
        x_BLC = x_BCHW.flatten(2).mT.to(dtype)  # as embeddings are, whatever autocast makes of the stem
        if self.places is not None:
            x_BLC = x_BLC + self.places.weight
        elif config.positions == "sinusoidal":
            place, width = torch.arange(x_BLC.shape[1], device=x_BLC.device), x_BLC.shape[2]
            code = torch.cat(planar(place, config.grid or (1, 1), width + -width % 4, dtype), -1)
            x_BLC = x_BLC + code[:, :width].to(x_BLC.dtype)
        if self.token is None:
            return x_BLC
        return torch.cat([x_BLC, self.token.to(x_BLC.dtype).expand(len(x_BLC), 1, -1)], 1)
