"""The common part of ``DistModel`` in all frameworks: modes, calls and programs.

A framework implements a subclass of :class:`DistModelBase` that runs the model. Nothing here
imports a framework.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from ._dist_arguments import Classes, flatten, split_tensors
from ._dist_state import OPTIMIZER_PREFIX, check_part, split_state
from ._dist_tensors import DistTensors
from ._layer import INPUT_FN
from ._program import MODES, Description, Program, make_program
from ._strategy import Strategy
from .errors import InvalidArgumentError, NotATensorError

T = TypeVar("T")


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
        self._classes.check(layer, loss, optimizer, strategy)
        self.loader = loader
        self._layer = layer
        self._loss = loss
        self._has_optimizer = optimizer is not None
        self._mode = "predict" if loss is None else "eval" if optimizer is None else "train"
        #: The mesh of the layer's parameters. None: they are not distributed.
        self._mesh: Any = self._tensors.common_mesh(layer)
        #: The layer, or its wrapper that uses the servers.
        self._model = layer
        self._optimizer: Any = None

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
            if not self._tensors.is_tensor(tensor):
                raise NotATensorError(
                    f"argument {number} is a {type(tensor).__name__}; it must be a "
                    f"{self._tensors.name}"
                )
        inputs, labels = split_tensors(self._layer.forward, self._mode, tensors)
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
            return [self._tensors.whole_output(output, inputs) for output in outputs]

    def _loss_of(self, inputs: list[T], labels: list[T]) -> T:
        """``loss(*outputs, *labels)``."""
        assert self._loss is not None  # modes that have a loss are checked
        outputs = self._outputs(inputs)
        mesh = self._mesh if any(map(self._tensors.is_distributed, outputs)) else None
        self._record("before_loss")
        loss: Any = self._loss(*outputs, *(self._tensors.placed(label, mesh) for label in labels))
        self._record("after_loss")
        is_tensor = self._tensors.is_tensor(loss)
        if not is_tensor or math.prod(loss.shape) != 1:
            shape = f"has shape {list(loss.shape)}" if is_tensor else None
            given = shape or f"is a {type(loss).__name__}"
            raise InvalidArgumentError(f"the loss {given}; it must be a tensor with one element")
        found: T = loss
        return found

    def _outputs(self, inputs: list[T]) -> list[T]:
        if INPUT_FN not in vars(self._layer):
            mesh = self._mesh if self._computes_on_mesh() else None
            inputs = [self._tensors.placed(value, mesh) for value in inputs]
        return self._flat(self._model(*inputs))

    def _computes_on_mesh(self) -> bool:
        """Returns whether the model computes on distributed tensors."""
        return self._mesh is not None

    def _mean_loss(self, loss: T) -> T:
        """The mean of the ranks' losses, if they differ."""
        loss = self._tensors.whole(loss)
        return self._mean(loss) if self._losses_differ() else loss

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
        check_part(mode)
        state = {} if mode == "opt" else dict(self._model_state())
        if mode != "param" and self._has_optimizer:
            state |= {
                OPTIMIZER_PREFIX + name: value for name, value in self._optimizer_state().items()
            }
        return state

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the result of :meth:`state_dict`. Every rank must call it."""
        model, optimizer = split_state(state_dict)
        if optimizer and not self._has_optimizer:
            raise InvalidArgumentError(
                "the state contains optimizer state, but this model has no optimizer; "
                "pass one to to_static"
            )
        if model:
            self._set_model_state(model)
        if optimizer:
            self._set_optimizer_state(optimizer)

    # ---- implemented by each framework: computation

    _classes: Classes
    _tensors: DistTensors[T]

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
