"""Data parallelism: every rank has the whole model, and the shard servers average the gradients."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from .._core.arguments import check_class, warn_of_single_process, warn_of_strategy
from .._core.reducer import Reducer, average_now
from .._core.weak_calls import weakly
from .._rendezvous import ProcessGroup as Ranks
from ..errors import InvalidArgumentError
from ._assign import refuse_assign
from ._foreign import check_not_wrapped, check_not_wrapped_later
from ._framework import TORCH, process_group
from ._materialize import check_has_values
from ._private import tree_leaves
from ._transforms import is_tracing
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

    #: Averages the gradients; None in a copy until one of its backward passes is averaged.
    _made: Reducer[torch.Tensor] | None
    #: ``True`` if forward passes request averaging, in a copy that has no reducer yet.
    _syncing: bool
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
        check_class("module", module, nn.Module, "torch.nn.Module")
        warn_of_strategy(strategy)
        check_not_wrapped(module, "DataParallel")
        check_has_values(module, "DataParallel")
        ranks = process_group(group)
        warn_of_single_process(ranks)
        super().__init__(module)
        options: dict[str, Any] = {
            "comm_buffer_size": comm_buffer_size,
            "last_comm_buffer_size": last_comm_buffer_size,
            "find_unused_parameters": find_unused_parameters,
        }
        self._keep(_options=options, _ranks=ranks, _syncing=True)
        self._keep(_made=Reducer(TORCH, module, ranks, **options))
        refuse_assign(module)

    @property
    def _reducer(self) -> Reducer[torch.Tensor]:
        if self._made is None:
            ranks = self._ranks or process_group(None)
            made = Reducer(TORCH, self.module, ranks, **self._options, broadcast=False)
            self._keep(_made=made)
        assert self._made is not None
        return self._made

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        check_not_wrapped_later(self.module)
        if not torch.is_grad_enabled() or is_tracing():
            return self.module(*inputs, **kwargs)
        if self._made is None:
            return self._first_forward(inputs, kwargs)
        averaging = self._made.begin_forward()
        self._made.hidden = averaging
        outputs = self.module(*inputs, **kwargs)
        # A hook on the outputs marks the start of the outermost backward pass: the inner pass of a
        # reentrant checkpoint ends earlier.
        if _at_backward(outputs, weakly(self._made, Reducer.begin_backward, averaging)):
            self._made.hidden = None
        return outputs

    def _first_forward(self, inputs: Any, kwargs: Any) -> Any:
        """The forward pass of a copy that has no reducer. Only a backward pass makes one, in which
        all ranks take part: one rank may evaluate a copy alone."""
        averaging = self._syncing
        outputs = self.module(*inputs, **kwargs)
        if averaging and not _at_backward(outputs, weakly(self, DataParallel._begin_first)):
            if any(parameter.requires_grad for parameter in self.module.parameters()):
                self._reducer.hidden = self._reducer.begin_forward()
        return outputs

    def _begin_first(self, *_: Any) -> None:
        self._reducer.begin_backward(True)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context whose forward passes have backward passes that accumulate gradients on each
        rank, without averaging them.

        The accumulated gradients are part of the next averaging.
        """
        before = self._syncing
        self._keep(_syncing=False)
        try:
            with contextlib.nullcontext() if self._made is None else self._made.accumulating():
                yield
        finally:
            self._keep(_syncing=before)

    @property
    def find_unused_parameters(self) -> bool:
        """Returns whether a parameter may have no gradient on some of the ranks."""
        return bool(self._options["find_unused_parameters"])

    @find_unused_parameters.setter
    def find_unused_parameters(self, may: bool) -> None:
        self._options["find_unused_parameters"] = may
        if self._made is not None:
            self._made.find_unused_parameters = may

    @property
    def buckets(self) -> list[list[int]]:
        """The parameters of each bucket, as indices of the trained parameters."""
        return self._reducer.new_buckets().buckets

    # ---- state

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """A copy averages its own gradients, with the same ranks. As with
        DistributedDataParallel, each rank keeps the values of its own copy, and may evaluate it
        alone."""
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
    made._keep(_options=dict(options), _ranks=ranks, _made=None, _syncing=True)
    return made


def _at_backward(outputs: Any, begin: Callable[..., None]) -> bool:
    """Calls ``begin`` when a backward pass reaches outputs of a module. Returns False if no output
    is known that has one."""
    found = [
        output
        for output in tree_leaves(outputs)
        if isinstance(output, torch.Tensor) and output.grad_fn is not None
    ]
    for output in found:
        output.register_hook(begin)
    return bool(found)


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
