"""The private names of Accelerate, Lightning and Transformers that the integrations use: what needs
each one, and what happens in a version that does not have it. No other file uses such a name.

The libraries are optional, and this file imports none of them. A use of a name that a version does
not have raises :class:`~zeroshard.MissingNameError`. :func:`zeroshard.check` lists the names that
the installed versions do not have.
"""

from __future__ import annotations

from typing import Any

from .._private_names import MentionedName as _mentioned

# ---- Accelerate

_PREPARE = ("Accelerator.prepare",)
_RAISES = "The use of the feature raises an error."
_MODELS = _mentioned("accelerate.Accelerator._models", _PREPARE, _RAISES, source="accelerator.py")
_OPTIMIZERS = _mentioned(
    "accelerate.Accelerator._optimizers", _PREPARE, _RAISES, source="accelerator.py"
)
_LOADERS = _mentioned(
    "accelerate.Accelerator._dataloaders",
    ("Accelerator.join_uneven_inputs(even_batches=...)",),
    _RAISES,
    source="accelerator.py",
)
_OVERFLOW = _mentioned(
    "accelerate.optimizer.AcceleratedOptimizer._is_overflow",
    ("schedulers of Accelerate with mixed_precision='fp16'",),
    "A scheduler moves on after a step that was skipped.",
    source="optimizer.py",
)


def prepared_models(accelerator: Any) -> list[Any]:
    """The models that an accelerator has prepared; what it changes takes effect."""
    found: list[Any] = _MODELS.of(accelerator)
    return found


def prepared_optimizers(accelerator: Any) -> list[Any]:
    """The optimizers that an accelerator has prepared; what it changes takes effect."""
    found: list[Any] = _OPTIMIZERS.of(accelerator)
    return found


def prepared_loaders(accelerator: Any) -> list[Any]:
    """The data loaders that an accelerator has prepared."""
    found: list[Any] = _LOADERS.of(accelerator)
    return found


def note_skipped(optimizer: Any, skipped: bool) -> None:
    """Tells the schedulers of a prepared optimizer whether its last step was skipped."""
    setattr(optimizer, _OVERFLOW.attribute, skipped)


# ---- Lightning

_STRATEGY = ("ZeroShardStrategy",)
_COMM_HOOK = _mentioned(
    "lightning.pytorch.strategies.DDPStrategy._ddp_comm_hook",
    _STRATEGY,
    _RAISES,
    source="pytorch/strategies/ddp.py",
)
_COMM_STATE = _mentioned(
    "lightning.pytorch.strategies.DDPStrategy._ddp_comm_state",
    _STRATEGY,
    _RAISES,
    source="pytorch/strategies/ddp.py",
)
_DDP_OPTIONS = _mentioned(
    "lightning.pytorch.strategies.DDPStrategy._ddp_kwargs",
    _STRATEGY,
    _RAISES,
    source="pytorch/strategies/ddp.py",
)


def has_comm_hook(strategy: Any) -> bool:
    """Returns whether a strategy was given a hook for the communication of gradients."""
    return _COMM_HOOK.of(strategy) is not None or _COMM_STATE.of(strategy) is not None


def ddp_options(strategy: Any) -> dict[str, Any]:
    """The arguments of DistributedDataParallel that a strategy was given; what it changes takes
    effect."""
    found: dict[str, Any] = _DDP_OPTIONS.of(strategy)
    return found


# ---- Transformers

_NOT_TAKEN = "The servers keep the values that they had before."
_LOAD = _mentioned(
    "transformers.Trainer._load_from_checkpoint",
    ("Trainer.train(resume_from_checkpoint=...)",),
    _NOT_TAKEN,
    source="trainer.py",
)
_LOAD_BEST = _mentioned(
    "transformers.Trainer._load_best_model",
    ("load_best_model_at_end of TrainingArguments",),
    _NOT_TAKEN,
    source="trainer.py",
)


class LoadsValues:
    """A trainer that learns when it has loaded values into its model. Precedes the class of the
    trainer."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        self._zeroshard_loaded()

    def _load_best_model(self) -> None:
        super()._load_best_model()  # type: ignore[misc]
        self._zeroshard_loaded()

    def _zeroshard_loaded(self) -> None:
        """The trainer has loaded values into its model."""
        raise NotImplementedError
