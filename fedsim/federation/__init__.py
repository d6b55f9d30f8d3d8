"""The federation: rounds on the server's side. A strategy that keeps every reply and lets another
aggregate, the checkpoint it goes on from, the grids and engines that reach its clients."""
