"""The campaign: from observations to reconstructions. The plan of a spec, its jobs, and the pools
of workers that do them, on this machine or on nodes that do not see its disk."""
