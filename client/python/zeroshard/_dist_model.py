"""The common part of ``DistModel`` in all frameworks: modes, programs, and the arguments of calls.

A framework implements a subclass of :class:`DistModelBase` that runs the model. Nothing here
imports a framework.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from ._core.optimizer import SteppedByServers
from ._layer import INPUT_FN
from ._program import MODES, Description, Program, make_program
from ._strategy import Strategy
from .errors import InvalidArgumentError, NotATensorError

T = TypeVar("T")
S = TypeVar("S")

#: The modes of ``state_dict``.
PARTS = ("all", "param", "opt")
#: Prefix of the optimizer's entries in a state dict: ``optimizer.<parameter>.<tensor>``.
OPTIMIZER_PREFIX = "optimizer."


class DistModelBase(ABC, Generic[T]):
    """A model with modes. ``T`` is the framework's tensor.

    The initial mode is ``"train"`` with a loss and an optimizer, ``"eval"`` with a loss only, and
    ``"predict"`` with neither.
    """

    def __init__(
        self,
        layer: Any,
        loader: Any,
        loss: Callable[..., T] | None,
        optimizer: object | None,
        strategy: Strategy | None,
    ) -> None:
        """The arguments are those of ``to_static``. Subclasses set ``_model`` and
        ``_optimizer``."""
        self._check_arguments(layer, loss, optimizer, strategy)
        self.loader = loader
        self._layer = layer
        self._loss = loss
        self._has_optimizer = optimizer is not None
        self._mode = "predict" if loss is None else "eval" if optimizer is None else "train"
        #: The mesh of the layer's parameters. None: they are not distributed.
        self._mesh: Any = self._common_mesh()
        #: The layer, or its wrapper that uses the servers.
        self._model = layer
        self._optimizer: Any = None

    def _check_arguments(
        self, layer: object, loss: object, optimizer: object, strategy: object
    ) -> None:
        if not self._is_layer(layer):
            raise InvalidArgumentError(
                f"layer is a {type(layer).__name__}; "
                f"it must be a {self._layer_name} that is not sharded yet"
            )
        if loss is not None and not callable(loss):
            raise InvalidArgumentError(
                f"loss is {loss!r}; it must be a function of outputs and labels or None"
            )
        if optimizer is not None and not self._is_optimizer(optimizer):
            raise InvalidArgumentError(
                f"optimizer is a {type(optimizer).__name__}; "
                f"it must be a {self._optimizer_name} or None"
            )
        if strategy is not None and not isinstance(strategy, Strategy):
            raise InvalidArgumentError(
                f"strategy is a {type(strategy).__name__}; it must be a zeroshard Strategy or None"
            )
        if (
            isinstance(optimizer, SteppedByServers)
            and strategy is not None
            and strategy.sharding.enable
        ):
            if strategy.level != optimizer.sharding.level:
                raise InvalidArgumentError(
                    f"the strategy has level {strategy.level!r} and the sharded optimizer "
                    f"{optimizer.sharding.level!r}; they must be the same"
                )

    def _common_mesh(self) -> Any | None:
        """The mesh of the layer's distributed parameters. None if it has none."""
        found: Any | None = None
        for name, parameter in self._layer.named_parameters():
            mesh = self._mesh_of(parameter)
            if mesh is not None and found is not None and mesh != found:
                raise InvalidArgumentError(
                    f"parameter {name!r} is on the mesh {self._mesh_text(mesh)}, other parameters "
                    f"are on {self._mesh_text(found)}; all parameters must be on one mesh"
                )
            found = found if mesh is None else mesh
        return found

    # ---- modes

    @property
    def mode(self) -> str:
        """``"train"``, ``"eval"`` or ``"predict"``."""
        return self._mode

    def train(self) -> None:
        """Switches to train mode: a call updates the parameters and returns the loss. Needs a loss
        and an optimizer."""
        self._switch("train")

    def eval(self) -> None:
        """Switches to eval mode: a call returns the loss. Needs a loss."""
        self._switch("eval")

    def predict(self) -> None:
        """Switches to predict mode: a call returns the outputs as ``{"out0": ..., "out1":
        ...}``."""
        self._switch("predict")

    def _switch(self, mode: str) -> None:
        self._check_mode(mode)
        self._mode = mode

    def _check_mode(self, mode: str) -> str:
        """Returns the mode, or raises an error if the model does not support it."""
        if mode not in MODES:
            raise InvalidArgumentError(
                f"mode is {mode!r}; it must be one of {', '.join(map(repr, MODES))} or None"
            )
        missing = []
        if mode != "predict" and self._loss is None:
            missing.append("a loss")
        if mode == "train" and not self._has_optimizer:
            missing.append("an optimizer")
        if missing:
            raise InvalidArgumentError(
                f"mode {mode!r} needs {' and '.join(missing)}; "
                f"pass {'them' if len(missing) > 1 else 'it'} to to_static"
            )
        return mode

    # ---- calls

    def __call__(self, *args: Any) -> Any:
        """Runs the model on the inputs. In train and eval mode, the inputs are followed by the
        labels.

        Raises :class:`~zeroshard.InvalidArgumentError` (a ValueError) if the number of tensors does
        not match the mode, and :class:`~zeroshard.NotATensorError` (a TypeError).
        """
        tensors = flatten(args)
        for number, tensor in enumerate(tensors):
            if not self._is_tensor(tensor):
                raise NotATensorError(
                    f"argument {number} is a {type(tensor).__name__}; it must be a "
                    f"{self._tensor_name}"
                )
        inputs, labels = self._split(tensors)
        if self._mode == "train":
            return self._train_step(inputs, labels)
        if self._mode == "eval":
            return self._evaluate(inputs, labels)
        return {f"out{number}": output for number, output in enumerate(self._predict(inputs))}

    def _train_step(self, inputs: list[T], labels: list[T]) -> T:
        """Forward, backward and a step on the servers. Returns the loss."""
        self._model.train()
        self._optimizer.zero_grad()
        with self._recorded("train"):
            loss: Any = self._loss_of(inputs, labels)
            mean = self._mean_loss(loss.detach())
            loss.backward()
            self._record("after_backward")
            self._optimizer.step()
        return mean

    def _evaluate(self, inputs: list[T], labels: list[T]) -> T:
        """Forward without gradients. Returns the loss."""
        self._model.eval()
        with self._no_grad(), self._recorded("eval"):
            return self._mean_loss(self._loss_of(inputs, labels))

    def _predict(self, inputs: list[T]) -> list[T]:
        """Forward without gradients. Returns the outputs."""
        self._model.eval()
        with self._no_grad():
            with self._recorded("predict"):
                outputs = self._outputs(inputs)
            return [self._whole_output(output, inputs) for output in outputs]

    def _loss_of(self, inputs: list[T], labels: list[T]) -> T:
        """``loss(*outputs, *labels)``."""
        assert self._loss is not None  # modes that have a loss are checked
        outputs = self._outputs(inputs)
        on_mesh = any(
            self._is_tensor(output) and self._mesh_of(output) is not None for output in outputs
        )
        self._record("before_loss")
        loss: Any = self._loss(*outputs, *(self._placed(label, on_mesh) for label in labels))
        self._record("after_loss")
        if not self._is_tensor(loss) or math.prod(loss.shape) != 1:
            given = (
                f"has shape {list(loss.shape)}"
                if self._is_tensor(loss)
                else f"is a {type(loss).__name__}"
            )
            raise InvalidArgumentError(f"the loss {given}; it must be a tensor with one element")
        found: T = loss
        return found

    def _outputs(self, inputs: list[T]) -> list[T]:
        if INPUT_FN not in vars(self._layer):
            inputs = [self._placed(value, self._computes_on_mesh()) for value in inputs]
        return self._flat(self._model(*inputs))

    def _computes_on_mesh(self) -> bool:
        """Returns whether the model computes on distributed tensors."""
        return self._mesh is not None

    def _placed(self, value: T, on_mesh: bool) -> T:
        """The tensor as the model needs it: on the model's mesh, or as a local tensor."""
        mesh = self._mesh_of(value)
        if on_mesh:
            return value if mesh == self._mesh else self._replicated(value)
        return value if mesh is None else self._local_input(value)

    def _local_input(self, value: Any) -> T:
        """The tensor for a model that is not distributed: this rank's part of the batch, or all of
        it."""
        for parts, dim in self._shards(value):
            if value.shape[dim] % parts:
                raise InvalidArgumentError(
                    f"a batch has {value.shape[dim]} samples; "
                    f"it must be divisible by the {parts} ranks, whose losses are averaged"
                )
        return self._local(value)

    def _whole_output(self, output: Any, inputs: list[T]) -> Any:
        """The whole output on every rank, if the inputs were distributed over the batch."""
        if not self._is_tensor(output):
            return output
        if self._mesh_of(output) is None:
            sharded = next(
                (value for value in inputs if any(dim == 0 for _, dim in self._shards(value))), None
            )
            if (
                sharded is None
                or not output.shape
                or output.shape[0] != self._local_shape(sharded)[0]
            ):
                return output
            output = self._assembled_as(output, sharded)
        return self._whole(output)

    def _mean_loss(self, loss: T) -> T:
        """The mean of the ranks' losses, if they differ."""
        loss = self._whole(loss)
        return self._mean(loss) if self._losses_differ() else loss

    def _split(self, tensors: list[T]) -> tuple[list[T], list[T]]:
        """Splits the tensors into the inputs of the model and the labels for the loss."""
        signature = _signature(self._layer.forward)
        labels = 0 if self._mode == "predict" else 1
        for count in range(len(tensors) - labels, 0, -1):
            if signature is None or _takes(signature, count):
                return tensors[:count], tensors[count:]
            if self._mode == "predict":
                break
        wanted = "" if signature is None else f" of forward{signature}"
        also = "" if self._mode == "predict" else " and at least 1 label for the loss"
        raise InvalidArgumentError(
            f"mode {self._mode!r} takes the inputs{wanted}{also}, but got {len(tensors)} tensors"
        )

    # ---- programs

    def dist_main_program(self, mode: str | None = None) -> Program:
        """The operations of this worker in each call, in the given or the current mode."""
        return self._program(mode, "dist", "main")

    def dist_startup_program(self, mode: str | None = None) -> Program:
        """The operations of this worker before the first call."""
        return self._program(mode, "dist", "startup")

    def serial_main_program(self, mode: str | None = None) -> Program:
        """The operations of a single worker with the whole model, in each call."""
        return self._program(mode, "serial", "main")

    def serial_startup_program(self, mode: str | None = None) -> Program:
        """The operations of a single worker with the whole model, before the first call."""
        return self._program(mode, "serial", "startup")

    def _program(self, mode: str | None, scope: str, kind: str) -> Program:
        mode = self._check_mode(self._mode if mode is None else mode)
        return make_program(self._describe(mode), mode, scope, kind)

    # ---- state

    def state_dict(self, mode: str = "all") -> dict[str, Any]:
        """Whole tensors by name: the model's (``"param"``), the optimizer's (``"opt"``), or both
        (``"all"``).

        The names of the optimizer's tensors are ``optimizer.<parameter>.<tensor>``.
        """
        if mode not in PARTS:
            raise InvalidArgumentError(
                f"mode is {mode!r}; it must be one of {', '.join(map(repr, PARTS))}"
            )
        state = {} if mode == "opt" else dict(self._model_state())
        if mode != "param" and self._has_optimizer:
            state |= {
                OPTIMIZER_PREFIX + name: value for name, value in self._optimizer_state().items()
            }
        return state

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the result of :meth:`state_dict`. Every rank must call it."""
        model, optimizer = {}, {}
        for name, value in state_dict.items():
            if name.startswith(OPTIMIZER_PREFIX):
                optimizer[name[len(OPTIMIZER_PREFIX) :]] = value
            else:
                model[name] = value
        if optimizer and not self._has_optimizer:
            raise InvalidArgumentError(
                "the state contains optimizer state, but this model has no optimizer; "
                "pass one to to_static"
            )
        if model:
            self._set_model_state(model)
        if optimizer:
            self._set_optimizer_state(optimizer)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raises an error unless the state has the names and shapes of the model's."""
        own = self._model.state_dict()
        unknown, missing = (
            [name for name in state if name not in own],
            [name for name in own if name not in state],
        )
        if unknown or missing:
            raise InvalidArgumentError(
                "the names of the state do not match the model: "
                f"unexpected {unknown or 'none'}, missing {missing or 'none'}"
            )
        for name, value in state.items():
            if list(value.shape) != list(own[name].shape):
                raise InvalidArgumentError(
                    f"{name!r} in the state has shape {list(value.shape)}; "
                    f"it must have the model's shape, {list(own[name].shape)}"
                )

    # ---- implemented by each framework: types

    #: The names of its classes, such as ``torch.Tensor``.
    _tensor_name: str
    _layer_name: str
    _optimizer_name: str

    @abstractmethod
    def _is_tensor(self, value: object) -> bool:
        """Returns whether the value is a tensor."""

    @abstractmethod
    def _is_layer(self, value: object) -> bool:
        """Returns whether the value is a module that is not sharded yet."""

    @abstractmethod
    def _is_optimizer(self, value: object) -> bool:
        """Returns whether the value is an optimizer."""

    # ---- tensors on a mesh

    @abstractmethod
    def _mesh_of(self, value: T) -> Any | None:
        """The mesh of a tensor. None if it is not distributed."""

    @abstractmethod
    def _mesh_text(self, mesh: Any) -> str:
        """The text of a mesh in errors."""

    @abstractmethod
    def _shards(self, value: T) -> Sequence[tuple[int, int]]:
        """The number of shards and the tensor dimension, for each mesh dimension that shards the
        tensor."""

    @abstractmethod
    def _local(self, value: T) -> T:
        """The local tensor, with partial values reduced."""

    @abstractmethod
    def _local_shape(self, value: T) -> Sequence[int]:
        """The shape of the local tensor."""

    @abstractmethod
    def _whole(self, value: T) -> T:
        """The whole tensor. A plain tensor is returned as it is."""

    @abstractmethod
    def _replicated(self, value: T) -> T:
        """The whole tensor on every rank of the model's mesh."""

    @abstractmethod
    def _assembled_as(self, part: T, sharded: T) -> T:
        """The distributed tensor with the local tensor ``part`` and the layout of ``sharded``,
        which is sharded on dimension 0."""

    # ---- computation

    @abstractmethod
    def _no_grad(self) -> AbstractContextManager[object]:
        """A context without gradients."""

    @abstractmethod
    def _flat(self, outputs: Any) -> list[T]:
        """The outputs of the model as a list."""

    @abstractmethod
    def _losses_differ(self) -> bool:
        """Returns whether each rank computes its own loss: true unless they compute one together,
        on a mesh of all ranks."""

    @abstractmethod
    def _mean(self, loss: T) -> T:
        """The mean of the ranks' losses."""

    def _recorded(self, mode: str) -> AbstractContextManager[object]:
        """A context around the computation of a call, in which a framework may record
        collectives."""
        return nullcontext()

    def _record(self, moment: str) -> None:
        """Sets the moment of the call for the recorder."""

    # ---- descriptions and state

    @abstractmethod
    def _describe(self, mode: str) -> Description:
        """The description from which the programs of a mode are made."""

    @abstractmethod
    def _model_state(self) -> Mapping[str, T]:
        """Whole parameters and buffers."""

    @abstractmethod
    def _optimizer_state(self) -> Mapping[str, Any]:
        """Whole tensors, and numbers, named ``<parameter>.<tensor>``."""

    @abstractmethod
    def _set_model_state(self, state: Mapping[str, T]) -> None:
        """Loads parameters and buffers."""

    @abstractmethod
    def _set_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Loads the optimizer's state."""


def flatten(values: Iterable[Any]) -> list[Any]:
    """The elements of nested lists and tuples, in order."""
    flat: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            flat += flatten(value)
        else:
            flat.append(value)
    return flat


def named_optimizer_state(
    state: Mapping[int, Mapping[str, S]], names: Mapping[int, str]
) -> dict[str, S]:
    """Optimizer state by ``<parameter>.<tensor>``, from state by parameter number."""
    return {
        f"{names[number]}.{part}": value
        for number, tensors in state.items()
        for part, value in tensors.items()
    }


def numbered_optimizer_state(
    state: Mapping[str, S], names: Mapping[int, str]
) -> dict[int, dict[str, S]]:
    """The inverse of :func:`named_optimizer_state`.

    Raises :class:`~zeroshard.InvalidArgumentError` if a parameter is unknown.
    """
    numbers = {name: number for number, name in names.items()}
    found: dict[int, dict[str, S]] = {}
    for key, value in state.items():
        name, _, part = key.rpartition(".")
        if name not in numbers:
            raise InvalidArgumentError(
                f"the state contains {OPTIMIZER_PREFIX + key!r}, but the optimizer has no "
                f"parameter {name!r}; its parameters are {', '.join(numbers)}"
            )
        found.setdefault(numbers[name], {})[part] = value
    return found


def _signature(forward: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def _takes(signature: inspect.Signature, count: int) -> bool:
    """Returns whether the function accepts this number of positional arguments."""
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
