"""Fixtures: the devices at hand, the test pair (with the properties that make it show bugs), the shipped pair."""

from __future__ import annotations

import gc
import os
import socket
import tempfile

import pytest
import torch
from doubles import mean_tv, memory_two_back, mix, random_gpt

from minispec import GPT, Pair, load_pair

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append("cuda")
if torch.backends.mps.is_available():
    DEVICES.append("mps")


def pytest_configure() -> None:
    torch.set_num_threads(1)  # the test models are tiny
    gc.set_threshold(100_000, 50, 50)  # batches of 5,000 rows are many small objects, and none of them garbage
    os.environ["MINISPEC_CACHE"] = tempfile.mkdtemp(prefix="minispec-plans-")  # never the user's own


LONG = (
    "test_trees",
    "test_chi_squared",
    "test_trees_exact",
    "test_long_runs",
    "test_shipped_pair",
    "test_peers",
    "test_train",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests of many seconds first: at the end two processes have short ones to share."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def two() -> tuple[GPT, GPT]:
    """Target and draft over three tokens in float64: different enough, and with a memory."""
    target = random_gpt(1)
    draft = mix(target, random_gpt(2), 0.2)
    assert 0.2 <= mean_tv(target, draft) <= 0.6
    assert memory_two_back(target) >= 0.1
    assert memory_two_back(draft) >= 0.1
    return target, draft


@pytest.fixture(scope="session")
def shipped() -> Pair:
    return load_pair()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here needs a network, and nothing gets one."""

    def refuse(self: socket.socket, address: object) -> None:
        raise AssertionError(f"the network was used: {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
