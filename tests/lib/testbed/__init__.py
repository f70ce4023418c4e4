"""What the distributed tests stand on: real gloo ranks, tiny models, and snapshots of them."""
