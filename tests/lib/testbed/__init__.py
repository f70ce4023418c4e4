"""What many tests stand on: real gloo ranks, tiny models, checkpoints of any sharding, snapshots."""
