"""The examples of the integrations learn, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

from test_examples import EXAMPLES, TORCHRUN, run

#: The continuation of a text that counts upwards.
COUNTING = re.compile(r"\d+( \d+){11}$")


def counts(printed: str) -> bool:
    """Returns whether the last line ends with numbers that count upwards, modulo 32."""
    found = COUNTING.search(printed.strip())
    assert found, printed
    numbers = [int(number) for number in found.group().split()]
    return all((number + 1) % 32 == following for number, following in zip(numbers, numbers[1:]))


def test_accelerate() -> None:
    printed = run(EXAMPLES / "accelerate_loop.py", launcher=TORCHRUN)
    losses = [float(number) for number in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 6 and losses[-1] < losses[0] / 2
    assert counts(printed)


def test_transformers(tmp_path: Path) -> None:
    script = EXAMPLES / "transformers_trainer.py"
    printed = run(script, "--output", str(tmp_path), launcher=TORCHRUN)
    assert float(re.findall(r"evaluated (\d+\.\d+)", printed)[0]) < 2.0
    assert counts(printed)


def test_lightning() -> None:
    printed = run(EXAMPLES / "lightning_strategy.py", "--devices", "2")
    assert float(re.findall(r"accuracy (\d\.\d+)", printed)[0]) > 0.8
