"""The private names of Accelerate, Lightning and Transformers are in one file, and a version that
does not have one of them loses the features that need it and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zeroshard as zs
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from zeroshard.integrations.accelerate import Accelerator
from zeroshard.integrations.lightning import ZeroShardStrategy

from private_names import PACKAGE, Package
from removed_names import check_is_named, names, removed

LIBRARIES = ("transformers", "accelerate", "lightning")
NAMES = [path for library in LIBRARIES for path in names(library)]


def test_no_other_file_of_the_package_uses_a_private_name() -> None:
    outside = [use for use in Package(PACKAGE).outside() if use.file.startswith("integrations/")]
    assert [f"{use.file}:{use.line}: {use.text}" for use in outside] == []


def test_every_name_is_in_the_installed_versions() -> None:
    found = zs.check()
    assert found.lost == () and found.looked_for > len(NAMES) > 6
    assert {library.name for library in found.libraries if library.version is not None} >= {
        "torch",
        *LIBRARIES,
    }


@pytest.mark.parametrize("path", NAMES)
def test_a_missing_name_is_reported_with_what_is_lost(path: str) -> None:
    check_is_named(path)


def prepared() -> Any:
    """Trains a model with Accelerate for a step."""
    model = nn.Linear(2, 2)
    accelerator = Accelerator(
        cpu=True, level="os", kwargs_handlers=[DistributedDataParallelKwargs()]
    )
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(wrapped(torch.ones(1, 2)).sum())
    optimizer.step()


def test_the_features_of_missing_names_raise_errors_and_others_work(cluster: zs.Session) -> None:
    prepared()
    ZeroShardStrategy("os")
    of_accelerate, of_lightning = names("accelerate"), names("lightning")
    with removed(*of_accelerate):
        ZeroShardStrategy("os")
        with pytest.raises(zs.MissingNameError, match="Accelerator.prepare") as raised:
            prepared()
        assert raised.value.remedy.startswith("install accelerate>=")
    with removed(*of_lightning):
        prepared()
        with pytest.raises(zs.MissingNameError, match="lightning.*install lightning>="):
            ZeroShardStrategy("os")
