"""The gradients of two backward passes are accumulated, and averaged after the second.

python -m paddle.distributed.launch --nproc_per_node 2 paddle_no_sync.py
"""

import paddle
import paddle.nn as nn

import zeroshard.paddle as dist
from zeroshard.paddle import DataParallel


class SimpleNet(nn.Layer):
    def __init__(self):
        super().__init__()
        self._linear = nn.Linear(10, 1)

    def forward(self, x):
        return self._linear(x)


dist.init_parallel_env()
model = SimpleNet()
dp_model = DataParallel(model)

inputs_1 = paddle.randn([10, 10], "float32")
inputs_2 = paddle.ones([10, 10], "float32")

with dp_model.no_sync():
    # gradients will not be synchronized
    dp_model(inputs_1).backward()

# synchronization happens here
dp_model(inputs_2).backward()
# every rank has the same gradients, whatever its data was
print(f"rank {dist.get_rank()}: gradient {float(model._linear.weight.grad.sum()):.6f}")
