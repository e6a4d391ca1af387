"""Programs: the operations of one worker in a mode of a :class:`DistModel`, as a readable list.

A program is made from a :class:`Description` of the model, before anything runs. The operations
have the same names in every framework and in Rust.

    description = Description(level="os_g", rank=0, world=2, modules=(...), variables=(...))
    print(make_program(description, "train", "dist", "main"))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ._native import Box
from .errors import InvalidArgumentError

MODES = ("train", "eval", "predict")
SCOPES = ("dist", "serial")
KINDS = ("main", "startup")


@dataclass(frozen=True)
class Variable:
    """A tensor of the model on one worker."""

    name: str
    #: The shape of the whole tensor.
    shape: tuple[int, ...]
    #: The framework's name of the dtype, without a prefix: ``float32``.
    dtype: str
    #: Bytes per element.
    itemsize: int
    #: The worker's box.
    box: Box
    #: ``True`` if the servers update it.
    trained: bool
    #: ``True`` if the worker keeps it between uses. Otherwise it is pulled for each use.
    resident: bool = True
    #: ``True`` if this worker's gradient is used. False if another worker has the same box.
    contributes: bool = True
    #: ``True`` if this worker uploads the initial value: the first worker of each box does.
    uploads: bool = True
    #: A remark, such as its placements on a mesh.
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the worker's box."""
        return self.box.numel * self.itemsize


@dataclass(frozen=True)
class Collective:
    """A collective operation of a group of workers."""

    #: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``broadcast``.
    name: str
    #: The ranks of the group.
    group: tuple[int, ...]
    #: Bytes of this worker's input. None while the batch size is not known.
    nbytes: int | None = None


@dataclass(frozen=True)
class Module:
    """A module that has tensors (not only its children), or collectives."""

    name: str
    #: Its class.
    type: str
    #: The names of its variables.
    variables: tuple[str, ...] = ()
    before_forward: tuple[Collective, ...] = ()
    after_forward: tuple[Collective, ...] = ()
    before_backward: tuple[Collective, ...] = ()
    after_backward: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Description:
    """A model on one worker, from which programs are made."""

    #: ``os``, ``os_g`` or ``p_g_os``.
    level: str
    rank: int
    world: int
    #: In execution order.
    modules: tuple[Module, ...]
    variables: tuple[Variable, ...]
    #: Collectives on the outputs, before the loss.
    before_loss: tuple[Collective, ...] = ()
    #: Collectives on the loss, and at the start of backward.
    after_loss: tuple[Collective, ...] = ()
    #: Collectives on the gradients, before they are sent.
    after_backward: tuple[Collective, ...] = ()

    def serial(self) -> Description:
        """The description of the same model on a single worker, which holds the whole model."""
        modules = tuple(
            Module(module.name, module.type, module.variables) for module in self.modules
        )
        variables = tuple(
            replace(
                variable, box=Box.whole(variable.shape), contributes=True, uploads=True, note=""
            )
            for variable in self.variables
        )
        return Description(self.level, 0, 1, modules, variables)


@dataclass(frozen=True)
class Operation:
    """One operation of the worker."""

    #: ``join``, ``pull``, ``push``, ``forward``, ``loss``, ``backward``, ``collective`` or
    #: ``commit``.
    verb: str
    #: A tensor, a module, or the name of a collective.
    subject: str = ""
    #: The part of the tensor.
    box: Box | None = None
    #: The number of bytes that are transferred, if known.
    nbytes: int | None = None
    #: The participating ranks.
    group: tuple[int, ...] | None = None
    #: A remark.
    note: str = ""

    def __str__(self) -> str:
        parts = [f"{self.verb:<10}"]
        if self.subject:
            parts.append(self.subject)
        if self.box is not None:
            parts.append(str(self.box))
        if self.group is not None:
            parts.append(f"ranks {', '.join(map(str, self.group))}")
        if self.nbytes is not None:
            parts.append(f"{self.nbytes} bytes")
        if self.note:
            parts.append(f"({self.note})")
        return "  ".join(parts).rstrip()


@dataclass(frozen=True)
class Program:
    """The operations of a mode, in order.

    ``scope`` is ``"dist"`` (the operations of this worker) or ``"serial"`` (those of a single
    worker with the whole model), ``kind`` is ``"main"`` (for each call) or ``"startup"`` (once,
    before the first call). ``str`` returns a listing.
    """

    mode: str
    scope: str
    kind: str
    level: str
    rank: int
    world: int
    variables: tuple[Variable, ...] = field(repr=False)
    operations: tuple[Operation, ...] = field(repr=False)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __len__(self) -> int:
        return len(self.operations)

    def find(self, verb: str) -> list[Operation]:
        """The operations with this verb, in order."""
        return [operation for operation in self.operations if operation.verb == verb]

    def bytes(self, verb: str) -> int:
        """The number of bytes that the operations with this verb transfer, as far as they are
        known."""
        return sum(operation.nbytes or 0 for operation in self.find(verb))

    def __str__(self) -> str:
        lines = [
            f"{self.scope} {self.kind} program of {self.mode}, level {self.level}, "
            f"rank {self.rank} of {self.world}",
            "variables",
        ]
        for variable in self.variables:
            marks = [
                f"shape {list(variable.shape)}",
                variable.dtype,
                f"resident {variable.box}" if variable.resident else f"pulled {variable.box}",
                "trained" if variable.trained else "",
                variable.note,
            ]
            lines.append(f"    {variable.name}  " + "  ".join(mark for mark in marks if mark))
        lines.append("operations")
        lines += [f"{number:4}  {operation}" for number, operation in enumerate(self.operations)]
        return "\n".join(lines)


def make_program(description: Description, mode: str, scope: str, kind: str) -> Program:
    """The program of a mode.

    Raises :class:`~zeroshard.InvalidArgumentError` if mode, scope or kind is unknown.
    """
    for name, value, allowed in (
        ("mode", mode, MODES),
        ("scope", scope, SCOPES),
        ("kind", kind, KINDS),
    ):
        if value not in allowed:
            raise InvalidArgumentError(
                f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}"
            )
    if scope == "serial":
        description = description.serial()
    if kind == "startup":
        operations = _startup(description, mode)
    elif mode == "train":
        operations = _train(description)
    else:
        operations = _forward(description)
        if mode == "eval":
            operations += _loss(description)
    return Program(
        mode,
        scope,
        kind,
        description.level,
        description.rank,
        description.world,
        description.variables,
        tuple(operations),
    )


def _startup(description: Description, mode: str) -> list[Operation]:
    """For training, creates the job with the values of rank 0. Otherwise there is nothing to do."""
    if mode != "train":
        return []
    note = f"job of {description.world} rank{'s' if description.world != 1 else ''}"
    operations = [Operation("join", note=note)]
    for variable in description.variables:
        if variable.uploads:
            operations.append(_moved("push", variable, "initial value"))
    for variable in description.variables:
        if variable.resident and not variable.uploads:
            operations.append(_moved("pull", variable, "initial value"))
    return operations


def _forward(description: Description) -> list[Operation]:
    operations: list[Operation] = []
    for module in description.modules:
        operations += _collectives(module.before_forward)
        operations += _fetched(description, module)
        operations.append(Operation("forward", module.name, note=module.type))
        operations += _collectives(module.after_forward)
    return operations


def _train(description: Description) -> list[Operation]:
    """Gradients are pushed as soon as they are computed; at level ``os``, after the backward
    pass."""
    operations = [*_forward(description), *_loss(description)]
    by_name = {variable.name: variable for variable in description.variables}
    sent: list[Operation] = []
    seen: set[str] = set()
    for module in reversed(description.modules):
        operations += _collectives(module.before_backward)
        operations += _fetched(description, module)
        operations.append(Operation("backward", module.name, note=module.type))
        operations += _collectives(module.after_backward)
        for variable in (by_name[name] for name in module.variables):
            # The gradient of a tied tensor is complete after the backward of its first module.
            first = next(other for other in description.modules if variable.name in other.variables)
            if (
                first is not module
                or variable.name in seen
                or not (variable.trained and variable.contributes)
            ):
                continue
            seen.add(variable.name)
            push = _moved("push", variable, "gradient")
            (sent if description.level == "os" else operations).append(push)
    operations += _collectives(description.after_backward)
    operations += sent
    operations.append(Operation("commit", note="the servers sum, clip, step and publish"))
    operations += [
        _moved("pull", variable, "new version")
        for variable in description.variables
        if variable.resident and variable.trained
    ]
    return operations


def _loss(description: Description) -> list[Operation]:
    return [
        *_collectives(description.before_loss),
        Operation("loss"),
        *_collectives(description.after_loss),
    ]


def _fetched(description: Description, module: Module) -> list[Operation]:
    """Pulls the variables of the module that are not resident."""
    by_name = {variable.name: variable for variable in description.variables}
    needed = (by_name[name] for name in module.variables)
    return [_moved("pull", variable, "") for variable in needed if not variable.resident]


def _moved(verb: str, variable: Variable, note: str) -> Operation:
    return Operation(verb, variable.name, variable.box, variable.nbytes, note=note)


def _collectives(collectives: tuple[Collective, ...]) -> list[Operation]:
    return [
        Operation("collective", each.name, None, each.nbytes, each.group) for each in collectives
    ]
