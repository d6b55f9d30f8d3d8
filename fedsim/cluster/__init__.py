"""The cluster: a Ray to work on, near or far. The session of a run, a cluster on this machine that
stays up, the token it asks for, and the processes behind it."""
