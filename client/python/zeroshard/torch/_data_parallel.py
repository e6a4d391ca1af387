"""Data parallelism: every rank has the whole model, and the shard servers average the gradients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from .._core.reducer import Reducer, average_now, weakly
from .._rendezvous import ProcessGroup as Ranks
from ..errors import InvalidArgumentError
from ._assign import refuse_assign
from ._foreign import check_not_wrapped, check_not_wrapped_later
from ._framework import TORCH, process_group
from ._materialize import check_has_values
from ._wrapper import ModuleWrapper


class DataParallel(ModuleWrapper):
    """Averages the gradients of a module over the ranks after each backward pass.

    The gradients of a bucket are sent as soon as they are ready, while the backward pass continues.
    When the pass ends, ``p.grad`` contains the mean. The optimizer is the user's own and runs in
    this process, so the program saves its state and the parameters itself;
    :class:`~zeroshard.Checkpoints` are for ``group_sharded_parallel``. Buckets contain parameters
    of one dtype in forward order, have ``comm_buffer_size``, and are sent in reverse order.

    At construction all ranks receive the parameters and buffers of rank 0. Afterwards parameters
    stay equal as long as all ranks perform the same steps. Buffers are not synchronised again.

    A backward pass is averaged unless its forward pass ran under :meth:`no_sync`. The forward pass
    may also be one of the module, or another method of it; then it is averaged unless the backward
    pass runs under :meth:`no_sync`. A parameter that is frozen or unfrozen later is noticed at the
    next forward pass of the wrapper. Sparse gradients become dense.

    Args:
        module: the model. Its attributes are available on the wrapper.
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

    #: Averages the gradients; None in a copy until it is trained.
    _made: Reducer[torch.Tensor] | None
    _options: dict[str, Any]
    #: None: all ranks of the process that uses a copy.
    _ranks: Ranks | None

    def __init__(
        self,
        module: nn.Module,
        strategy: object = None,
        comm_buffer_size: float = 25,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: ProcessGroup | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InvalidArgumentError(
                f"module is a {type(module).__name__}; it must be a torch.nn.Module"
            )
        if strategy is not None:
            warnings.warn(
                "strategy has no effect and will be removed", DeprecationWarning, stacklevel=2
            )
        check_not_wrapped(module, "DataParallel")
        check_has_values(module, "DataParallel")
        ranks = process_group(group)
        if ranks.size == 1:
            warnings.warn(
                "DataParallel has no effect in a single process", UserWarning, stacklevel=2
            )
        super().__init__(module)
        options: dict[str, Any] = {
            "comm_buffer_size": comm_buffer_size,
            "last_comm_buffer_size": last_comm_buffer_size,
            "find_unused_parameters": find_unused_parameters,
        }
        self._keep(_options=options, _ranks=ranks)
        self._keep(_made=Reducer(TORCH, module, ranks, **options))
        refuse_assign(module)

    @property
    def _reducer(self) -> Reducer[torch.Tensor]:
        if self._made is None:
            ranks = self._ranks or process_group(None)
            self._keep(_made=Reducer(TORCH, self.module, ranks, **self._options))
        assert self._made is not None
        return self._made

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        check_not_wrapped_later(self.module)
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        averaging = self._reducer.begin_forward()
        self._reducer.hidden = averaging
        outputs = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            # A hook on the outputs marks the start of the outermost backward pass: the inner pass
            # of a reentrant checkpoint ends earlier.
            begin = weakly(self._reducer, Reducer.begin_backward, averaging)
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                    output.register_hook(begin)
                    self._reducer.hidden = None
        return outputs

    def no_sync(self) -> AbstractContextManager[None]:
        """A context whose forward passes have backward passes that accumulate gradients on each
        rank, without averaging them.

        The accumulated gradients are part of the next averaging.
        """
        return self._reducer.accumulating()

    @property
    def find_unused_parameters(self) -> bool:
        """Whether a parameter may have no gradient on some of the ranks."""
        return self._reducer.find_unused_parameters

    @find_unused_parameters.setter
    def find_unused_parameters(self, may: bool) -> None:
        self._reducer.find_unused_parameters = self._options["find_unused_parameters"] = may

    @property
    def buckets(self) -> list[list[int]]:
        """The parameters of each bucket, as indices of the trained parameters."""
        return self._reducer.new_buckets().buckets

    # ---- state

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """A copy averages its own gradients, with the same ranks. Its first training forward is
        one of all ranks, which take the values of rank 0."""
        return _copied(copy.deepcopy(self.module, memo), self._options, self._ranks)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As :meth:`__deepcopy__`, with all ranks of the program that reads it."""
        return _copied, (self.module, self._options, None)

    def set_state_dict(
        self, state_dict: Mapping[str, Any], use_structured_name: bool = True
    ) -> Any:
        """Loads the matching keys, and warns of missing and unexpected keys.

        Args:
            state_dict: parameters and buffers.
            use_structured_name: whether tensors are matched by name. If False they are matched by
                position, since torch's tensors have no names of their own.

        Returns:
            ``missing_keys`` and ``unexpected_keys``.

        Raises:
            InvalidArgumentError: ``use_structured_name`` is False and the number of tensors
                differs.
        """
        if not use_structured_name:
            names = list(self.module.state_dict())
            if len(names) != len(state_dict):
                raise InvalidArgumentError(
                    f"state_dict has {len(state_dict)} entries; with use_structured_name=False it "
                    f"must have as many as the module, {len(names)}"
                )
            state_dict = dict(zip(names, state_dict.values()))
        found = self.module.load_state_dict(state_dict, strict=False)
        for what, keys in (
            ("missing", found.missing_keys),
            ("unexpected", found.unexpected_keys),
        ):
            if keys:
                warnings.warn(
                    f"{what} keys in state_dict: {', '.join(keys)}", UserWarning, stacklevel=2
                )
        return found


def _copied(module: nn.Module, options: dict[str, Any], ranks: Ranks | None) -> DataParallel:
    made = DataParallel.__new__(DataParallel)
    ModuleWrapper.__init__(made, module)
    made._keep(_options=dict(options), _ranks=ranks, _made=None)
    return made


def fused_allreduce_gradients(
    parameters: torch.Tensor | Iterable[torch.Tensor], group: ProcessGroup | None = None
) -> None:
    """Replaces the gradient of each parameter with its mean over the ranks, immediately.

    For gradients that were accumulated under ``no_sync()``, or whose module is not wrapped. A rank
    without a gradient contributes zeros; a parameter without a gradient on any rank is left without
    one. Frozen parameters are skipped. Every rank must call this with the same parameters. The
    first call with a list of parameters creates a job, which later calls reuse.

    Args:
        parameters: one parameter or several, of float32, bfloat16 or float16.
        group: the ranks to average over; all ranks by default.
    """
    found = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    average_now(TORCH, found, process_group(group))
