"""Workers of vLLM that follow a job.

:class:`Follower` is a worker extension. vLLM fuses tensors and divides them among its workers, so
the extension gives it whole tensors with the names of a checkpoint, as a file would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgumentError, UnavailableError
from ..torch import follow
from ..torch._follow import Versions
from ._missing import missing

try:
    import transformers
    from vllm.distributed import get_world_group
except ImportError as error:
    raise missing("vllm", error) from error

__all__ = ["Follower"]


class Follower:
    """Methods that vLLM adds to its workers::

        llm = LLM(model, worker_extension_cls="zeroshard.integrations.vllm.Follower")
        llm.collective_rpc("follow_job", args=("train", "10.0.0.5:7400"))
        print(llm.collective_rpc("take_version"))
        llm.reset_prefix_cache()

    The first worker follows the job with a model in host memory, and sends its values to the
    others.
    """

    #: Members of the worker.
    model_config: Any
    reload_weights: Callable[..., None]

    _zeroshard_versions: Versions
    _zeroshard_model: Any

    def follow_job(self, job: str, address: str | None = None, mirror: str | None = None) -> None:
        """Prepares the workers to follow a job, and fetches nothing yet. The token is that of
        ``ZEROSHARD_TOKEN``. For the arguments and errors see :func:`zeroshard.torch.follow`.

        The model of the job must have the names of the model that Transformers makes from the same
        configuration.
        """
        dtype = self.model_config.dtype
        is_first = get_world_group().rank_in_group == 0
        # The others need only names and shapes.
        with torch.device("cpu" if is_first else "meta"):
            self._zeroshard_model = transformers.AutoModelForCausalLM.from_config(
                self.model_config.hf_config, dtype=dtype
            )
        if is_first:
            self._zeroshard_versions = follow(job, dtype=dtype, address=address, mirror=mirror)

    def take_version(self) -> int:
        """Waits for a version after the last one, and gives vLLM's model its values. Returns its
        number. Call ``reset_prefix_cache`` afterwards.

        Raises:
            InvalidArgumentError: :meth:`follow_job` was not called.
            TimeoutError, UnavailableError: the first worker has not received a version. The model
                is unchanged.
        """
        if not hasattr(self, "_zeroshard_model"):
            raise InvalidArgumentError("the workers follow no job; call follow_job before")
        number, error = -1, None
        if get_world_group().rank_in_group == 0:
            try:
                version = next(self._zeroshard_versions)
                version.apply(self._zeroshard_model)
                number = version.number
            except Exception as raised:  # the others wait
                error = raised
        number = int(_sent(torch.tensor(number)))
        if error is not None:
            raise error
        if number < 0:
            raise UnavailableError("the first worker has received no version; see its error")
        self.reload_weights(weights_iterator=self._zeroshard_values())
        return number

    def _zeroshard_values(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._zeroshard_model.named_parameters():
            value = parameter.detach()
            yield name, _sent(torch.empty_like(value, device="cpu") if value.is_meta else value)


def _sent(value: Tensor) -> Tensor:
    """Gives the tensor of the first worker to all."""
    group = get_world_group()
    if group.world_size > 1:
        torch.distributed.broadcast(value, group.ranks[0], group=group.cpu_group)
    return value
