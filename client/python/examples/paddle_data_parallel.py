"""A linear network on two processes whose gradients are averaged by the shard servers.

python paddle_data_parallel.py
"""

import paddle
import paddle.nn as nn
import paddle.optimizer as opt

import zeroshard.paddle as dist
from zeroshard.paddle import DataParallel


class LinearNet(nn.Layer):
    def __init__(self):
        super().__init__()
        self._linear1 = nn.Linear(10, 10)
        self._linear2 = nn.Linear(10, 1)

    def forward(self, x):
        return self._linear2(self._linear1(x))


def train():
    # 1. initialize parallel environment
    dist.init_parallel_env()

    # 2. create data parallel layer & optimizer
    layer = LinearNet()
    dp_layer = DataParallel(layer)

    loss_fn = nn.MSELoss()
    adam = opt.Adam(learning_rate=0.001, parameters=dp_layer.parameters())

    # 3. run layer
    inputs = paddle.randn([10, 10], "float32")
    outputs = dp_layer(inputs)
    labels = paddle.randn([10, 1], "float32")
    loss = loss_fn(outputs, labels)
    loss.backward()

    adam.step()
    adam.clear_grad()
    # every rank has the same parameters, whatever its data was
    print(
        f"rank {dist.get_rank()}: loss {float(loss):.4f}, "
        f"weights {float(layer._linear1.weight.sum()):.6f}"
    )


if __name__ == "__main__":
    # 1. start by ``spawn``
    dist.spawn(train, nprocs=2)
    # 2. start by ``python -m paddle.distributed.launch``
    # train()
