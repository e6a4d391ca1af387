"""Small models, each with a property that sharding must handle, and data for them.

A model takes a batch from :func:`batch` and returns its loss. ``before_step(step)``, if a model has
it, is called before each step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLASSES = 10
FEATURES = 20
SIDE = 8
VOCABULARY = 32
CONTEXT = 12


class Classifier(nn.Module):
    """Computes the loss of a network's logits."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def logits(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.compute_loss(inputs, targets)

    def compute_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(inputs), targets)


def mlp() -> nn.Module:
    return Classifier(
        nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, CLASSES)
    )


def cnn() -> nn.Module:
    """A network with batch norm, whose buffers change in every forward."""
    return Classifier(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12 * (SIDE // 2) ** 2, CLASSES),
    )


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        # Without a bias: that of the keys has no gradient but noise, which Adam would amplify.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Predicts the next token. The weight of the head is the embedding's."""

    def __init__(self, width: int = 32, layers: int = 2, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(CONTEXT, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        #: None: keep activations; else whether the checkpoints are reentrant.
        self.checkpointing = checkpointing
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions
        for block in self.blocks:
            if self.checkpointing is None or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class LSTM(nn.Module):
    """A module whose parameters are used by a single native call."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            self.head(self.lstm(self.tokens(inputs))[0]).flatten(0, 1), targets.flatten()
        )


class CalledTwice(Classifier):
    """A model that calls the same layer twice."""

    def __init__(self) -> None:
        middle = nn.Linear(32, 32)
        super().__init__(
            nn.Linear(FEATURES, 32),
            nn.Tanh(),
            middle,
            nn.Tanh(),
            middle,
            nn.Tanh(),
            nn.Linear(32, CLASSES),
        )


class Borrowed(Classifier):
    """Uses a layer's weight without calling the layer, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, FEATURES), nn.Tanh())
        self.scale = nn.Parameter(torch.ones(FEATURES, CLASSES))

    def logits(self, inputs: Tensor) -> Tensor:
        hidden = self.layers(inputs)
        return F.linear(F.linear(hidden, self.layers[0].weight), self.layers[2].weight) @ self.scale


class Branches(Classifier):
    """Calls its middle layers in a different order in every step, and sometimes skips one."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
        self.middle = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.order = [0, 1, 2]

    def before_step(self, step: int) -> None:
        self.order = [[0, 1, 2], [2, 0, 1], [1, 0]][step % 3]

    def logits(self, inputs: Tensor) -> Tensor:
        hidden = self.layers[1](self.layers[0](inputs))
        for index in self.order:
            hidden = torch.tanh(self.middle[index](hidden))
        return self.layers[2](hidden)


class Unused(Classifier):
    """A model with a layer that is not used."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
        self.unused = nn.Linear(32, 32)


class Frozen(Classifier):
    """A model whose middle layer is frozen, until a given step or permanently."""

    def __init__(self, until: int | None) -> None:
        super().__init__(
            nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES)
        )
        self.until = until
        self.layers[2].requires_grad_(False)

    def before_step(self, step: int) -> None:
        if step == self.until:
            self.layers[2].requires_grad_(True)


class SeveralForwards(Classifier):
    """A model whose loss is computed from two passes over the layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(inputs, targets) + 0.5 * super().forward(inputs.flip(1), targets)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "gpt": GPT,
    "lstm": LSTM,
    "called twice": CalledTwice,
    "borrowed": Borrowed,
    "branches": Branches,
    "unused": Unused,
    "frozen": lambda: Frozen(None),
    "unfrozen": lambda: Frozen(7),
    "several forwards": SeveralForwards,
    "checkpoint": lambda: GPT(checkpointing=False),
    "reentrant checkpoint": lambda: GPT(checkpointing=True),
}


def build(name: str) -> nn.Module:
    """Builds a model with the same initial parameters every time."""
    torch.manual_seed(7)
    return MODELS[name]()


def batch(name: str, step: int, size: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a step: a learnable function with noise."""
    generator = torch.Generator().manual_seed(step % 16)
    if name in ("gpt", "lstm", "checkpoint", "reentrant checkpoint"):
        start = torch.randint(VOCABULARY, (size, 1), generator=generator)
        stride = torch.randint(1, 4, (size, 1), generator=generator)
        text = (start + stride * torch.arange(CONTEXT + 1)) % VOCABULARY
        return text[:, :-1], text[:, 1:]
    shape = (1, SIDE, SIDE) if name == "cnn" else (FEATURES,)
    inputs = torch.randn(size, *shape, generator=generator)
    return inputs, (inputs.flatten(1)[:, :4] * 3).sum(1).long() % CLASSES


def share(data: tuple[Tensor, Tensor], part: int, parts: int) -> tuple[Tensor, Tensor]:
    """One of several equal parts of a batch."""
    inputs, targets = data
    return inputs.chunk(parts)[part], targets.chunk(parts)[part]
