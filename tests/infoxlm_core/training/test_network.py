"""What NCCL says of its network becomes one line. Its words are those of public logs: none was seen here."""

import logging
import os
from pathlib import Path

import pytest
import torch

from infoxlm_core.training import distributed, network

INFINIBAND = """\
node-3:215:229 [0] NCCL INFO Bootstrap : Using enp220s0np0:11.1.128.128<0>
node-3:215:229 [0] NCCL INFO NET/Plugin: No plugin found, using internal implementation
node-3:215:229 [0] NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB enp220s0np0:11.1.128.8<0>
node-3:215:229 [0] NCCL INFO Using network IB
"""
TCP = """\
node-0:152:386 [0] NCCL INFO NET/IB : No device found.
node-0:152:386 [0] NCCL INFO NET/IB : No device found.
node-0:152:386 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0>
node-0:152:386 [0] NCCL INFO Initialized NET plugin Socket
node-0:152:386 [0] NCCL INFO Assigned NET plugin Socket to comm
"""
EFA = """\
node-0:172:172 [0] NCCL INFO NET/Plugin: Loaded net plugin Libfabric (v11)
node-0:172:172 [0] NCCL INFO Using network Libfabric
node-0:172:172 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 3 nics)
"""


@pytest.mark.parametrize(
    ("said", "name", "cards"),
    [
        (INFINIBAND, "IB", "NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB enp220s0np0:11.1.128.8<0>"),
        (TCP, "Socket", "NET/IB : No device found.; NET/Socket : Using [0]eth0:10.0.4.51<0>"),
        (EFA, "Libfabric", "NET/OFI Selected provider is efa, fabric is efa (found 3 nics)"),
        ("", "", ""),
    ],
)
def test_the_network_and_its_cards_are_read_from_nccl_s_log(said, name, cards):
    assert network.chosen(said) == (name, cards)


@pytest.fixture
def joined_by_nccl(monkeypatch, tmp_path):
    """Workers whose first sum makes NCCL write `said`, at the place where it was told to."""
    monkeypatch.setattr(network.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(network.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(network.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(distributed, "world_size", lambda: 16)
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def join(said: str) -> None:
        def first_sum(values: torch.Tensor) -> torch.Tensor:
            if os.environ.get("NCCL_DEBUG_SUBSYS") == "INIT,NET":
                Path(os.environ["NCCL_DEBUG_FILE"]).write_text(said)
            return values

        monkeypatch.setattr(distributed, "sum_over_workers", first_sum)

    return join


@pytest.mark.parametrize(("said", "local", "warned"), [(TCP, "8", True), (TCP, "16", False), (EFA, "8", False)])
def test_one_line_says_the_network_and_another_warns_of_tcp_between_nodes(
    joined_by_nccl, monkeypatch, caplog, tmp_path, said, local, warned
):
    joined_by_nccl(said)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    caplog.set_level(logging.INFO)

    network.tell()

    assert f"network between nodes: {network.chosen(said)[0]} (NET/" in caplog.text
    assert ("go over TCP" in caplog.text) == warned and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "value"), [("NCCL_DEBUG", "WARN"), ("NCCL_DEBUG_FILE", "/var/log/nccl.%h")])
def test_who_has_set_nccl_s_log_keeps_it(joined_by_nccl, monkeypatch, caplog, name, value):
    joined_by_nccl(TCP)
    monkeypatch.setenv(name, value)

    network.tell()

    assert "network" not in caplog.text and "NCCL_DEBUG_SUBSYS" not in os.environ and os.environ[name] == value
