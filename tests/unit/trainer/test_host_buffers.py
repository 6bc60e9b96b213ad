"""Buffers of host memory for weights."""

import os

import pytest

from prime_rl.errors import UserError
from prime_rl.trainer.host_buffers import HostBuffers


@pytest.mark.parametrize("shared", [True, False])
def test_memory_that_is_not_there(shared: bool) -> None:
    """Contract: one line that says how much was wanted; nothing is left open, and asking again is no other error."""
    buffers = HostBuffers(1 << 60, shared=shared)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(UserError, match=r"no 1,152,921,504,606,846,976 bytes of host memory for the weights \("):
            buffers.allocate()
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_process_s_memory_that_cannot_be_mapped() -> None:
    """Contract: the same where one rank has no room for what another one made."""
    buffers = HostBuffers(1 << 60, shared=True)
    memory = os.memfd_create("test")
    os.ftruncate(memory, 1 << 62)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError, match="bytes of host memory for the weights"):
        buffers.adopt(memory)
    assert len(os.listdir("/proc/self/fd")) == before - 1, "it is the buffers' to close"
