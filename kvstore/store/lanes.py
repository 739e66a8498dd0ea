"""What tenants move over disks, bucket and network: each at its own rate, and in turns by bytes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvstore.settings import TenantSettings
from kvstore.system.bandwidth import Channel, ChannelLane, Lane
from kvstore.system.rounds import Rounds, RoundUser

TCP_ROUND_NBYTES = 256 << 10  # of the tenant of weight 1: what a loop moves in less than 0.1 ms


@dataclass(frozen=True, slots=True)
class Lanes:
    """What one tenant may move. Disks have turns of their own, by thread: see `TurnPool`.

    recall_turn: held while a few of the runs that were found on disk are indexed.
    """

    file_read: Lane
    object: ChannelLane
    tcp: Lane
    recall_turn: asyncio.Lock
    _tcp_round: RoundUser

    def set(self, tenant: TenantSettings) -> None:
        """Take a tenant's settings, as they are now."""
        self.file_read.set_rate(tenant.bandwidth_file_read_bytes)
        self.object.set_rate(tenant.bandwidth_object_bytes)
        self.object.queue.weight = tenant.weight
        self.tcp.set_rate(tenant.bandwidth_tcp_bytes)
        self._tcp_round.round_nbytes = max(1, int(TCP_ROUND_NBYTES * tenant.weight))


class LaneMaker:
    """What the lanes of all tenants share. bucket_nbytes: what may be on its way to the bucket."""

    def __init__(self, bucket_nbytes: int) -> None:
        self._bucket = Channel(bucket_nbytes)
        self._rounds = Rounds()
        self.recall_turn = asyncio.Lock()

    def lanes(self, tenant: TenantSettings) -> Lanes:
        tcp = RoundUser(self._rounds, TCP_ROUND_NBYTES)
        bucket = ChannelLane(self._bucket, tenant.weight)
        lanes = Lanes(
            file_read=Lane(),
            object=bucket,
            tcp=Lane(rounds=tcp),
            recall_turn=self.recall_turn,
            _tcp_round=tcp,
        )
        lanes.set(tenant)
        return lanes
