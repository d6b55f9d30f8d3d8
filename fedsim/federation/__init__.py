"""The federation: rounds on the server's side. A strategy that records the replies and lets another
aggregate them, the checkpoint it goes on from, the grids and engines that reach its clients."""
