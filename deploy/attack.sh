#!/bin/sh
# Attacks a captured run on a Ray cluster. Ray wants a node of its own beside every driver: this one
# joins with no CPUs to offer, and leaves with the container.
set -eu
cluster=${1:?usage: attack.sh HOST:PORT RUN}
run=${2:?usage: attack.sh HOST:PORT RUN}
ray start --address="$cluster" --num-cpus=0 --object-store-memory=1000000000
exec fedsim attack-captured "$run"
