"""The federation: rounds on the server's side. A strategy that records the replies and lets another
aggregate them, the checkpoint it goes on from, and the grids and engines by which it reaches its
clients."""
