"""Generates with followed weights in another process, for trainers of Transformers."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

from .._core.sharded_models import find
from .._core.sharding import Sharding
from ..errors import InvalidArgumentError, TimeoutError, UnavailableError
from ._generating import Failure, Generation, Job, Request, Setting

#: What the new interpreter runs. multiprocessing would first run the user's script again, which may
#: lack a guard. The setting is received before the imports, which take seconds.
_PROGRAM = """\
import json, sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
setting = pipe.recv_bytes()
sys.path[:] = json.loads(sys.argv[2])
from zeroshard.integrations._generating import run
run(pipe, setting)
"""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Seconds in which the process ends after its pipe was closed, if it does not generate.
_END = 5.0


def sharding_of(model: Any) -> Sharding[Any]:
    """The sharded model that has the parameters of ``model``.

    Raises:
        InvalidArgumentError: the model is not sharded.
    """
    found = find(model.parameters())
    if found is None:
        raise InvalidArgumentError(
            f"a {type(model).__name__} is not sharded, and nobody can follow it; train it with a "
            "trainer of zeroshard.integrations.transformers"
        )
    return found


class GenerationProcess:
    """A process that generates with the newest weights of a sharded model.

    The process has a model of its own and follows the job. The ranks that train send it nothing but
    requests, and need not gather a sharded model::

        with GenerationProcess(model, tokenizer) as process:
            found = process.generate(["Once upon a time"], max_new_tokens=20)
            print(found.version, found.texts)

    You may create it before the model is sharded. It imports its libraries in the meantime.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        make_model: Callable[[], Any] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        seconds: float = 600.0,
    ) -> None:
        """
        Args:
            model: the model that is trained.
            tokenizer: its tokenizer.
            make_model: a function that returns a model with the same tensors as ``model``. The
                process must be able to import it, so define it in a module and not in your script.
                By default, the process makes a model of the same class with the same ``config``.
            dtype: the dtype of the parameters of the process's model: bfloat16, float16 or float32.
            device: the device of the process's model.
            seconds: how long to wait for an answer.

        Raises:
            InvalidArgumentError: the process cannot make the model, or has no such dtype.
        """
        if dtype not in _DTYPES:
            raise InvalidArgumentError(
                f"dtype is {dtype}; it must be one of {', '.join(map(str, _DTYPES))}"
            )
        self._model = model
        self._seconds = seconds
        setting = Setting(make_model or _maker_of(model), tokenizer, dtype, device, seconds)
        message = _pickled(setting)
        self._pipe, theirs = multiprocessing.Pipe()
        handle = theirs.fileno()
        arguments = [str(handle), json.dumps(sys.path)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[handle],
        )
        theirs.close()
        self._end = weakref.finalize(self, _end, self._process, self._pipe, os.getpid())
        self._is_busy = False
        self._send(message)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_busy(self) -> bool:
        """True if the process owes an answer, whether it is complete or not."""
        return self._is_busy

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Returns whether :meth:`answer` would return at once. Waits for at most ``seconds``."""
        return self._is_busy and self._pipe.poll(seconds)

    def ask(self, prompts: Sequence[Any], **options: Any) -> None:
        """Asks for texts of the newest version, and does not wait for them.

        Args:
            prompts: texts, or conversations (lists of messages) for the chat template of the
                tokenizer.
            options: arguments of the model's ``generate``, such as ``max_new_tokens``.

        Raises:
            InvalidArgumentError: the model is not sharded, or the process still owes an answer.
            UnavailableError: the process has ended.
        """
        if self._is_busy:
            raise InvalidArgumentError(
                "the process that generates still owes an answer; call answer() before you ask "
                "again"
            )
        job = sharding_of(self._model).job
        connection = job.connection
        name = Job(job.job.name, connection.cluster.address, connection.token)
        self._is_busy = True
        self._send(_pickled(Request(name, job.version, list(prompts), options)))

    def answer(self) -> Generation:
        """Waits for what :meth:`ask` has asked for, and returns it.

        Raises:
            UnavailableError: the process has failed or ended; the message says why.
            TimeoutError: the process has not answered within ``seconds``, and was ended.
        """
        try:
            if not self._pipe.poll(self._seconds):
                self.close()
                raise TimeoutError(
                    f"the process that generates has not answered within {self._seconds:g} s; "
                    "generate fewer tokens, or pass a larger value of seconds"
                )
            found = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._ended() from None
        if isinstance(found, Failure):
            self.close()
            raise UnavailableError(f"the process that generates has failed: {found.text}")
        self._is_busy = False
        assert isinstance(found, Generation), "the process sends nothing else"
        return found

    def generate(self, prompts: Sequence[Any], **options: Any) -> Generation:
        """Generates with the newest version. For arguments and errors see :meth:`ask` and
        :meth:`answer`."""
        self.ask(prompts, **options)
        return self.answer()

    def close(self) -> None:
        """Ends the process."""
        self._end()

    def __enter__(self) -> GenerationProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: bytes) -> None:
        try:
            self._pipe.send_bytes(message)
        except OSError:
            raise self._ended() from None

    def _ended(self) -> UnavailableError:
        self.close()
        return UnavailableError(
            f"the process that generates has ended with the exit code {self._process.returncode}; "
            "its last lines on standard error say why"
        )


def _end(process: subprocess.Popen[bytes], pipe: Connection, owner: int) -> None:
    pipe.close()
    if os.getpid() != owner:
        return  # a forked child: the process belongs to its parent
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END)
    process.kill()
    process.wait()


def _maker_of(model: Any) -> Callable[[], Any]:
    """A function that makes a model like ``model``, for another process."""
    kind = type(model)
    # A model with adapters has the config of the model inside.
    if not isinstance(model, transformers.PreTrainedModel) or kind.__module__ == "__main__":
        raise InvalidArgumentError(
            f"another process cannot make a {kind.__name__} from its config; pass make_model=..., "
            "a function of a module that returns a model with the same tensors"
        )
    return functools.partial(_make, kind, model.config, model.generation_config)


def _make(kind: Any, config: Any, generation_config: Any) -> Any:
    model = kind(config)
    model.generation_config = generation_config
    return model


def _pickled(message: object) -> bytes:
    try:
        return pickle.dumps(message)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidArgumentError(
            f"the process that generates cannot receive its arguments: {error}; pass functions and "
            "classes of modules"
        ) from error
