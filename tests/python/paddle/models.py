"""Small models, each with a property that sharding must handle, and data for them.

A model takes a batch from :func:`batch` and returns its loss. ``before_step(step)``, if a model has
it, is called before each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed.fleet.utils import recompute

CLASSES = 10
FEATURES = 20
SIDE = 8
VOCABULARY = 32
CONTEXT = 12


class Classifier(nn.Layer):
    """Computes the loss of a network's logits."""

    def __init__(self, *layers: nn.Layer) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def logits(self, inputs: Any) -> Any:
        return self.layers(inputs)

    def forward(self, inputs: Any, targets: Any) -> Any:
        return F.cross_entropy(self.logits(inputs), targets)


def mlp() -> nn.Layer:
    return Classifier(
        nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, CLASSES)
    )


def cnn() -> nn.Layer:
    """A network with batch norm, whose buffers change in every forward."""
    return Classifier(
        nn.Conv2D(1, 6, 3, padding=1, bias_attr=False),
        nn.BatchNorm2D(6),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Conv2D(6, 12, 3, padding=1, bias_attr=False),
        nn.BatchNorm2D(12),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12 * (SIDE // 2) ** 2, CLASSES),
    )


class Block(nn.Layer):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        # Without a bias: that of the keys has no gradient but noise, which Adam would amplify.
        self.qkv = nn.Linear(width, 3 * width, bias_attr=False)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Any) -> Any:
        batch, time, width = x.shape
        q, k, v = (
            self.qkv(self.norm(x))
            .reshape([batch, time, 3, self.heads, -1])
            .transpose([2, 0, 3, 1, 4])
        )
        scores = paddle.matmul(q, k, transpose_y=True) / (width // self.heads) ** 0.5
        future = paddle.triu(paddle.full([time, time], -1e9), 1)
        attended = paddle.matmul(F.softmax(scores + future), v)
        x = x + self.out(attended.transpose([0, 2, 1, 3]).reshape([batch, time, width]))
        return x + self.mlp(x)


class GPT(nn.Layer):
    """Predicts the next token. The weight of the head is the embedding's."""

    def __init__(self, width: int = 32, layers: int = 2, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width, weight_attr=nn.initializer.Normal(std=0.1))
        self.positions = self.create_parameter(
            [CONTEXT, width], default_initializer=nn.initializer.Normal(std=0.1)
        )
        self.blocks = nn.LayerList([Block(width, 4) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        #: None: keep activations; else whether the checkpoints are reentrant.
        self.checkpointing = checkpointing

    def forward(self, inputs: Any, targets: Any) -> Any:
        x = self.tokens(inputs) + self.positions
        for block in self.blocks:
            if self.checkpointing is None or not paddle.is_grad_enabled():
                x = block(x)
            else:
                x = recompute(block, x, use_reentrant=self.checkpointing)
        logits = paddle.matmul(self.norm(x), self.tokens.weight, transpose_y=True)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LSTM(nn.Layer):
    """A layer whose parameters are used by a single native call."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, inputs: Any, targets: Any) -> Any:
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
        self.scale = self.create_parameter(
            [FEATURES, CLASSES], default_initializer=nn.initializer.Constant(1.0)
        )

    def logits(self, inputs: Any) -> Any:
        hidden = self.layers(inputs)
        return F.linear(F.linear(hidden, self.layers[0].weight), self.layers[2].weight) @ self.scale


class Transposed(nn.Layer):
    """Multiplies by the transposed weight of another layer, which is an attribute of this layer, or
    in its ``extra_parameters``, as Paddle's own stage 3 requires."""

    def __init__(self, weight: Any, extra: bool) -> None:
        super().__init__()
        if extra:
            self.extra_parameters = [weight]
        else:
            self.weight = weight

    def forward(self, x: Any) -> Any:
        (weight,) = getattr(self, "extra_parameters", None) or self.parameters()
        return paddle.matmul(x, weight, transpose_y=weight.shape[1] == x.shape[1])


class Tied(Classifier):
    """Three layers with the same weight."""

    def __init__(self) -> None:
        first = nn.Linear(FEATURES, 32)
        super().__init__(
            first,
            nn.Tanh(),
            Transposed(first.weight, extra=False),
            nn.Tanh(),
            Transposed(first.weight, extra=True),
            nn.Tanh(),
            nn.Linear(32, CLASSES),
        )


class Branches(Classifier):
    """Calls its middle layers in a different order in every step, and sometimes skips one."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
        self.middle = nn.LayerList([nn.Linear(32, 32) for _ in range(3)])
        self.order = [0, 1, 2]

    def before_step(self, step: int) -> None:
        self.order = [[0, 1, 2], [2, 0, 1], [1, 0]][step % 3]

    def logits(self, inputs: Any) -> Any:
        hidden = self.layers[0](inputs)
        for number in self.order:
            hidden = F.tanh(self.middle[number](hidden))
        return self.layers[2](hidden)


class Frozen(Classifier):
    """A model whose middle layer is frozen, until a given step or permanently."""

    def __init__(self, unfrozen_at: int | None) -> None:
        super().__init__(
            nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES)
        )
        self.unfrozen_at = unfrozen_at
        for parameter in self.layers[2].parameters():
            parameter.stop_gradient = True

    def before_step(self, step: int) -> None:
        if step == self.unfrozen_at:
            for parameter in self.layers[2].parameters():
                parameter.stop_gradient = False


MODELS: dict[str, Callable[[], nn.Layer]] = {
    "mlp": mlp,
    "cnn": cnn,
    "gpt": GPT,
    "lstm": LSTM,
    "called twice": CalledTwice,
    "borrowed": Borrowed,
    "tied": Tied,
    "branches": Branches,
    "frozen": lambda: Frozen(None),
    "unfrozen": lambda: Frozen(7),
    "checkpoint": lambda: GPT(checkpointing=False),
    "reentrant checkpoint": lambda: GPT(checkpointing=True),
}


def build(name: str) -> nn.Layer:
    """Builds a model with the same initial parameters every time."""
    paddle.seed(7)
    return MODELS[name]()


def batch(name: str, step: int, size: int) -> tuple[Any, Any]:
    """The inputs and targets of a step: a learnable function with noise."""
    generator = np.random.RandomState(step % 16)
    if name in ("gpt", "lstm", "checkpoint", "reentrant checkpoint"):
        start = generator.randint(0, VOCABULARY, (size, 1))
        stride = generator.randint(1, 4, (size, 1))
        text = (start + stride * np.arange(CONTEXT + 1)) % VOCABULARY
        return paddle.to_tensor(text[:, :-1]), paddle.to_tensor(text[:, 1:])
    shape = (1, SIDE, SIDE) if name == "cnn" else (FEATURES,)
    inputs = generator.randn(size, *shape).astype(np.float32)
    targets = (inputs.reshape(size, -1)[:, :4] * 3).sum(1).astype(np.int64) % CLASSES
    return paddle.to_tensor(inputs), paddle.to_tensor(targets)


def broadcast(data: tuple[Any, Any], part: int, parts: int) -> tuple[Any, Any]:
    """One of equal parts of a batch."""
    inputs, targets = data
    return inputs.chunk(parts)[part], targets.chunk(parts)[part]
