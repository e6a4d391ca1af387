"""What every framework's ``DistModel`` has in common: modes, programs, and what a call may be given.

A framework's class is a :class:`DistModelBase` that knows how to run a model; it imports nothing of another framework.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from ._program import MODES, Description, Program, make_program
from .errors import InvalidArgument, NotATensor

T = TypeVar("T")
S = TypeVar("S")

#: What a state dict may hold.
PARTS = ("all", "param", "opt")
#: In a state dict, what is the optimizer's and no parameter: ``optimizer.<parameter>.<tensor>``.
OPTIMIZER_PREFIX = "optimizer."
#: The levels that the stages of sharding stand for.
LEVEL_OF_STAGE = {1: "os", 2: "os_g", 3: "p_g_os"}


def level_of_stage(stage: int) -> str:
    """The level that a stage of sharding stands for: 1 ``os``, 2 ``os_g``, 3 ``p_g_os``."""
    try:
        return LEVEL_OF_STAGE[stage]
    except (KeyError, TypeError):
        raise InvalidArgument(f"stage is {stage!r}; it must be 1 (os), 2 (os_g) or 3 (p_g_os)") from None


@dataclass(frozen=True)
class ShardingStage:
    """For ``shard_optimizer``: what the shard servers hold for the workers.

    The servers share the work by bytes, whatever mesh the workers have. ``mesh`` says which ranks train together (all,
    if it is None), and ``sharding_mesh_dim``, one of its dimensions, is accepted for programs that have it.
    """

    sharding_mesh_dim: Any = None
    mesh: Any = None
    stage: ClassVar[int]

    @property
    def level(self) -> str:
        """``os``, ``os_g`` or ``p_g_os``."""
        return level_of_stage(self.stage)


class ShardingStage1(ShardingStage):
    """The optimizer's state: level ``os``."""

    stage = 1


class ShardingStage2(ShardingStage):
    """Gradients too: level ``os_g``."""

    stage = 2


class ShardingStage3(ShardingStage):
    """Parameters too: level ``p_g_os``."""

    stage = 3


@dataclass
class ShardingStrategy:
    """What the shard servers hold for the workers; without ``enable`` it is the optimizer's state, as with stage 1."""

    enable: bool = False
    #: 1: optimizer state. 2: gradients too. 3: parameters too.
    stage: int = 1


@dataclass
class Strategy:
    """How a :class:`DistModel` trains."""

    sharding: ShardingStrategy = field(default_factory=ShardingStrategy)

    def __init__(self, config: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """``config``: ``{"sharding": {"enable": True, "stage": 2}}``."""
        self.sharding = ShardingStrategy()
        for section, values in (config or {}).items():
            if section != "sharding":
                raise InvalidArgument(f"the strategy's config has {section!r}; it can have 'sharding'")
            known = vars(self.sharding)
            for name, value in values.items():
                if name not in known:
                    raise InvalidArgument(f"the strategy's {section!r} has {name!r}; it can have {', '.join(known)}")
                setattr(self.sharding, name, value)

    @property
    def level(self) -> str:
        """``os``, ``os_g`` or ``p_g_os``."""
        return level_of_stage(self.sharding.stage if self.sharding.enable else 1)


class DistModelBase(ABC, Generic[T]):
    """A model with modes; ``T`` is the framework's tensor.

    With a loss and an optimizer the first mode is ``"train"``, with a loss alone ``"eval"``, with neither
    ``"predict"``.
    """

    def __init__(self, *, loss: Callable[..., T] | None, optimizer: object | None) -> None:
        self._loss = loss
        self._has_optimizer = optimizer is not None
        self._mode = "predict" if loss is None else "eval" if optimizer is None else "train"

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
            raise InvalidArgument(f"mode is {mode!r}; it must be one of {', '.join(map(repr, MODES))}, or None")
        missing = []
        if mode != "predict" and self._loss is None:
            missing.append("a loss")
        if mode == "train" and not self._has_optimizer:
            missing.append("an optimizer")
        if missing:
            raise InvalidArgument(
                f"mode {mode!r} needs {' and '.join(missing)}: give {'them' if len(missing) > 1 else 'it'} to to_static"
            )
        return mode

    # ---- calls

    def __call__(self, *args: Any) -> Any:
        """In train and eval: the inputs, then what the loss compares the outputs with. In predict: the inputs alone.

        Raises :class:`~zeroshard.InvalidArgument` (a ValueError) for another number of tensors than the mode takes, and
        :class:`~zeroshard.NotATensor` (a TypeError).
        """
        tensors = flatten(args)
        for number, tensor in enumerate(tensors):
            if not self._is_tensor(tensor):
                raise NotATensor(f"argument {number} is a {type(tensor).__name__}; it must be a {self._tensor_name}")
        inputs, labels = self._split(tensors)
        if self._mode == "train":
            return self._train_step(inputs, labels)
        if self._mode == "eval":
            return self._evaluate(inputs, labels)
        return {f"out{number}": output for number, output in enumerate(self._predict(inputs))}

    def _split(self, tensors: list[T]) -> tuple[list[T], list[T]]:
        """Inputs of the model, and what is left for the loss: at least one label."""
        signature = _signature(self._forward())
        labels = 0 if self._mode == "predict" else 1
        for count in range(len(tensors) - labels, 0, -1):
            if signature is None or _takes(signature, count):
                return tensors[:count], tensors[count:]
            if self._mode == "predict":
                break
        wanted = "" if signature is None else f" for forward{signature}"
        also = "" if self._mode == "predict" else ", then at least 1 label for the loss"
        raise InvalidArgument(
            f"{len(tensors)} tensors are given in mode {self._mode!r}; it takes the inputs{wanted}{also}"
        )

    def _compute_loss(self, outputs: list[T], labels: list[T]) -> T:
        """``loss(*outputs, *labels)``."""
        assert self._loss is not None  # modes that have a loss are checked
        return self._loss(*outputs, *labels)

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
        """Whole tensors by name: ``"param"`` the model's, ``"opt"`` the optimizer's, ``"all"`` both.

        The optimizer's names are ``optimizer.<parameter>.<tensor>``.
        """
        if mode not in PARTS:
            raise InvalidArgument(f"mode is {mode!r}; it must be one of {', '.join(map(repr, PARTS))}")
        state = {} if mode == "opt" else dict(self._model_state())
        if mode != "param" and self._has_optimizer:
            state |= {OPTIMIZER_PREFIX + name: value for name, value in self._optimizer_state().items()}
        return state

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave: the model's part, the optimizer's, or both. By every rank."""
        model, optimizer = {}, {}
        for name, value in state_dict.items():
            if name.startswith(OPTIMIZER_PREFIX):
                optimizer[name[len(OPTIMIZER_PREFIX) :]] = value
            else:
                model[name] = value
        if optimizer and not self._has_optimizer:
            raise InvalidArgument("the state has an optimizer's part; this model has no optimizer: to_static takes one")
        if model:
            self._set_model_state(model)
        if optimizer:
            self._set_optimizer_state(optimizer)

    # ---- what a framework knows

    #: What the framework calls its tensors: ``torch.Tensor``.
    _tensor_name: str

    @abstractmethod
    def _is_tensor(self, value: object) -> bool:
        """Whether this can be an input."""

    @abstractmethod
    def _forward(self) -> Callable[..., Any]:
        """The function whose parameters are the model's inputs."""

    @abstractmethod
    def _train_step(self, inputs: list[T], labels: list[T]) -> T:
        """Forward, backward and a step on the servers; the loss."""

    @abstractmethod
    def _evaluate(self, inputs: list[T], labels: list[T]) -> T:
        """Forward without gradients; the loss."""

    @abstractmethod
    def _predict(self, inputs: list[T]) -> list[T]:
        """Forward without gradients; the outputs."""

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


def named_optimizer_state(state: Mapping[int, Mapping[str, S]], names: Mapping[int, str]) -> dict[str, S]:
    """An optimizer's state by parameter number, as ``<parameter>.<tensor>``; ``names`` are the parameters'."""
    return {
        f"{names[number]}.{part}": value for number, tensors in state.items() for part, value in tensors.items()
    }


def numbered_optimizer_state(state: Mapping[str, S], names: Mapping[int, str]) -> dict[int, dict[str, S]]:
    """The reverse of :func:`named_optimizer_state`.

    Raises :class:`~zeroshard.InvalidArgument` where a parameter is named that there is not.
    """
    numbers = {name: number for number, name in names.items()}
    found: dict[int, dict[str, S]] = {}
    for key, value in state.items():
        name, _, part = key.rpartition(".")
        if name not in numbers:
            raise InvalidArgument(
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
