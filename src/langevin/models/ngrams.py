"""A bag of n-grams: the linear model that a network for classifying texts has to beat.

    z_c  =  b_c + ( Σ_i u[x_i, c] + Σ_i w[hash(x_i, x_{i+1}), c] ) / √N

over the N tokens and pairs of neighbours of a text x. It has no layers and no mixer, knows no other order,
and starts from zero. Pairs share PAIRS places, or have one each where there are fewer.

B batch, L tokens, V vocabulary, C classes.
"""

import torch
from torch import Tensor, nn

PAIRS = 2**18
SPREAD = 2_654_435_761  # odd: for every first token the second ones have places of their own


class NGrams(nn.Module):
    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, classes)
        self.exact = vocabulary**2 <= PAIRS
        self.pairs = nn.Embedding(min(vocabulary**2, PAIRS), classes)
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, ids_BL: Tensor, real_BL: Tensor) -> Tensor:
        """Logits (B, C) of the tokens that are real."""
        first, second = ids_BL[:, :-1], ids_BL[:, 1:]
        spread = self.embed.num_embeddings if self.exact else SPREAD
        both = real_BL[:, :-1] & real_BL[:, 1:]
        pairs_BLC = self.pairs((first * spread + second) % self.pairs.num_embeddings)
        total = torch.where(real_BL[..., None], self.embed(ids_BL), 0.0).sum(1)
        total = total + torch.where(both[..., None], pairs_BLC, 0.0).sum(1)
        number_B1 = (real_BL.sum(1) + both.sum(1)).clamp_min(1)[:, None]
        return self.bias + total * number_B1.to(total.dtype).rsqrt()
