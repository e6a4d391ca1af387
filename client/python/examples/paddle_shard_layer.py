"""A network with a matrix that is sharded over two processes.

python -m paddle.distributed.launch --nproc_per_node 2 paddle_shard_layer.py
"""

import paddle

import zeroshard.paddle as dist

mesh = dist.ProcessMesh([0, 1], dim_names=["x"])


class MLP(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.fc1 = paddle.nn.Linear(8, 8)
        self.fc2 = paddle.nn.Linear(8, 8)

    def forward(self, input):
        return self.fc2(self.fc1(input))


def shard_fn(layer_name, layer, process_mesh):
    if layer_name == "fc1":
        layer.weight = dist.shard_tensor(layer.weight, process_mesh, [dist.Shard(0)])


layer = MLP()
layer = dist.shard_layer(layer, mesh, shard_fn)
print(layer)
print(
    f"rank {dist.get_rank()}: fc1.weight {layer.fc1.weight.placements}, "
    f"here {layer.fc1.weight._local_shape}"
)
print(f"rank {dist.get_rank()}: fc2.weight {layer.fc2.weight.placements}")
