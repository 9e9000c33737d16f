"""The course's models in PyTorch, with the parameter names that examples/course gives them."""

import math

import torch

POSITIONS, HEAD_WIDTH = 16, 64


class Mlp(torch.nn.Module):
    def __init__(self, dim, hidden, depth):
        super().__init__()
        layers = [torch.nn.Linear(dim, hidden), torch.nn.ReLU()]
        for _ in range(depth):
            layers += [torch.nn.Linear(hidden, hidden), torch.nn.ReLU()]
        layers.append(torch.nn.Linear(hidden, dim))
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


class CausalSelfAttention(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x):
        def by_head(part):
            return part.unflatten(2, (self.heads, width // self.heads)).transpose(1, 2)

        positions, width = x.shape[1:]
        query, key, value = (by_head(part) for part in self.qkv(x).split(width, dim=2))
        scores = query @ key.transpose(2, 3) / math.sqrt(width // self.heads)
        seen = torch.tril(torch.ones(positions, positions, dtype=torch.bool))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width)
        self.norm2 = torch.nn.LayerNorm(width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(),
                                       torch.nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(torch.nn.Module):
    def __init__(self, dim, hidden, depth):
        super().__init__()
        self.positions = torch.nn.Parameter(0.02 * torch.randn(POSITIONS, hidden))
        self.input = torch.nn.Linear(dim // POSITIONS, hidden)
        self.blocks = torch.nn.ModuleList(Block(hidden) for _ in range(depth))
        self.norm = torch.nn.LayerNorm(hidden)
        self.output = torch.nn.Linear(hidden, dim // POSITIONS)

    def forward(self, x):
        stream = self.input(x.unflatten(1, (POSITIONS, -1))) + self.positions
        for block in self.blocks:
            stream = block(stream)
        return self.output(self.norm(stream)).flatten(1)


MODELS = {"mlp": Mlp, "transformer": Transformer}
