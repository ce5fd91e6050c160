"""The Model Context Protocol, both ways: other servers' tools here, and ours for other programs."""
