"""Data parallelism: every rank has the whole model, and the shard servers average the gradients."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import paddle
from paddle.distributed.fleet import HybridCommunicateGroup

from .._core.arguments import check_class, warn_of_single_process, warn_of_strategy
from .._core.reducer import Reducer, average_now
from .._core.weak_calls import weakly
from ..errors import InvalidArgumentError
from . import _autograd
from ._framework import PADDLE, process_group
from ._wrapper import LayerWrapper


class DataParallel(LayerWrapper, paddle.DataParallel):
    """Averages the gradients of a layer over the ranks after each backward pass.

    The gradients of a bucket are sent as soon as they are ready, while the backward pass continues.
    When the pass ends, ``p.grad`` contains the mean. The optimizer is the user's own and runs in
    this process, so the program saves its state and the parameters itself;
    :class:`~zeroshard.Checkpoints` are for ``group_sharded_parallel``. Buckets contain parameters
    of one dtype in forward order, have ``comm_buffer_size``, and are sent in reverse order.

    At construction all ranks receive the parameters and buffers of rank 0. Afterwards parameters
    stay equal as long as all ranks perform the same steps. Buffers are not synchronised again.

    A backward pass is averaged unless its forward pass ran under :meth:`no_sync`. A parameter that
    is frozen or unfrozen later is noticed at the next forward pass. Sparse gradients become dense.

    Args:
        layers: the model. Its attributes are read and written on the wrapper.
        strategy: deprecated, has no effect.
        comm_buffer_size: the size of a bucket in MB.
        last_comm_buffer_size: the size in MB of the first bucket of each dtype, which is sent last.
        find_unused_parameters: whether a parameter may have no gradient on some of the ranks. Such
            a rank contributes zeros to the mean and receives it. By default this is an error. A
            parameter without a gradient on any rank is left without one in both cases.
        group: the ranks to average over; all ranks by default.

    Raises:
        InvalidArgumentError: no parameter requires a gradient, a parameter is neither float32 nor
            bfloat16 nor float16, or a size is negative.
        DisagreementError: the parameters of the ranks differ in names, shapes or dtypes.
    """

    def __init__(
        self,
        layers: Any,
        strategy: object = None,
        comm_buffer_size: float = 25,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: Any | None = None,
    ) -> None:
        # Not Paddle's class, which would broadcast and register hooks of its own.
        paddle.nn.Layer.__init__(
            self,
            layers.full_name() + "_data_parallel" if isinstance(layers, paddle.nn.Layer) else None,
        )
        check_class("layers", layers, paddle.nn.Layer, "paddle.nn.Layer")
        warn_of_strategy(strategy)
        ranks = process_group(group)
        warn_of_single_process(ranks)
        # Paddle's name of this attribute.
        self._layers = layers
        self.__dict__["_reducer"] = Reducer(
            PADDLE,
            layers,
            ranks,
            comm_buffer_size=comm_buffer_size,
            last_comm_buffer_size=last_comm_buffer_size,
            find_unused_parameters=find_unused_parameters,
        )

    def _get_reducer(self) -> Reducer[Any]:
        reducer: Reducer[Any] = self.__dict__["_reducer"]
        return reducer

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The layer's forward pass."""
        if not paddle.is_grad_enabled():
            return self._layers(*inputs, **kwargs)
        reducer = self._get_reducer()
        averaging = reducer.begin_forward()
        reducer.hidden = averaging
        outputs = self._layers(*inputs, **kwargs)
        if paddle.is_grad_enabled():
            # A hook on the outputs marks the start of the outermost backward pass: the inner pass
            # of a recomputed block ends earlier.
            begin = _autograd.guarded(weakly(reducer, Reducer.begin_backward, averaging))
            for output in paddle.utils.flatten(outputs):
                if (
                    isinstance(output, paddle.Tensor)
                    and not output.stop_gradient
                    and not output.is_leaf
                ):
                    output.register_hook(begin)
                    reducer.hidden = None
        return outputs

    def no_sync(self) -> AbstractContextManager[None]:
        """A context whose forward passes have backward passes that accumulate gradients on each
        rank, without averaging them.

        The accumulated gradients are part of the next averaging.
        """
        return self._get_reducer().accumulating()

    @property
    def find_unused_parameters(self) -> bool:
        """Returns whether a parameter may have no gradient on some of the ranks."""
        return self._get_reducer().find_unused_parameters

    @find_unused_parameters.setter
    def find_unused_parameters(self, may: bool) -> None:
        self._get_reducer().find_unused_parameters = may

    @property
    def buckets(self) -> list[list[int]]:
        """The parameters of each bucket, as indices of the trained parameters."""
        return self._get_reducer().new_buckets().buckets

    # ---- state

    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss. Paddle's class has this method for compatibility."""
        return loss

    def set_state_dict(self, state_dict: Any, use_structured_name: bool = True) -> None:
        """Loads the matching keys, and warns of the others.

        Args:
            state_dict: parameters and buffers.
            use_structured_name: whether tensors are matched by their name in the layer, or by their
                own.
        """
        self._layers.set_state_dict(state_dict, use_structured_name)

    set_dict = load_dict = set_state_dict

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's."""
        return self._layers.load_state_dict(*args, **kwargs)


def fused_allreduce_gradients(parameter_list: Any | Iterable[Any], hcg: Any | None = None) -> None:
    """Replaces the gradient of each parameter with its mean over the ranks, immediately.

    For gradients that were accumulated under ``no_sync()``, or whose layer is not wrapped. A rank
    without a gradient contributes zeros; a parameter without a gradient on any rank is left without
    one. Frozen parameters are skipped. Every rank must call this with the same parameters. The
    first call with a list of parameters creates a job, which later calls reuse.

    Args:
        parameter_list: one parameter or several, of float32, bfloat16 or float16.
        hcg: the ranks to average over, as a group or as the data-parallel group of a
            ``HybridCommunicateGroup``; all ranks by default.
    """
    found = [parameter_list] if isinstance(parameter_list, paddle.Tensor) else parameter_list
    if isinstance(hcg, HybridCommunicateGroup):
        if hcg.get_sep_parallel_world_size() > 1:
            raise InvalidArgumentError(
                f"hcg has {hcg.get_sep_parallel_world_size()} ranks of sep parallelism, over which "
                "Paddle adds gradients; the servers compute means; pass a group"
            )
        hcg = hcg.get_data_parallel_group()
    average_now(PADDLE, found, process_group(hcg))
