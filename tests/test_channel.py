"""Weights that cross to ranks which only generate."""

from __future__ import annotations

import torch

from rlrun.testing.ranks import ranks2  # noqa: F401


def weights():
    generator = torch.Generator().manual_seed(0)
    return [("a.odd", torch.randn(3, 5, generator=generator).bfloat16()), ("b", torch.randn(7, generator=generator)),
            ("c.scalar", torch.tensor(2.5, dtype=torch.float64)), ("d.empty", torch.zeros(0, 4)),
            ("e.strided", torch.randn(4, 6, generator=generator).T)]


def cross(bucket_bytes):
    from datetime import timedelta

    import torch.distributed as dist

    from rlrun.workers import channel

    channel.BUCKET_BYTES = bucket_bytes
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    there = channel.WeightChannel(dist.PrefixStore(str(bucket_bytes), store), rank, 2, torch.device("cpu"),
                                  timedelta(seconds=20))
    for _ in range(2):  # a channel serves every step
        received = there.send(weights()) if rank == 0 else [(name, t.clone()) for name, t in there.receive()]
    return received


def test_weights_arrive_bit_for_bit(ranks2):  # noqa: F811
    """Names, shapes, dtypes and bits, in buckets of one tensor and of all, on every use of the channel."""
    for size in (1, 1 << 20):
        _, received = ranks2.run(cross, size)
        assert [name for name, _ in received] == [name for name, _ in weights()]
        for (_, got), (_, sent) in zip(received, weights(), strict=True):
            assert got.dtype == sent.dtype
            assert got.shape == sent.shape
            assert torch.equal(got, sent)
