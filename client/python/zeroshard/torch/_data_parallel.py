"""Data parallelism: every rank has the whole model, and the shard servers average the gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from .._core.rounds import Rounds, average_now, weakly
from ..errors import InvalidArgumentError
from ._framework import TORCH, group_place


class DataParallel(nn.Module):
    """A module whose gradients, after each backward pass, are their mean over the ranks.

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
        module: the model. Other attributes of it are attributes of this one too.
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
        module: nn.Module,
        strategy: object = None,
        comm_buffer_size: float = 25,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise InvalidArgumentError(
                f"module is a {type(module).__name__}: it must be a torch.nn.Module"
            )
        if strategy is not None:
            warnings.warn("strategy has no effect, and will go", DeprecationWarning, stacklevel=2)
        place = group_place(group)
        if place[1] == 1:
            warnings.warn(
                "one process: there are no gradients to average", UserWarning, stacklevel=2
            )
        self.module = module
        self._rounds = Rounds(
            TORCH,
            module,
            place,
            comm_buffer_size=comm_buffer_size,
            last_comm_buffer_size=last_comm_buffer_size,
            find_unused_parameters=find_unused_parameters,
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        if torch.is_grad_enabled():
            self._rounds.begin_forward()
        outputs = self.module(*inputs, **kwargs)
        if self._rounds.armed and torch.is_grad_enabled():
            # The outermost backward pass begins here; that of a reentrant checkpoint would end too
            # early.
            begin = weakly(self._rounds, Rounds.begin_round)
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                    output.register_hook(begin)
        return outputs

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes of forward passes in this context only accumulate, on each rank by
        itself.

        What has accumulated is part of the next synchronisation.
        """
        return self._rounds.accumulating()

    @property
    def find_unused_parameters(self) -> bool:
        """Whether a backward pass may leave parameters without a gradient on some ranks and not on
        others."""
        return self._rounds.find_unused_parameters

    @find_unused_parameters.setter
    def find_unused_parameters(self, may: bool) -> None:
        self._rounds.find_unused_parameters = may

    @property
    def buckets(self) -> list[list[int]]:
        """The parameters of each bucket, by their positions among those that are trained."""
        return self._rounds.new_buckets().buckets

    # State

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state: its keys have no prefix, and fit the module as well."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads what :meth:`state_dict`, here or of the module, gave."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def set_state_dict(
        self, state_dict: Mapping[str, Any], use_structured_name: bool = True
    ) -> Any:
        """Loads what fits, and warns of what is missing or not known.

        Args:
            state_dict: parameters and buffers.
            use_structured_name: whether they are found by name. Otherwise names do not matter
                (torch's tensors have none of their own): the first is taken for the first, and so
                on.

        Returns:
            ``missing_keys`` and ``unexpected_keys``.

        Raises:
            InvalidArgumentError: without names, if there are more or fewer tensors than the module
                has.
        """
        if not use_structured_name:
            names = list(self.module.state_dict())
            if len(names) != len(state_dict):
                raise InvalidArgumentError(
                    f"state_dict has {len(state_dict)} entries: by position there must be {len(names)}"
                )
            state_dict = dict(zip(names, state_dict.values()))
        found = self.module.load_state_dict(state_dict, strict=False)
        for what, keys in (
            ("lacks", found.missing_keys),
            ("has what the module has not:", found.unexpected_keys),
        ):
            if keys:
                warnings.warn(f"state_dict {what} {', '.join(keys)}", UserWarning, stacklevel=2)
        return found

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Where this module is a part of another, whose load_state_dict goes by the names of
        # modules.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def fused_allreduce_gradients(
    parameters: torch.Tensor | Iterable[torch.Tensor], group: ProcessGroup | None = None
) -> None:
    """Makes each parameter's gradient its mean over the ranks, now.

    For gradients that were accumulated under ``no_sync()``, or by a module that is not wrapped. A
    rank without a gradient counts as zeros, unless no rank has one. Frozen parameters do not take
    part. Every rank calls this with the same parameters; the first call with them makes a job,
    which the later ones use again.

    Args:
        parameters: one parameter or several, of float32, bfloat16 or float16.
        group: the ranks to average over; all by default.
    """
    found = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    average_now(TORCH, found, group_place(group))
