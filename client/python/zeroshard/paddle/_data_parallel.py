"""Data parallelism: every rank has the whole model, and the shard servers average the gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import paddle

from .._core.rounds import Rounds, average_now, weakly
from ..errors import InvalidArgumentError
from . import _autograd
from ._framework import PADDLE, group_place


class DataParallel(paddle.nn.Layer):
    """A layer whose gradients, after each backward pass, are their mean over the ranks.

    The gradients of a bucket are sent as soon as they are ready, while the backward pass goes on;
    when the pass is over, so are the means in ``p.grad``. The optimizer is the user's own. Buckets
    are made in forward order, of one dtype each, and close once they have ``comm_buffer_size``;
    they are sent in reverse.

    After construction parameters and buffers are those of rank 0. What follows is up to the ranks:
    as long as they do the same, parameters stay equal. Buffers are not synchronised again.

    Which backward passes synchronise is said by their forward passes: see :meth:`no_sync`. A
    parameter that is unfrozen or frozen later is noticed at the next forward pass. Sparse gradients
    become dense.

    Args:
        layers: the model. Other attributes of it are attributes of this one too.
        strategy: deprecated, and without effect.
        comm_buffer_size: size of a bucket, in MB.
        last_comm_buffer_size: size of the first bucket of each dtype, in MB: the last one that is
            sent.
        find_unused_parameters: whether a backward pass may leave parameters without a gradient on
            some ranks and not on others. They get the average then, to which such a rank
            contributes zeros. Without it that is an error. A parameter that no rank uses stays as
            it is either way.
        group: the ranks to average over; all by default.

    Raises:
        InvalidArgumentError: no parameter is to be trained, one is neither float32 nor bfloat16 nor
            float16, or a size is negative.
        JobExistsError: the ranks' models differ in their parameters' names, shapes or dtypes.
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
        super().__init__(
            layers.full_name() + "_data_parallel" if isinstance(layers, paddle.nn.Layer) else None
        )
        if not isinstance(layers, paddle.nn.Layer):
            raise InvalidArgumentError(
                f"layers is a {type(layers).__name__}: it must be a paddle.nn.Layer"
            )
        if strategy is not None:
            warnings.warn("strategy has no effect, and will go", DeprecationWarning, stacklevel=2)
        place = group_place(group)
        if place[1] == 1:
            warnings.warn(
                "one process: there are no gradients to average", UserWarning, stacklevel=2
            )
        # Paddle's name for it.
        self._layers = layers
        self.__dict__["_rounds"] = Rounds(
            PADDLE,
            layers,
            place,
            comm_buffer_size=comm_buffer_size,
            last_comm_buffer_size=last_comm_buffer_size,
            find_unused_parameters=find_unused_parameters,
        )

    def _averaging(self) -> Rounds[Any]:
        rounds: Rounds[Any] = self.__dict__["_rounds"]
        return rounds

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The layer's forward pass."""
        rounds = self._averaging()
        if paddle.is_grad_enabled():
            rounds.begin_forward()
        outputs = self._layers(*inputs, **kwargs)
        if rounds.armed and paddle.is_grad_enabled():
            # The outermost backward pass begins here; that of a recomputed block would end too
            # early.
            begin = _autograd.guarded(weakly(rounds, Rounds.begin_round))
            for output in paddle.utils.flatten(outputs):
                if (
                    isinstance(output, paddle.Tensor)
                    and not output.stop_gradient
                    and not output.is_leaf
                ):
                    output.register_hook(begin)
        return outputs

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes of forward passes in this context only accumulate, on each rank by
        itself.

        What has accumulated is part of the next synchronisation.
        """
        return self._averaging().accumulating()

    @property
    def find_unused_parameters(self) -> bool:
        """Whether a backward pass may leave parameters without a gradient on some ranks and not on
        others."""
        return self._averaging().find_unused_parameters

    @find_unused_parameters.setter
    def find_unused_parameters(self, may: bool) -> None:
        self._averaging().find_unused_parameters = may

    @property
    def buckets(self) -> list[list[int]]:
        """The parameters of each bucket, by their positions among those that are trained."""
        return self._averaging().new_buckets().buckets

    # State

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            layers = self.__dict__.get("_sub_layers", {})
            if "_layers" not in layers:
                raise
            return getattr(layers["_layers"], name)

    def scale_loss(self, loss: Any) -> Any:
        """The loss: Paddle's own has this method from a time in which it did something."""
        return loss

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's state: its keys have no prefix, and fit the layer as well."""
        return self._layers.state_dict(*args, **kwargs)

    def set_state_dict(self, state_dict: Any, use_structured_name: bool = True) -> Any:
        """Loads what fits, and warns of what does not; the keys that are missing, and those that
        are not known.

        Args:
            state_dict: parameters and buffers.
            use_structured_name: whether they are found by their names in the layer; else by their
                own.
        """
        return self._layers.set_state_dict(state_dict, use_structured_name)

    load_dict = set_state_dict


def fused_allreduce_gradients(parameters: Any | Iterable[Any], group: Any | None = None) -> None:
    """Makes each parameter's gradient its mean over the ranks, now.

    For gradients that were accumulated under ``no_sync()``, or by a layer that is not wrapped. A
    rank without a gradient counts as zeros, unless no rank has one. Frozen parameters do not take
    part. Every rank calls this with the same parameters; the first call with them makes a job,
    which the later ones use again.

    Args:
        parameters: one parameter or several, of float32, bfloat16 or float16.
        group: the ranks to average over; all by default. (Paddle calls this one ``hcg``.)
    """
    found = [parameters] if isinstance(parameters, paddle.Tensor) else parameters
    average_now(PADDLE, found, group_place(group))
