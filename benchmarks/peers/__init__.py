"""Other queues' workers and clients. Each module runs in its peer's own environment, and imports nothing of genpool but
`benchmarks.peers.dialogue`, which needs the standard library alone."""
