"""The random state of this process, which a step begins with."""

from __future__ import annotations

import base64
import random
import sys
from array import array
from typing import Any

from .errors import InvalidArgumentError


class RandomState:
    """The state of Python's ``random`` and, if the program has imported them, of ``numpy.random``,
    torch (CPU and CUDA) and Paddle."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    @classmethod
    def current(cls) -> RandomState:
        """The state of this process now."""
        values: dict[str, Any] = {"python": random.getstate()}
        numpy, torch, paddle = map(sys.modules.get, ("numpy", "torch", "paddle"))
        if numpy is not None:
            values["numpy"] = numpy.random.get_state()
        if torch is not None:
            values["torch"] = torch.get_rng_state()
            # Otherwise this would initialise CUDA.
            if torch.cuda.is_initialized():
                values["cuda"] = torch.cuda.get_rng_state_all()
        if paddle is not None:
            kinds = {"cpu", paddle.get_device().partition(":")[0]}
            values["paddle"] = {kind: paddle.get_rng_state(kind) for kind in sorted(kinds)}
        return cls(values)

    def restore(self) -> None:
        """Makes it the state of this process."""
        values, modules = self._values, sys.modules
        random.setstate(values["python"])
        if "numpy" in values:
            modules["numpy"].random.set_state(values["numpy"])
        if "torch" in values:
            modules["torch"].set_rng_state(values["torch"])
        if "cuda" in values:
            modules["torch"].cuda.set_rng_state_all(values["cuda"])
        for kind, states in values.get("paddle", {}).items():
            modules["paddle"].set_rng_state(states, kind)

    # ---- in checkpoints

    def to_json(self) -> dict[str, Any]:
        """The state as values of JSON."""
        version, words, gauss = self._values["python"]
        found: dict[str, Any] = {"python": [version, _text(array("I", words).tobytes()), gauss]}
        if "numpy" in self._values:
            state = self._values["numpy"]
            if not isinstance(state, tuple):
                raise InvalidArgumentError(
                    f"numpy.random uses {state['bit_generator']}, whose state zeroshard.steps does "
                    "not save in checkpoints; use numpy.random.seed, or a generator of your own "
                    "whose state is in the state of the checkpoints"
                )
            kind, keys, *rest = state
            found["numpy"] = [kind, _text(keys.tobytes()), *rest]
        if "torch" in self._values:
            found["torch"] = _text(self._values["torch"].numpy().tobytes())
        if "cuda" in self._values:
            found["cuda"] = [_text(one.numpy().tobytes()) for one in self._values["cuda"]]
        if "paddle" in self._values:
            found["paddle"] = {
                kind: [_from_generator(state) for state in states]
                for kind, states in self._values["paddle"].items()
            }
        return found

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> RandomState:
        """The inverse of :meth:`to_json`. A library that the program has not imported is omitted.

        Raises :class:`~zeroshard.InvalidArgumentError` if it has the state of other devices, or of
        another version of Paddle.
        """
        version, words, gauss = found["python"]
        values: dict[str, Any] = {"python": (version, tuple(array("I", _bytes(words))), gauss)}
        numpy, torch, paddle = map(sys.modules.get, ("numpy", "torch", "paddle"))
        if numpy is not None and "numpy" in found:
            kind, keys, *rest = found["numpy"]
            values["numpy"] = (kind, numpy.frombuffer(_bytes(keys), dtype=numpy.uint32), *rest)
        if torch is not None:
            if "torch" in found:
                values["torch"] = _tensor(torch, found["torch"])
            devices, saved = torch.cuda.device_count(), len(found.get("cuda", ()))
            if saved not in (0, devices):
                raise InvalidArgumentError(
                    f"the checkpoint has the random state of {saved} CUDA device(s), and this "
                    f"process has {devices}; start it with as many devices"
                )
            if saved:
                values["cuda"] = [_tensor(torch, one) for one in found["cuda"]]
        if paddle is not None and "paddle" in found:
            here = cls.current()._values["paddle"]
            counts = [{kind: len(of[kind]) for kind in of} for of in (found["paddle"], here)]
            if counts[0] != counts[1]:
                raise InvalidArgumentError(
                    f"the checkpoint has Paddle's random state of the devices {counts[0]}, and "
                    f"this process uses {counts[1]}; start it with the same kind and number of "
                    "devices"
                )
            values["paddle"] = {
                kind: [_generator(type(here[kind][0]), saved) for saved in states]
                for kind, states in found["paddle"].items()
            }
        return cls(values)


def _tensor(torch: Any, text: str) -> Any:
    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)


def _from_generator(state: Any) -> list[Any]:
    """The state of a generator of Paddle: its device, its seed, its offset, and its engine as text
    in the format of the standard library of C++."""
    try:
        device, seed, offset, engine = state.__getstate__()
        return [device, seed, offset, bytes(engine).decode()]
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            "the random state of this version of Paddle has an unknown format, and cannot be saved "
            "in a checkpoint; use Paddle 3.3"
        ) from error


def _generator(kind: Any, saved: list[Any]) -> Any:
    """The inverse of :func:`_from_generator`. ``kind``: Paddle's class of states, which has no
    constructor."""
    device, seed, offset, engine = saved
    state = kind.__new__(kind)
    try:
        state.__setstate__((device, seed, offset, list(engine.encode())))
        # Paddle ignores what it cannot read of the engine.
        is_same = _from_generator(state) == saved
    except (RuntimeError, TypeError):
        is_same = False
    if not is_same:
        raise InvalidArgumentError(
            "this version of Paddle cannot read the random state of the checkpoint; use the "
            "version that has written it"
        )
    return state


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
