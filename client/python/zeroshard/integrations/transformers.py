"""Integration with the ``Trainer`` of Hugging Face Transformers.

The trainer creates its accelerator, model and optimizer itself. :class:`ShardedTraining` gives it
the :class:`~zeroshard.integrations.accelerate.Accelerator` of ZeroShard; the model and the files
that it writes are those of Transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from .._versions import check_versions
from ..errors import InvalidArgumentError, TimeoutError, UnavailableError
from ..torch import GroupSharded
from ._missing import missing
from ._private import LoadsValues

try:
    import transformers
except ImportError as error:
    raise missing("transformers", error) from error

from ._generating import Generation
from ._generation import GenerationProcess, sharding_of
from .accelerate import Accelerator

__all__ = [
    "Generation",
    "GenerationCallback",
    "GenerationProcess",
    "Seq2SeqTrainer",
    "ShardedTraining",
    "Trainer",
]

_Result = TypeVar("_Result")


class ShardedTraining(LoadsValues):
    """Mixin for subclasses of ``transformers.Trainer``, to be named before them: ``class
    MyTrainer(ShardedTraining, SFTTrainer)``."""

    #: The trainer's settings, a ``transformers.TrainingArguments``.
    args: Any

    def __init__(
        self,
        *args: Any,
        level: str,
        sharding_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            level: ``"os"``, ``"os_g"`` or ``"p_g_os"``, as for
                :func:`~zeroshard.torch.group_sharded_parallel`.
            sharding_options: further arguments of that function, such as ``segment_size``.

        The other arguments are those of the trainer.
        """
        check_versions(("transformers",))
        self._sharding_arguments = (level, sharding_options)
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Replaces the accelerator that the trainer has created."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self.args.auto_find_batch_size:
            raise InvalidArgumentError(
                "auto_find_batch_size is True, which ZeroShard does not support, since the trainer "
                "would shard a sharded model again; set per_device_train_batch_size"
            )
        self.accelerator: Any = Accelerator.sharing(self.accelerator, *self._sharding_arguments)

    def _zeroshard_loaded(self) -> None:
        # The model may be sharded already.
        wrapped = getattr(self, "model_wrapped", None)
        if isinstance(wrapped, GroupSharded):
            wrapped.sharding.changes.take_values()


class Trainer(ShardedTraining, transformers.Trainer):
    """A ``transformers.Trainer`` whose model is trained by shard servers."""


class Seq2SeqTrainer(ShardedTraining, transformers.Seq2SeqTrainer):
    """A ``transformers.Seq2SeqTrainer`` whose model is trained by shard servers."""


class GenerationCallback(transformers.TrainerCallback):
    """Generates with the weights of a running training, in another process::

        callback = GenerationCallback(["Once upon a time"], every=100, max_new_tokens=20)
        trainer = Trainer(level="p_g_os", callbacks=[callback], processing_class=tokenizer, ...)

    The process has a model of its own, which follows the job (:func:`zeroshard.torch.follow`). The
    training continues meanwhile. If a text takes longer than ``every`` steps, the next one has the
    newest weights then. At the end of the training, the callback waits for the texts of the last
    version. If the process fails, a warning says why, and the training continues without texts.
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        on_text: Callable[[int, list[str]], object] = print,
        *,
        every: int = 1,
        make_model: Callable[[], Any] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        seconds: float = 600.0,
        **options: Any,
    ) -> None:
        """
        Args:
            prompts: texts, or conversations (lists of messages) for the chat template of the
                tokenizer, which is the ``processing_class`` of the trainer.
            on_text: a function of the number of the version and the list of texts, without their
                prompts. Rank 0 calls it between two steps.
            every: the number of steps between two requests.
            make_model, dtype, device: see :class:`GenerationProcess`.
            seconds: how long to wait for the last texts at the end of the training.
            options: arguments of the model's ``generate``, such as ``max_new_tokens``.

        Raises:
            InvalidArgumentError: ``every`` is less than 1.
        """
        if every < 1:
            raise InvalidArgumentError(f"every is {every}; it must be at least 1")
        self._prompts = list(prompts)
        self._on_text = on_text
        self._every = every
        self._making: dict[str, Any] = {"make_model": make_model, "dtype": dtype, "device": device}
        self._seconds = seconds
        self._options = options
        #: The process, while the trainer trains.
        self.process: GenerationProcess | None = None
        self._next = 0
        self._reported = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the process."""
        if not state.is_world_process_zero:
            return
        model, tokenizer = kwargs["model"], kwargs["processing_class"]
        if tokenizer is None:
            raise InvalidArgumentError(
                "the trainer has no tokenizer, which GenerationCallback needs; pass "
                "processing_class=tokenizer to the trainer"
            )
        sharding_of(model)
        self._close()
        self.process = GenerationProcess(model, tokenizer, seconds=self._seconds, **self._making)
        self._next = state.global_step + self._every
        self._reported = -1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reports texts that have arrived, and asks for the next ones if it is time."""
        if self.process is not None and self.process.is_ready():
            self._report()
        if self.process is None or self.process.is_busy or state.global_step < self._next:
            return
        self._ask()
        self._next = (state.global_step // self._every + 1) * self._every

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Waits for the texts of the last version, and ends the process."""
        if self.process is not None and self.process.is_busy:
            self._report()
        if self.process is not None and self._reported < sharding_of(kwargs["model"]).job.version:
            self._ask()
            self._report()
        self._close()

    def _ask(self) -> None:
        self._attempt(lambda process: process.ask(self._prompts, **self._options))

    def _report(self) -> None:
        found = self._attempt(GenerationProcess.answer)
        if found is not None:
            self._reported = found.version
            self._on_text(found.version, found.texts)

    def _attempt(self, operation: Callable[[GenerationProcess], _Result]) -> _Result | None:
        """Calls the process. Returns None if there is none, or it fails, which is a warning."""
        if self.process is None:
            return None
        try:
            return operation(self.process)
        except (UnavailableError, TimeoutError) as error:
            self._close()
            warnings.warn(f"the training continues without texts: {error}", stacklevel=2)
            return None

    def _close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.close()
