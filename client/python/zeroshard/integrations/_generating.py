"""The process that generates: it follows the job of a trainer, and answers its requests.

It has a copy of the model, and receives what each step has changed. The other end of its pipe is in
``_generation``.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from .._readers import cluster_at
from .._status import status_of
from ..errors import UnknownJobError
from ..torch import follow


@dataclass(frozen=True)
class Setting:
    """What the process receives first."""

    make_model: Callable[[], Any]
    tokenizer: Any
    dtype: torch.dtype
    device: str
    #: How long to wait for a version.
    seconds: float


@dataclass(frozen=True)
class Job:
    """Where a job is, and the token for it."""

    name: str
    address: str
    token: str | None


@dataclass(frozen=True)
class Request:
    """Asks for texts of the newest version, whose number is at least ``version``."""

    job: Job
    version: int
    prompts: Sequence[Any]
    #: The arguments of the model's ``generate``.
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Generation:
    """What a model has generated. The lists have an element for each text; if ``generate`` returns
    several for a prompt, they follow each other."""

    #: The number of steps after which the model had the values with which it generated.
    version: int
    #: The texts, without their prompts and without special tokens.
    texts: list[str]
    prompt_ids: list[list[int]]
    #: The tokens that follow the prompt, up to the first that ends a text.
    completion_ids: list[list[int]]


@dataclass(frozen=True)
class Failure:
    """The process ends because of an error."""

    text: str


class _Copy:
    """A model that follows a job."""

    def __init__(self, setting: Setting) -> None:
        model = setting.make_model()
        for parameter in model.parameters():
            # Buffers keep their dtype, as in the job.
            parameter.data = parameter.data.to(setting.dtype)
        self.model = model.to(setting.device).eval()
        self._setting = setting
        self._job: Job | None = None

    def follow(self, job: Job, number: int) -> int:
        """Gives the model the newest version, whose number is at least ``number``. Returns it."""
        if job != self._job:
            self._cluster = cluster_at(job.address, job.token)
            self._versions = follow(
                job.name,
                dtype=self._setting.dtype,
                seconds=self._setting.seconds,
                address=job.address,
                token=job.token,
            )
            self._job, self._version = job, None
        line = self._line(job)
        while self._version is None or self._version < (line, number):
            received = next(self._versions)
            received.apply(self.model)
            self._version = received.line, received.number
        return self._version[1]

    def _line(self, job: Job) -> int:
        for status in status_of(self._cluster).jobs:
            if status.name == job.name:
                return status.line
        raise UnknownJobError(f"job {job.name!r} does not exist any more; create it again")


def _generate(model: Any, tokenizer: Any, request: Request, version: int) -> Generation:
    encode = {"padding": True, "return_tensors": "pt"}
    prompts = list(request.prompts)
    if isinstance(prompts[0], str):
        given = tokenizer(prompts, **encode)
    else:
        given = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, return_dict=True, **encode
        )
    ids, mask = (given[name].to(model.device) for name in ("input_ids", "attention_mask"))
    options = {"pad_token_id": tokenizer.pad_token_id, **request.options}
    made = model.generate(input_ids=ids, attention_mask=mask, **options)
    made = made[:, 1 if model.config.is_encoder_decoder else ids.shape[1] :]
    config = options.get("generation_config", model.generation_config)
    ends = options.get("eos_token_id", config.eos_token_id)
    ends = ends if isinstance(ends, list) else [ends]
    completions = [_until(row, ends) for row in made.tolist()]
    rows = [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]
    each = len(completions) // len(rows)
    return Generation(
        version=version,
        texts=tokenizer.batch_decode(completions, skip_special_tokens=True),
        prompt_ids=[row for row in rows for _ in range(each)],
        completion_ids=completions,
    )


def _until(ids: list[int], ends: Sequence[int | None]) -> list[int]:
    """The tokens up to the first one of ``ends``, which is included."""
    length = next((index + 1 for index, token in enumerate(ids) if token in ends), len(ids))
    return ids[:length]


def _answer(pipe: Connection, setting: Setting) -> None:
    torch.seed()  # otherwise the processes of all ranks would draw the same numbers
    tokenizer = setting.tokenizer
    # The tokens that a prompt lacks come before it, so that all texts begin at the same position.
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    copy = _Copy(setting)
    while True:
        request: Request = pickle.loads(pipe.recv_bytes())
        version = copy.follow(request.job, request.version)
        pipe.send_bytes(pickle.dumps(_generate(copy.model, tokenizer, request, version)))


def run(pipe: Connection, setting: bytes) -> None:
    """Answers requests from a pipe until its other end is closed. ``setting``: a pickled
    :class:`Setting`."""
    # Ctrl-C interrupts the trainer, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _answer(pipe, pickle.loads(setting))
    except EOFError:
        return  # the trainer has closed the pipe, or has ended
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps(Failure(f"{type(error).__name__}: {error}")))
        raise
