"""What every framework's ``DistModel`` has in common: modes, programs, and what a call may be
given.

A framework's class is a :class:`DistModelBase` that knows how to run a model; it imports nothing of
another framework.
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

#: What a state dict may hold.
PARTS = ("all", "param", "opt")
#: In a state dict, what is the optimizer's and no parameter: ``optimizer.<parameter>.<tensor>``.
OPTIMIZER_PREFIX = "optimizer."


class DistModelBase(ABC, Generic[T]):
    """A model with modes; ``T`` is the framework's tensor.

    With a loss and an optimizer the first mode is ``"train"``, with a loss alone ``"eval"``, with
    neither ``"predict"``.
    """

    def __init__(
        self,
        layer: Any,
        loader: Any,
        loss: Callable[..., T] | None,
        optimizer: object | None,
        strategy: Strategy | None,
    ) -> None:
        """As ``to_static`` says. ``_model`` and ``_optimizer`` are the framework's class's to
        make."""
        self._check_arguments(layer, loss, optimizer, strategy)
        self.loader = loader
        self._layer = layer
        self._loss = loss
        self._has_optimizer = optimizer is not None
        self._mode = "predict" if loss is None else "eval" if optimizer is None else "train"
        #: The mesh of the layer's parameters; None: they are plain.
        self._mesh: Any = self._common_mesh()
        #: What runs: the layer, or its wrapper that knows the servers.
        self._model = layer
        self._optimizer: Any = None

    def _check_arguments(
        self, layer: object, loss: object, optimizer: object, strategy: object
    ) -> None:
        if not self._is_layer(layer):
            raise InvalidArgumentError(
                f"layer is a {type(layer).__name__}; it must be a {self._layer_name} that is not wrapped already"
            )
        if loss is not None and not callable(loss):
            raise InvalidArgumentError(
                f"loss is {loss!r}; it must be a function of outputs and labels, or None"
            )
        if optimizer is not None and not self._is_optimizer(optimizer):
            raise InvalidArgumentError(
                f"optimizer is a {type(optimizer).__name__}; it must be a {self._optimizer_name}, or None"
            )
        if strategy is not None and not isinstance(strategy, Strategy):
            raise InvalidArgumentError(
                f"strategy is a {type(strategy).__name__}; it must be a zeroshard Strategy, or None"
            )
        if (
            isinstance(optimizer, SteppedByServers)
            and strategy is not None
            and strategy.sharding.enable
        ):
            if strategy.level != optimizer.sharding.level:
                raise InvalidArgumentError(
                    f"the strategy's level is {strategy.level!r} and the sharded optimizer's "
                    f"{optimizer.sharding.level!r}; one of them must say it"
                )

    def _common_mesh(self) -> Any | None:
        """The mesh that the layer's distributed parameters are on; None if it has none."""
        found: Any | None = None
        for name, parameter in self._layer.named_parameters():
            mesh = self._mesh_of(parameter)
            if mesh is not None and found is not None and mesh != found:
                raise InvalidArgumentError(
                    f"parameter {name!r} is on the mesh {self._mesh_text(mesh)}, and others on "
                    f"{self._mesh_text(found)}; all must be on one"
                )
            found = found if mesh is None else mesh
        return found

    # ---- modes

    @property
    def mode(self) -> str:
        """``"train"``, ``"eval"`` or ``"predict"``."""
        return self._mode

    def train(self) -> None:
        """A call updates the parameters and returns the loss. Needs a loss and an optimizer."""
        self._switch("train")

    def eval(self) -> None:
        """A call returns the loss and changes nothing. Needs a loss."""
        self._switch("eval")

    def predict(self) -> None:
        """A call returns the outputs, ``{"out0": ..., "out1": ...}``, and changes nothing."""
        self._switch("predict")

    def _switch(self, mode: str) -> None:
        self._check_mode(mode)
        self._mode = mode

    def _check_mode(self, mode: str) -> str:
        """The mode, if this model has what it takes."""
        if mode not in MODES:
            raise InvalidArgumentError(
                f"mode is {mode!r}; it must be one of {', '.join(map(repr, MODES))}, or None"
            )
        missing = []
        if mode != "predict" and self._loss is None:
            missing.append("a loss")
        if mode == "train" and not self._has_optimizer:
            missing.append("an optimizer")
        if missing:
            raise InvalidArgumentError(
                f"mode {mode!r} needs {' and '.join(missing)}: give {'them' if len(missing) > 1 else 'it'} to to_static"
            )
        return mode

    # ---- calls

    def __call__(self, *args: Any) -> Any:
        """In train and eval: the inputs, then what the loss compares the outputs with. In predict:
        the inputs alone.

        Raises :class:`~zeroshard.InvalidArgumentError` (a ValueError) for another number of tensors
        than the mode takes, and :class:`~zeroshard.NotATensorError` (a TypeError).
        """
        tensors = flatten(args)
        for number, tensor in enumerate(tensors):
            if not self._is_tensor(tensor):
                raise NotATensorError(
                    f"argument {number} is a {type(tensor).__name__}; it must be a {self._tensor_name}"
                )
        inputs, labels = self._split(tensors)
        if self._mode == "train":
            return self._train_step(inputs, labels)
        if self._mode == "eval":
            return self._evaluate(inputs, labels)
        return {f"out{number}": output for number, output in enumerate(self._predict(inputs))}

    def _train_step(self, inputs: list[T], labels: list[T]) -> T:
        """Forward, backward and a step on the servers; the loss."""
        self._model.train()
        self._optimizer.zero_grad()
        with self._watched("train"):
            loss: Any = self._loss_of(inputs, labels)
            mean = self._everybodys(loss.detach())
            loss.backward()
            self._now("after_backward")
            self._optimizer.step()
        return mean

    def _evaluate(self, inputs: list[T], labels: list[T]) -> T:
        """Forward without gradients; the loss."""
        self._model.eval()
        with self._no_grad(), self._watched("eval"):
            return self._everybodys(self._loss_of(inputs, labels))

    def _predict(self, inputs: list[T]) -> list[T]:
        """Forward without gradients; the outputs."""
        self._model.eval()
        with self._no_grad():
            with self._watched("predict"):
                outputs = self._outputs(inputs)
            return [self._whole_output(output, inputs) for output in outputs]

    def _loss_of(self, inputs: list[T], labels: list[T]) -> T:
        """``loss(*outputs, *labels)``."""
        assert self._loss is not None  # modes that have a loss are checked
        outputs = self._outputs(inputs)
        on_mesh = any(
            self._is_tensor(output) and self._mesh_of(output) is not None for output in outputs
        )
        self._now("before_loss")
        loss: Any = self._loss(*outputs, *(self._placed(label, on_mesh) for label in labels))
        self._now("after_loss")
        if not self._is_tensor(loss) or math.prod(loss.shape) != 1:
            said = (
                f"of shape {list(loss.shape)}"
                if self._is_tensor(loss)
                else f"a {type(loss).__name__}"
            )
            raise InvalidArgumentError(f"the loss is {said}; it must be a tensor of one element")
        found: T = loss
        return found

    def _outputs(self, inputs: list[T]) -> list[T]:
        if INPUT_FN not in vars(self._layer):
            inputs = [self._placed(value, self._computes_on_mesh()) for value in inputs]
        return self._flat(self._model(*inputs))

    def _computes_on_mesh(self) -> bool:
        """Whether the model takes tensors that are distributed."""
        return self._mesh is not None

    def _placed(self, value: T, on_mesh: bool) -> T:
        """A tensor as the model takes it: on its mesh, or this rank's part."""
        mesh = self._mesh_of(value)
        if on_mesh:
            return value if mesh == self._mesh else self._replicated(value)
        return value if mesh is None else self._part(value)

    def _part(self, value: Any) -> T:
        """What this rank computes with where the model is not distributed: its part of the batch,
        or all of it."""
        for parts, dim in self._cuts(value):
            if value.shape[dim] % parts:
                raise InvalidArgumentError(
                    f"a batch has {value.shape[dim]} samples; it must divide by the {parts} ranks, whose losses are averaged"
                )
        return self._local(value)

    def _whole_output(self, output: Any, inputs: list[T]) -> Any:
        """An output on every rank: of all parts of the batch, where the inputs were parts."""
        if not self._is_tensor(output):
            return output
        if self._mesh_of(output) is None:
            cut = next(
                (value for value in inputs if any(dim == 0 for _, dim in self._cuts(value))), None
            )
            if cut is None or not output.shape or output.shape[0] != self._local_shape(cut)[0]:
                return output
            output = self._assembled_as(output, cut)
        return self._whole(output)

    def _everybodys(self, loss: T) -> T:
        """The mean over the ranks, where each has a loss of its own."""
        loss = self._whole(loss)
        return self._mean(loss) if self._losses_differ() else loss

    def _split(self, tensors: list[T]) -> tuple[list[T], list[T]]:
        """Inputs of the model, and what is left for the loss: at least one label."""
        signature = _signature(self._layer.forward)
        labels = 0 if self._mode == "predict" else 1
        for count in range(len(tensors) - labels, 0, -1):
            if signature is None or _takes(signature, count):
                return tensors[:count], tensors[count:]
            if self._mode == "predict":
                break
        wanted = "" if signature is None else f" for forward{signature}"
        also = "" if self._mode == "predict" else ", then at least 1 label for the loss"
        raise InvalidArgumentError(
            f"{len(tensors)} tensors are given in mode {self._mode!r}; it takes the inputs{wanted}{also}"
        )

    # ---- programs

    def dist_main_program(self, mode: str | None = None) -> Program:
        """What this worker does in each call of the mode; of the current one if None."""
        return self._program(mode, "dist", "main")

    def dist_startup_program(self, mode: str | None = None) -> Program:
        """What this worker does once, before the first call of the mode."""
        return self._program(mode, "dist", "startup")

    def serial_main_program(self, mode: str | None = None) -> Program:
        """What one worker alone would do in each call, with the whole model."""
        return self._program(mode, "serial", "main")

    def serial_startup_program(self, mode: str | None = None) -> Program:
        """What one worker alone would do once, with the whole model."""
        return self._program(mode, "serial", "startup")

    def _program(self, mode: str | None, scope: str, kind: str) -> Program:
        mode = self._check_mode(self._mode if mode is None else mode)
        return make_program(self._describe(mode), mode, scope, kind)

    # ---- state

    def state_dict(self, mode: str = "all") -> dict[str, Any]:
        """Whole tensors by name: ``"param"`` the model's, ``"opt"`` the optimizer's, ``"all"``
        both.

        The optimizer's names are ``optimizer.<parameter>.<tensor>``.
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
        """Takes over what :meth:`state_dict` gave: the model's part, the optimizer's, or both. By
        every rank."""
        model, optimizer = {}, {}
        for name, value in state_dict.items():
            if name.startswith(OPTIMIZER_PREFIX):
                optimizer[name[len(OPTIMIZER_PREFIX) :]] = value
            else:
                model[name] = value
        if optimizer and not self._has_optimizer:
            raise InvalidArgumentError(
                "the state has an optimizer's part; this model has no optimizer: to_static takes one"
            )
        if model:
            self._set_model_state(model)
        if optimizer:
            self._set_optimizer_state(optimizer)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """A state of the model must have its names and shapes."""
        own = self._model.state_dict()
        unknown, missing = (
            [name for name in state if name not in own],
            [name for name in own if name not in state],
        )
        if unknown or missing:
            raise InvalidArgumentError(
                f"the state has {unknown or 'nothing'} that the model has not, and lacks {missing or 'nothing'}; it must "
                "have the model's names"
            )
        for name, value in state.items():
            if list(value.shape) != list(own[name].shape):
                raise InvalidArgumentError(
                    f"{name!r} of the state has shape {list(value.shape)}; it must have the model's, {list(own[name].shape)}"
                )

    # ---- what a framework knows: its types

    #: What the framework calls its tensors: ``torch.Tensor``.
    _tensor_name: str
    #: Its modules, and its optimizers.
    _layer_name: str
    _optimizer_name: str

    @abstractmethod
    def _is_tensor(self, value: object) -> bool:
        """Whether this can be an input."""

    @abstractmethod
    def _is_layer(self, value: object) -> bool:
        """Whether this can be the model: a module that is not wrapped."""

    @abstractmethod
    def _is_optimizer(self, value: object) -> bool:
        """Whether this can be the optimizer."""

    # ---- tensors on a mesh

    @abstractmethod
    def _mesh_of(self, value: T) -> Any | None:
        """The mesh that a tensor is on; None if it is plain."""

    @abstractmethod
    def _mesh_text(self, mesh: Any) -> str:
        """A mesh in an error."""

    @abstractmethod
    def _cuts(self, value: T) -> Sequence[tuple[int, int]]:
        """Of how many parts along which dimension it is, for each dimension of its mesh that cuts
        it."""

    @abstractmethod
    def _local(self, value: T) -> T:
        """What this rank has of a distributed tensor, complete."""

    @abstractmethod
    def _local_shape(self, value: T) -> Sequence[int]:
        """Its shape."""

    @abstractmethod
    def _whole(self, value: T) -> T:
        """All of a tensor; one that is plain as it is."""

    @abstractmethod
    def _replicated(self, value: T) -> T:
        """All of it on every rank of the model's mesh, from there or from another."""

    @abstractmethod
    def _assembled_as(self, here: T, cut: T) -> T:
        """The tensor of which ranks have parts as they have of ``cut``, along dimension 0."""

    # ---- how it computes

    @abstractmethod
    def _no_grad(self) -> AbstractContextManager[object]:
        """Inside, no gradients are made."""

    @abstractmethod
    def _flat(self, outputs: Any) -> list[T]:
        """A model's outputs, one after the other."""

    @abstractmethod
    def _losses_differ(self) -> bool:
        """Whether ranks have losses of their own: unless they compute one together, on a mesh of
        all of them."""

    @abstractmethod
    def _mean(self, loss: T) -> T:
        """The mean of the ranks' losses."""

    def _watched(self, mode: str) -> AbstractContextManager[object]:
        """Around what a call computes: a framework may watch what the ranks do together."""
        return nullcontext()

    def _now(self, moment: str) -> None:
        """Tells who watches where the call has come to."""

    # ---- what it tells

    @abstractmethod
    def _describe(self, mode: str) -> Description:
        """What the programs of a mode are made from."""

    @abstractmethod
    def _model_state(self) -> Mapping[str, T]:
        """Parameters and buffers, whole."""

    @abstractmethod
    def _optimizer_state(self) -> Mapping[str, Any]:
        """``<parameter>.<tensor>``: whole tensors, and numbers."""

    @abstractmethod
    def _set_model_state(self, state: Mapping[str, T]) -> None:
        """Takes over parameters and buffers."""

    @abstractmethod
    def _set_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Takes over the optimizer's state."""


def flatten(values: Iterable[Any]) -> list[Any]:
    """What is in nested lists and tuples, in order."""
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
    """An optimizer's state by parameter number, as ``<parameter>.<tensor>``; ``names`` are the
    parameters'."""
    return {
        f"{names[number]}.{part}": value
        for number, tensors in state.items()
        for part, value in tensors.items()
    }


def numbered_optimizer_state(
    state: Mapping[str, S], names: Mapping[int, str]
) -> dict[int, dict[str, S]]:
    """The reverse of :func:`named_optimizer_state`.

    Raises :class:`~zeroshard.InvalidArgumentError` where a parameter is named that there is not.
    """
    numbers = {name: number for number, name in names.items()}
    found: dict[int, dict[str, S]] = {}
    for key, value in state.items():
        name, _, part = key.rpartition(".")
        if name not in numbers:
            raise InvalidArgumentError(
                f"the state has {OPTIMIZER_PREFIX + key!r}, and {name!r} is no parameter that the optimizer has; they "
                f"are {', '.join(numbers)}"
            )
        found.setdefault(numbers[name], {})[part] = value
    return found


def _signature(forward: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def _takes(signature: inspect.Signature, count: int) -> bool:
    """Whether so many positional arguments can be given."""
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
