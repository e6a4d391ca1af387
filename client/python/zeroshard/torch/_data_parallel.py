"""Data parallelism: every rank has the whole model, and the shard servers average the gradients."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from .. import _native
from .._session import current
from ..errors import InvalidArgument, UnusedParameter
from ._average import Averages, Named, Place
from ._tensors import dtype_name, group_place

MB = 1 << 20


class DataParallel(nn.Module):
    """A module whose gradients, after each backward pass, are their mean over the ranks.

    The gradients of a bucket are sent as soon as they are ready, while the backward pass goes on; when the
    pass is over, so are the means in ``p.grad``. The optimizer is the user's own. Buckets are made in forward
    order, of one dtype each, and close once they have ``comm_buffer_size``; they are sent in reverse.

    After construction parameters and buffers are those of rank 0. What follows is up to the ranks: as long as
    they do the same, parameters stay equal. Buffers are not synchronised again.

    Which backward passes synchronise is said by their forward passes: see :meth:`no_sync`. A parameter that
    is unfrozen or frozen later is noticed at the next forward pass. Sparse gradients become dense.

    Args:
        module: the model. Other attributes of it are attributes of this one too.
        strategy: deprecated, and without effect.
        comm_buffer_size: size of a bucket, in MB.
        last_comm_buffer_size: size of the first bucket of each dtype, in MB: the last one that is sent.
        find_unused_parameters: whether a backward pass may leave parameters without a gradient on some ranks
            and not on others. They get the average then, to which such a rank contributes zeros. Without it
            that is an error. A parameter that no rank uses stays as it is either way.
        group: the ranks to average over; all by default.

    Raises:
        InvalidArgument: no parameter is to be trained, one is neither float32 nor bfloat16 nor float16, or a
            size is negative.
        JobExists: the ranks' models differ in their parameters' names, shapes or dtypes.
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
            raise InvalidArgument(f"module is a {type(module).__name__}: it must be a torch.nn.Module")
        for name, size in (
            ("comm_buffer_size", comm_buffer_size),
            ("last_comm_buffer_size", last_comm_buffer_size),
        ):
            if not size >= 0:
                raise InvalidArgument(f"{name} is {size}: it must be a number of MB, at least 0")
        if strategy is not None:
            warnings.warn("strategy has no effect, and will go", DeprecationWarning, stacklevel=2)
        self.module = module
        self.find_unused_parameters = find_unused_parameters
        self._limits = int(comm_buffer_size * MB), int(last_comm_buffer_size * MB)
        self._place = group_place(group)
        #: Whether forward passes ask for synchronisation now, and whether the last one did.
        self._syncing = True
        self._armed = False
        #: Whether a backward pass is under way of which gradients may have been sent.
        self._begun = False
        #: Whether the servers have parts of a step that will not be finished.
        self._broken = False
        self._averages: Averages | None = None
        #: Jobs that are not used any more, to be left when every rank has gone on to the next one.
        self._retired: list[Averages] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

        trainable = self._trainable()
        if not trainable:
            raise InvalidArgument(
                "the module has no parameter that requires a gradient: there is nothing to train"
            )
        if self._place[1] == 1:
            warnings.warn("one process: there are no gradients to average", UserWarning, stacklevel=2)
        self._arrange(trainable, share=True)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        if torch.is_grad_enabled():
            self._begin_forward()
        outputs = self.module(*inputs, **kwargs)
        if self._armed and torch.is_grad_enabled():
            # The outermost backward pass begins here; that of a reentrant checkpoint would end too early.
            begin = _weakly(self, DataParallel._begin_round)
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                    output.register_hook(begin)
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes of forward passes in this context only accumulate, on each rank by itself.

        What has accumulated is part of the next synchronisation.
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @property
    def buckets(self) -> list[list[int]]:
        """The parameters of each bucket, by their positions among those that are trained."""
        return self._new_buckets(list(zip(self._names, self._trained))).buckets

    def _new_buckets(self, parameters: list[Named]) -> _native.Buckets:
        sizes = [
            (parameter.nbytes, dtype_name(f"parameter {name!r}", parameter)) for name, parameter in parameters
        ]
        return _native.Buckets(sizes, *self._limits)

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

    def set_state_dict(self, state_dict: Mapping[str, Any], use_structured_name: bool = True) -> Any:
        """Loads what fits, and warns of what is missing or not known.

        Args:
            state_dict: parameters and buffers.
            use_structured_name: whether they are found by name. Otherwise names do not matter (torch's
                tensors have none of their own): the first is taken for the first, and so on.

        Returns:
            ``missing_keys`` and ``unexpected_keys``.

        Raises:
            InvalidArgument: without names, if there are more or fewer tensors than the module has.
        """
        if not use_structured_name:
            names = list(self.module.state_dict())
            if len(names) != len(state_dict):
                raise InvalidArgument(
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
        # Where this module is a part of another, whose load_state_dict goes by the names of modules.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # Synchronisation

    def _trainable(self) -> list[Named]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad and p.numel() > 0]

    def _arrange(self, trainable: list[Named], share: bool) -> None:
        """Makes the buckets, the job and the hooks for what is trained now."""
        self._trained = [parameter for _, parameter in trainable]
        self._names = [name for name, _ in trainable]
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._averages is not None:
            self._retired.append(self._averages)
            self._averages = None
        if self._place[1] == 1:
            return
        # If this fails, the next forward pass tries again.
        self._broken = True
        self._buckets = self._new_buckets(trainable)
        self._averages = Averages(
            current(), "data-parallel", self._place, trainable, self._constants() if share else (), share
        )
        for index, parameter in enumerate(self._trained):
            ready = _weakly(self, DataParallel._ready, index)
            hook = parameter.register_post_accumulate_grad_hook(ready)
            self._hooks.append(hook)
        self._broken = False

    def _constants(self) -> list[Named]:
        tensors = [(name, p.detach()) for name, p in self.module.named_parameters() if not p.requires_grad]
        return [
            (name, tensor) for name, tensor in [*tensors, *self.module.named_buffers()] if tensor.numel() > 0
        ]

    def _begin_forward(self) -> None:
        if self._begun and torch._C._current_graph_task_id() == -1:
            # No backward pass is under way: the last one ended in an error.
            self._begun = False
            self._give_up()
        trainable = self._trainable()
        if not trainable:
            # All frozen, perhaps for a while: the job stays.
            self._armed = False
            return
        as_before = len(trainable) == len(self._trained) and all(
            parameter is before for (_, parameter), before in zip(trainable, self._trained)
        )
        if self._broken or not as_before:
            self._arrange(trainable, share=False)
        self._armed = self._syncing and self._averages is not None

    def _begin_round(self, *_: object) -> None:
        if self._armed and not self._begun:
            self._begun = True
            Variable._execution_engine.queue_callback(self._end_round)

    def _ready(self, index: int, _: torch.Tensor) -> None:
        """A gradient is complete."""
        if not self._armed or self._averages is None:
            return
        self._begin_round()
        try:
            ready = self._buckets.ready(index)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"the gradient of parameter {self._names[index]!r} was ready twice in one backward pass (is it "
                "used in more than one reentrant checkpoint?): run each backward pass but the last under no_sync(), then "
                "fused_allreduce_gradients"
            ) from error
        self._averages.send(self._trained, ready)

    def _end_round(self) -> None:
        """The backward pass is over."""
        averages = self._averages
        assert averages is not None, "a round begins where there is a job"
        try:
            for index in self._buckets.rest():
                averages.send(self._trained, self._buckets.ready(index))
            averages.finish(self._trained, self.find_unused_parameters)
        except UnusedParameter:
            raise
        except BaseException:
            self._give_up()
            raise
        finally:
            self._begun = False
            self._buckets.reset()
        while self._retired:
            self._retired.pop().retire()

    def _give_up(self) -> None:
        """Forgets a round: the next forward pass makes another job."""
        self._broken = True
        self._buckets.reset()
        if self._averages is not None:
            self._averages.abandon()


def fused_allreduce_gradients(
    parameters: torch.Tensor | Iterable[torch.Tensor], group: ProcessGroup | None = None
) -> None:
    """Makes each parameter's gradient its mean over the ranks, now.

    For gradients that were accumulated under ``no_sync()``, or by a module that is not wrapped. A rank
    without a gradient counts as zeros, unless no rank has one. Frozen parameters do not take part. Every rank
    calls this with the same parameters; the first call with them makes a job, which the later ones use again.

    Args:
        parameters: one parameter or several, of float32, bfloat16 or float16.
        group: the ranks to average over; all by default.
    """
    found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    trainable = list({id(p): p for p in found if p.requires_grad and p.numel() > 0}.values())
    where = group_place(group)
    if where[1] == 1 or not trainable:
        return
    averages = _fused.get(where, trainable)
    try:
        averages.send(trainable, range(len(trainable)))
        averages.finish(trainable, unused=True)
    except BaseException:
        averages.abandon()
        _fused.drop(where, trainable)
        raise


class _Jobs:
    """The jobs of :func:`fused_allreduce_gradients`: one for each list of parameters that is alive."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[Any, ...], Averages] = {}
        self._alive: dict[tuple[Any, ...], list[weakref.ref[torch.Tensor]]] = {}

    def get(self, where: Place, parameters: list[torch.Tensor]) -> Averages:
        session, key = current(), self._key(where, parameters)
        averages = self._jobs.get(key)
        if averages is None or averages.session is not session:
            named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
            self._jobs[key] = averages = Averages(session, "fused-allreduce", where, named)
            # Another tensor may get the id of one that is no more.
            self._alive[key] = [weakref.ref(parameter, lambda _: self._drop(key)) for parameter in parameters]
        return averages

    def drop(self, where: Place, parameters: list[torch.Tensor]) -> None:
        self._drop(self._key(where, parameters))

    def _drop(self, key: tuple[Any, ...]) -> None:
        self._jobs.pop(key, None)
        self._alive.pop(key, None)

    @staticmethod
    def _key(where: Place, parameters: list[torch.Tensor]) -> tuple[Any, ...]:
        return where, *map(id, parameters)


_fused = _Jobs()


def _weakly(owner: DataParallel, method: Callable[..., None], *args: Any) -> Callable[..., None]:
    """``method`` of ``owner`` for a hook that does not keep it alive: tensors' hooks are no garbage, ever."""
    reference = weakref.ref(owner)

    def call(*more: Any) -> None:
        alive = reference()
        if alive is not None:
            method(alive, *args, *more)

    return call
