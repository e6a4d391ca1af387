"""Groups of one rank, and arguments of other types than Paddle documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed
import pytest
import zeroshard as zs
from paddle import nn
from paddle.distributed import fleet
from zeroshard.paddle import DataParallel, fused_allreduce_gradients, group_sharded_parallel

import ranks
from training import LEVELS


def made(level: str = "os", **options: Any) -> tuple[Any, Any, Any]:
    """The layer, the model and the optimizer."""
    paddle.seed(1)
    layer = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    options = {"segment_size": 16, **options}
    return layer, *group_sharded_parallel(layer, optimizer, level, **options)[:2]


def trained(rank: int, **options: Any) -> list[float]:
    _, model, optimizer = made(**options)
    for step in range(2):
        model(paddle.full([2, 8], 1.0 + rank + step)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return [float(value.numpy().sum()) for value in model.state_dict().values()]


def train_in_groups(rank: int) -> dict[str, list[float]]:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 2, "sharding_degree": 1}
    fleet.init(is_collective=True, strategy=strategy)
    hcg = fleet.get_hybrid_communicate_group()
    alone, replicas = hcg.get_sharding_parallel_group(), hcg.get_data_parallel_group()
    groups = [paddle.distributed.new_group([0]), paddle.distributed.new_group([1])]
    with pytest.raises(zs.InvalidArgumentError, match="make the call on the ranks of the group"):
        made(group=groups[1 - rank])
    with pytest.raises(zs.InvalidArgumentError, match="pass all ranks as group, since"):
        made(dp_group=replicas)
    return {
        "alone": trained(rank, group=groups[rank]),
        "fleet's": trained(rank, group=alone),
        "all": trained(rank),
        "all, one replica": trained(rank, dp_group=alone),
        "all as replicas": trained(rank, group=alone, dp_group=replicas),
    }


def test_groups_of_one_rank_train_alone_or_as_replicas(processes: dict[str, str]) -> None:
    first, second = ranks.run(2, train_in_groups, env=processes)
    for found in (first, second):
        assert found["alone"] == found["fleet's"]
        assert found["all"] == found["all, one replica"] == found["all as replicas"]
    assert first["all"] == second["all"]
    assert first["alone"] != second["alone"]
    assert not np.allclose(first["all"], first["alone"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": 3}, "group is 3; it must be a group"),
        ({"dp_group": 3}, "dp_group is 3; it must be a group"),
        ({"offload": "yes"}, "offload is 'yes'; it must be True or False"),
        ({"state_dtype": "bf16"}, "state_dtype is 'bf16'; it must be one of 'f32', 'int8'"),
        ({"sync_buffers": "x"}, "sync_buffers is 'x'; it must be True or False"),
        ({"sync_comm": 3}, "sync_comm is 3; it must be True or False"),
        ({"accumulation_steps": "2"}, "accumulation_steps is '2'; it must be a whole number"),
        ({"exclude_layer": "Linear"}, "exclude_layer is 'Linear'; it must be a list"),
        ({"exclude_layer": 3}, "exclude_layer is 3; it must be a list"),
    ],
    ids=str,
)
def test_an_argument_of_group_sharded_parallel_of_another_type_is_refused(
    cluster: zs.Session, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(zs.InvalidArgumentError, match=message):
        made(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": 3}, "group is 3; it must be a group"),
        ({"comm_buffer_size": "x"}, "comm_buffer_size is 'x'; it must be a non-negative number"),
        ({"last_comm_buffer_size": None}, "last_comm_buffer_size is None; it must be a non-neg"),
        ({"find_unused_parameters": "x"}, "find_unused_parameters is 'x'; it must be True or"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:DataParallel has no effect")
def test_an_argument_of_data_parallel_of_another_type_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(zs.InvalidArgumentError, match=message):
        DataParallel(nn.Linear(2, 2), **options)


def test_the_example_of_data_parallel_in_paddle_finds_fused_allreduce_gradients() -> None:
    import zeroshard.paddle.distributed
    from paddle.distributed.fleet.utils import hybrid_parallel_util as theirs
    from zeroshard.paddle.distributed.fleet.utils.hybrid_parallel_util import (
        fused_allreduce_gradients as under_distributed,
    )
    from zeroshard.paddle.fleet.utils import hybrid_parallel_util as ours

    assert ours.fused_allreduce_gradients is fused_allreduce_gradients
    assert under_distributed is fused_allreduce_gradients
    assert ours.broadcast_dp_parameters is theirs.broadcast_dp_parameters
    utils = zeroshard.paddle.distributed.fleet.utils
    assert utils.hybrid_parallel_util is ours
    assert utils.recompute is fleet.utils.recompute
    for module in (utils, ours):
        assert not hasattr(module, "no_such_name")


@pytest.mark.filterwarnings("ignore")
def test_a_sharded_layer_is_saved_by_jit_or_refused(cluster: zs.Session, tmp_path: Path) -> None:
    inputs = [paddle.static.InputSpec([None, 8], "float32")]
    for level in LEVELS:
        layer, _, _ = made(level)
        if level == "p_g_os":
            for saved in (layer, nn.Sequential(layer)):
                with pytest.raises(zs.InvalidArgumentError, match="load its state_dict"):
                    paddle.jit.save(saved, str(tmp_path / "model"), inputs)
            continue
        path = str(tmp_path / level)
        paddle.jit.save(layer, path, inputs)
        x = paddle.ones([2, 8])
        np.testing.assert_allclose(paddle.jit.load(path)(x).numpy(), layer(x).numpy(), rtol=1e-5)
