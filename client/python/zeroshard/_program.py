"""Programs: what one worker does in a mode of a :class:`DistModel`, as a list of operations that
can be read.

A program is made from a :class:`Description` of the model alone, before anything runs. The words
are the same for every framework, and in Rust.

    description = Description(level="os_g", rank=0, world=2, modules=(...), variables=(...))
    print(make_program(description, "train", "dist", "main"))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .errors import InvalidArgumentError

MODES = ("train", "eval", "predict")
SCOPES = ("dist", "serial")
KINDS = ("main", "startup")


@dataclass(frozen=True)
class Box:
    """A part of a tensor: its first element, and how many there are, in each dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.size)

    def __str__(self) -> str:
        ranges = zip(self.offset, self.size, strict=True)
        return f"[{', '.join(f'{first}:{first + size}' for first, size in ranges)}]"


@dataclass(frozen=True)
class Variable:
    """A tensor of the model, as one worker has it."""

    name: str
    #: Of the logical tensor.
    shape: tuple[int, ...]
    #: As the framework calls it, without a prefix: ``float32``.
    dtype: str
    #: Bytes of an element.
    itemsize: int
    #: The worker's part.
    box: Box
    #: Whether the servers step it.
    trained: bool
    #: Whether the worker keeps it between uses; else it is pulled for each.
    resident: bool = True
    #: Whether this worker's gradient counts; False where another worker has the same one.
    contributes: bool = True
    #: Whether this worker's initial value counts: the servers have it from the first worker of each
    #: box.
    uploads: bool = True
    #: What else is to be said of it: its placements on a mesh.
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the worker's part."""
        return self.box.numel * self.itemsize


@dataclass(frozen=True)
class Collective:
    """Something that the workers of a group do together."""

    #: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``broadcast``.
    name: str
    #: Their ranks.
    group: tuple[int, ...]
    #: Bytes that this worker gives; None while the size of a batch is not known.
    nbytes: int | None = None


@dataclass(frozen=True)
class Module:
    """A module with tensors of its own, or with collectives."""

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
    """What programs are made from: a model as one worker sees it."""

    #: ``os``, ``os_g`` or ``p_g_os``.
    level: str
    rank: int
    world: int
    #: In the order in which they run.
    modules: tuple[Module, ...]
    variables: tuple[Variable, ...]
    #: What the loss needs of the outputs.
    before_loss: tuple[Collective, ...] = ()
    #: What makes the loss of one worker that of all, and what backward begins with.
    after_loss: tuple[Collective, ...] = ()
    #: What gradients need before they are sent.
    after_backward: tuple[Collective, ...] = ()

    def serial(self) -> Description:
        """The same model on one worker that is alone, and has all of it."""
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
    """One thing that the worker does."""

    #: ``join``, ``pull``, ``push``, ``forward``, ``loss``, ``backward``, ``collective`` or
    #: ``commit``.
    verb: str
    #: A tensor of the manifest, a module, or a collective's name.
    subject: str = ""
    #: The part of the tensor.
    box: Box | None = None
    #: Bytes that move; None where none do, or their number is not known.
    nbytes: int | None = None
    #: Ranks that take part.
    group: tuple[int, ...] | None = None
    #: What else is to be said.
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

    ``scope`` is ``"dist"`` (what this worker does) or ``"serial"`` (what one worker alone would do
    with the whole model), ``kind`` is ``"main"`` (each call) or ``"startup"`` (once, before).
    ``str`` makes a listing.
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
        """The operations of one kind, in order."""
        return [operation for operation in self.operations if operation.verb == verb]

    def bytes(self, verb: str) -> int:
        """Bytes that the operations of one kind move, as far as they are known."""
        return sum(operation.nbytes or 0 for operation in self.find(verb))

    def __str__(self) -> str:
        lines = [
            f"{self.scope} {self.kind} program of {self.mode}, level {self.level}, rank {self.rank} of {self.world}",
            "variables",
        ]
        for variable in self.variables:
            marks = [
                f"shape {list(variable.shape)}",
                variable.dtype,
                f"here {variable.box}" if variable.resident else f"pulled {variable.box}",
                "trained" if variable.trained else "",
                variable.note,
            ]
            lines.append(f"    {variable.name}  " + "  ".join(mark for mark in marks if mark))
        lines.append("operations")
        lines += [f"{number:4}  {operation}" for number, operation in enumerate(self.operations)]
        return "\n".join(lines)


def make_program(description: Description, mode: str, scope: str, kind: str) -> Program:
    """The program of a mode.

    Raises :class:`~zeroshard.InvalidArgumentError` where mode, scope or kind is none that there is.
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
    """A training job is made on the servers, and everybody has rank 0's values; else there is
    nothing to do."""
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
    """Gradients leave as they are made, or at level ``os`` once all are there."""
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
            # A tied tensor's gradient is complete only when the first of its modules has been
            # passed.
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
    """What the module needs and is not here."""
    by_name = {variable.name: variable for variable in description.variables}
    needed = (by_name[name] for name in module.variables)
    return [_moved("pull", variable, "") for variable in needed if not variable.resident]


def _moved(verb: str, variable: Variable, note: str) -> Operation:
    return Operation(verb, variable.name, variable.box, variable.nbytes, note=note)


def _collectives(collectives: tuple[Collective, ...]) -> list[Operation]:
    return [
        Operation("collective", each.name, None, each.nbytes, each.group) for each in collectives
    ]
