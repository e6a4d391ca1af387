"""Integration with the ``Trainer`` of Hugging Face Transformers.

The trainer creates its accelerator, model and optimizer itself. :class:`ShardedTraining` gives it
the :class:`~zeroshard.integrations.accelerate.Accelerator` of ZeroShard; the model and the files
that it writes are those of Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._versions import check_versions
from ..errors import InvalidArgumentError
from ..torch import GroupSharded
from ._missing import missing
from ._private import LoadsValues

try:
    import transformers
except ImportError as error:
    raise missing("transformers", error) from error

from .accelerate import Accelerator

__all__ = ["Seq2SeqTrainer", "ShardedTraining", "Trainer"]


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
