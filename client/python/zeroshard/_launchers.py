"""The launchers of torch and Paddle, from which a process learns its rank and the rendezvous of the
ranks."""

from __future__ import annotations

import os
import socket
import sys
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

from .errors import NotInitialisedError, TimeoutError

LOOPBACK = "127.0.0.1"


class Launcher(ABC):
    """The launcher of a framework."""

    #: The environment variables of the rank and of the world size.
    variables: tuple[str, str]

    @abstractmethod
    def group(self) -> tuple[int, int] | None:
        """Rank and size of the default process group, if the program has initialised it."""

    @abstractmethod
    def store(self, rank: int, world: int, timeout: float) -> Any:
        """The store that all processes share. Rank 0 may serve it."""

    @abstractmethod
    def reachable_host(self) -> str:
        """The address at which the other ranks reach rank 0, which is this process: loopback if all
        ranks are on one machine."""


class Torch(Launcher):
    """``torchrun``, ``torch.multiprocessing.spawn``, ``torch.distributed``."""

    variables = ("RANK", "WORLD_SIZE")

    def group(self) -> tuple[int, int] | None:
        group = torch_distributed()
        return None if group is None else (group.get_rank(), group.get_world_size())

    def store(self, rank: int, world: int, timeout: float) -> Any:
        group = torch_distributed()
        if group is not None:
            from .torch._private import default_store

            return default_store()
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if address is None or port is None:
            raise NotInitialisedError(
                f"WORLD_SIZE is {world}, but MASTER_ADDR or MASTER_PORT is not set; call "
                "torch.distributed.init_process_group before zeroshard.init, or start the program "
                "with torchrun"
            )
        try:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]
        except ImportError:
            raise NotInitialisedError(
                f"WORLD_SIZE is {world}, and torch, whose store the ranks use, cannot be imported; "
                "install torch"
            ) from None
        # torchrun's agent serves the store. Without it rank 0 does, and a later init_process_group
        # uses the same store.
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            return TCPStore(
                address,
                int(port),
                world,
                is_master=rank == 0 and not agent,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except Exception as error:
            raise TimeoutError(
                f"rank {rank} cannot reach the store at {address}:{port}: {error}"
            ) from None

    def reachable_host(self) -> str:
        world = os.environ.get("WORLD_SIZE", "1")
        if os.environ.get("LOCAL_WORLD_SIZE", world) == world:
            return LOOPBACK
        return _resolved("MASTER_ADDR", os.environ.get("MASTER_ADDR", "localhost"))


class Paddle(Launcher):
    """``paddle.distributed.launch``, ``paddle.distributed.spawn``,
    ``paddle.distributed.init_parallel_env``."""

    variables = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")

    def group(self) -> tuple[int, int] | None:
        module = sys.modules.get("paddle.distributed")
        if module is None or not module.is_initialized():
            return None
        return module.get_rank(), module.get_world_size()

    def store(self, rank: int, world: int, timeout: float) -> Any:
        if not (os.environ.get("PADDLE_MASTER") or os.environ.get("PADDLE_TRAINER_ENDPOINTS")):
            raise NotInitialisedError(
                f"PADDLE_TRAINERS_NUM is {world}, but neither PADDLE_MASTER nor "
                "PADDLE_TRAINER_ENDPOINTS is set; start the program with "
                "python -m paddle.distributed.launch or paddle.distributed.spawn"
            )
        try:
            from .paddle._private import default_store
        except ImportError:
            raise NotInitialisedError(
                f"PADDLE_TRAINERS_NUM is {world}, and paddle, whose store the ranks use, cannot be "
                "imported; install paddlepaddle"
            ) from None
        try:
            # One store per process, which init_parallel_env uses as well.
            return default_store()
        except Exception as error:
            raise TimeoutError(f"rank {rank} cannot reach the store: {error}") from None

    def reachable_host(self) -> str:
        endpoints = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
        hosts = {endpoint.rpartition(":")[0] for endpoint in endpoints if endpoint}
        if len(hosts) < 2:
            return LOOPBACK
        own = os.environ.get("PADDLE_CURRENT_ENDPOINT", "")
        return _resolved("PADDLE_CURRENT_ENDPOINT", own.rpartition(":")[0])


#: In order of precedence.
ALL: tuple[Launcher, ...] = (Torch(), Paddle())


def torch_distributed() -> Any | None:
    """``torch.distributed``, if the program has initialised it."""
    module = sys.modules.get("torch.distributed")
    return (
        module if module is not None and module.is_available() and module.is_initialized() else None
    )


def _resolved(variable: str, host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise NotInitialisedError(
            f"{variable} is {host!r}, which cannot be resolved: {error}"
        ) from None
