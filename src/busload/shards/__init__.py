"""One bus over several databases: each domain lives in one of them."""

from busload.shards.bus import ShardedBus
from busload.sync.shards import SyncShardedBus

__all__ = ["ShardedBus", "SyncShardedBus"]
