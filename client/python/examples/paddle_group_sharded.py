"""A layer whose parameters, gradients and optimizer state live on the shard servers.

python -m paddle.distributed.launch --nproc_per_node 2 paddle_group_sharded.py
"""

import paddle
from paddle.distributed import fleet
from paddle.nn import Linear

from zeroshard.paddle import group_sharded_parallel

fleet.init(is_collective=True)
group = paddle.distributed.new_group([0, 1])
model = Linear(1000, 1000)

clip = paddle.nn.ClipGradByGlobalNorm(clip_norm=1.0)
optimizer = paddle.optimizer.AdamW(
    learning_rate=0.001, parameters=model.parameters(), weight_decay=0.00001, grad_clip=clip
)

# wrap sharding model, optimizer and scaler
scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
model, optimizer, scaler = group_sharded_parallel(
    model, optimizer, "p_g_os", scaler=scaler, group=group, segment_size=2**14
)

img, label = paddle.randn([16, 1000]), paddle.randint(0, 1000, [16])
label.stop_gradient = True
img.stop_gradient = True

for step in range(5):
    out = model(img)
    loss = paddle.nn.functional.cross_entropy(input=out, label=label)

    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    print(f"rank {paddle.distributed.get_rank()}: step {step}, loss {float(loss):.4f}")

# every rank has the same parameters, whatever its data was
print(f"rank {paddle.distributed.get_rank()}: state {optimizer.state_hash()[:16]}")
