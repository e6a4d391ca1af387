"""``init``, ``status`` and ``shutdown``: the cluster that this process uses."""

from __future__ import annotations

import atexit
import itertools
import json
import multiprocessing.util
import os
import pathlib
import re
import secrets
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ._connection import Connection
from ._credentials import tls_files, token_of
from ._native import Cluster, flush_traces
from ._rendezvous import Rendezvous, reachable_host, world_group
from ._status import Status
from ._versions import check_versions
from .errors import Error, InvalidArgumentError, NotInitialisedError, UnavailableError

_current: Session | None = None
_inits = itertools.count()

_MAX_NAME = 64


class Session:
    """The connection of this process to a cluster, created by :func:`init`. As a context manager,
    it closes the connection at the end of the block."""

    def __init__(self, connection: Connection, arguments: Mapping[str, Any]) -> None:
        self._connection = connection
        self._arguments = arguments

    @property
    def address(self) -> str:
        """The coordinator's ``host:port``."""
        return self._connection.cluster.address

    def status(self) -> Status:
        """Servers and jobs of the cluster.

        Raises:
            NotInitialisedError: the session was closed.
        """
        return self._connection.status()

    def again(self, arguments: Mapping[str, Any]) -> Session:
        """This session, for a further call of :func:`init`, as in a cell of a notebook.

        Raises:
            InvalidArgumentError: the arguments are not those of the first call.
        """
        changed = [name for name, value in arguments.items() if value != self._arguments[name]]
        if changed:
            raise InvalidArgumentError(
                f"zeroshard.init was called before with other values of {', '.join(changed)}; call "
                "zeroshard.shutdown() before you change them, and create the models again"
            )
        return self

    def close(self) -> None:
        """Leaves all jobs and disconnects. An embedded cluster stops when all ranks have left."""
        global _current
        if _current is self:
            _current = None
        self._connection.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def init(
    address: str | None = None,
    token: str | None = None,
    shards: int = 1,
    *,
    name: str | None = None,
    wire: str = "f32",
    parameter_wire: str | None = None,
    chunk_bytes: int = 1 << 20,
    transport: str | None = None,
    timeout: float = 600.0,
    deadline: float | None = None,
    connect_timeout: float = 10.0,
    replicas: int = 1,
    rounding_seed: int = 0,
) -> Session:
    """Connects this process to a cluster, or starts one. A further call with the same arguments
    returns the open session.

    Args:
        address: the coordinator's ``host:port``, or those of several coordinators, of which one is
            the leader, separated by commas; ``ZEROSHARD_ADDRESS`` by default. If neither is
            given, a cluster starts inside this process. With several ranks (``torchrun``,
            ``torch.multiprocessing.spawn``) rank 0 hosts it and the others connect to it.
        token: the cluster's secret; ``ZEROSHARD_TOKEN`` by default, or the content of the file
            ``ZEROSHARD_TOKEN_FILE``. A cluster that is started has a random one by default. With
            ``ZEROSHARD_TLS_CA``, the connections to a running cluster are encrypted, and a
            certificate (``ZEROSHARD_TLS_CERT`` and ``ZEROSHARD_TLS_KEY``) can replace the token.
            ``ZEROSHARD_TLS_CRL`` names revocation lists.
        shards: the number of shard servers of a cluster that is started.
        name: the first part of the names of this run's jobs, for ``zsctl status``, dashboards and
            checkpoints: letters, digits, ``.``, ``-`` and ``_``. By default the name of the script.
            With several ranks, that of rank 0 counts.
        wire: the encoding of gradients on the wire: ``"f32"``, ``"bf16"``, ``"f16"`` or
            ``"int8"``. With ``"int8"``, 128 elements share one scale and are rounded
            stochastically, without bias: a push has 0.26 of the bytes of ``"f32"``. The same
            script has the same bits on any number of servers, and after a fault.
        parameter_wire: the encoding of parameters on the wire, by default that of gradients, or
            ``"f32"`` if these are ``"int8"``. With another one than the parameters' dtype, the
            script computes with rounded parameters; those on the servers and in checkpoints are
            exact.
        chunk_bytes: the payload of one message.
        transport: ``"grpc"``, ``"shm"`` (shared memory; an error if a server is on another host) or
            ``"auto"`` (shared memory with servers on this host); ``ZEROSHARD_TRANSPORT`` by
            default, or ``"auto"``. It does not change any result.
        timeout: the maximum time of an operation in seconds, including the wait for a rank that
            evaluates or saves.
        deadline: another name for ``timeout``.
        connect_timeout: the maximum time in seconds until the coordinator answers. After a second
            without an answer, one line on standard error names the address.
        replicas: the number of shard servers that hold each part of a job. With 2 or more, training
            goes on when a server is lost; the step in which it is lost raises
            :class:`StepAbortedError`, and is run again.
        rounding_seed: the seed of the rounding to ``"int8"``.

    Raises:
        NotInitialisedError: the ranks cannot find each other.
        UnsupportedVersionError: ZeroShard is not tested with the imported version of torch or
            Paddle.
        InvalidArgumentError: the name has other characters, or a session with other arguments is
            open.
        UnavailableError: no coordinator answers at the address, which the message names together
            with the cause.
        TimeoutError: rank 0 does not answer.
        UnauthenticatedError: the token is missing or wrong.
        TlsError: one side does not trust the certificate of the other.
    """
    global _current
    timeout = timeout if deadline is None else deadline
    arguments = {
        "address": address,
        "token": token,
        "shards": shards,
        "name": name,
        "wire": wire,
        "parameter_wire": parameter_wire,
        "chunk_bytes": chunk_bytes,
        "transport": transport,
        "timeout": timeout,
        "connect_timeout": connect_timeout,
        "replicas": replicas,
        "rounding_seed": rounding_seed,
    }
    if _current is not None:
        return _current.again(arguments)
    check_versions(("torch", "paddle"))
    named, name = name is not None, _script() if name is None else _checked(name)
    world = world_group()
    number = next(_inits)
    address = address or os.environ.get("ZEROSHARD_ADDRESS") or None
    token = token_of(token)

    def connect(address: str, token: str | None, is_ours: bool) -> Cluster:
        return Cluster.connect(
            address,
            token=token,
            # A cluster that this program has started does not use TLS.
            tls=None if is_ours else tls_files(),
            wire=wire,
            parameter_wire=parameter_wire,
            chunk_bytes=chunk_bytes,
            transport=transport,
            timeout=timeout,
            connect_timeout=connect_timeout,
            replicas=replicas,
            rounding_seed=rounding_seed,
        )

    rendezvous = Rendezvous(world, timeout) if world.size > 1 else None
    if rendezvous is not None and world.rank > 0:
        shared = json.loads(
            rendezvous.receive(
                f"run/{number}", "rank 0 to connect; every rank must call zeroshard.init"
            )
        )
        if "error" in shared:
            raise UnavailableError(f"rank 0 could not connect: {shared['error']}")
        token = shared["token"]
        cluster = connect(shared["address"], token, shared["is_ours"])
        name, run, named = shared["name"], shared["run"], shared["named"]
    else:
        run = f"{name}-{secrets.token_hex(4)}"
        if address is not None:
            try:
                cluster = connect(address, token, False)
            except Error as error:
                if rendezvous is not None:
                    rendezvous.publish(f"run/{number}", json.dumps({"error": str(error)}))
                raise
        else:
            host = "127.0.0.1" if rendezvous is None else reachable_host()
            token = token or secrets.token_hex(16)
            cluster = Cluster.embedded(
                shards,
                host=host,
                token=token,
                wire=wire,
                parameter_wire=parameter_wire,
                chunk_bytes=chunk_bytes,
                transport=transport,
                timeout=timeout,
                replicas=replicas,
                rounding_seed=rounding_seed,
            )
        if rendezvous is not None:
            shared = {
                "address": cluster.address,
                "is_ours": address is None,
                "token": token,
                "name": name,
                "named": named,
                "run": run,
            }
            rendezvous.publish(f"run/{number}", json.dumps(shared))
    # The connection keeps the rendezvous: this process may serve the store, and other ranks may
    # still have to read it.
    wires = {"wire": wire, "parameter_wire": str(parameter_wire)}
    made = Connection(
        cluster, world, name, run, rendezvous, timeout, token=token, named=named, wires=wires
    )
    _current = Session(made, arguments)
    if multiprocessing.parent_process() is not None:
        # Processes that multiprocessing forks end without calling atexit handlers, and forget what
        # was registered before their function began, as the imports of a script are.
        multiprocessing.util.Finalize(None, shutdown, exitpriority=100)
    return _current


def _script() -> str:
    """The name of the running script."""
    stem = pathlib.Path(sys.argv[0] if sys.argv else "").stem
    return re.sub(r"[^A-Za-z0-9._-]", "_", stem.strip("-"))[:_MAX_NAME] or "python"


def _checked(name: str) -> str:
    if not re.fullmatch(rf"[A-Za-z0-9._-]{{1,{_MAX_NAME}}}", name):
        raise InvalidArgumentError(
            f"name is {name!r}; it must have 1 to {_MAX_NAME} letters, digits, '.', '-' and '_'"
        )
    return name


def connection() -> Connection:
    """The connection of the open session. Opens a session with the defaults if there is none.

    Raises:
        NotInitialisedError: the process group has changed since the session was opened.
    """
    session = _current if _current is not None else init()
    found, now = session._connection, world_group()
    if found.world != now:
        raise NotInitialisedError(
            f"zeroshard.init was called on rank {found.world.rank} of {found.world.size}, but this "
            f"process is now rank {now.rank} of {now.size}; call it after "
            "torch.distributed.init_process_group"
        )
    return found


def status() -> Status:
    """Servers and jobs of the cluster that this process uses."""
    if _current is None:
        raise NotInitialisedError("no session is open; call zeroshard.init() first")
    return _current.status()


def shutdown() -> None:
    """Closes the session, if one is open, and sends the last traces to the collector."""
    if _current is not None:
        _current.close()
    flush_traces()


atexit.register(shutdown)
