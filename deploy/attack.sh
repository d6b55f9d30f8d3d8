#!/bin/sh
# Attacks a captured run on a Ray cluster. Ray wants a node of its own beside every driver: this one
# joins with no CPUs to offer, and is ended with the attacks, however these end.
set -eu
cluster=${1:?usage: attack.sh HOST:PORT RUN}
run=${2:?usage: attack.sh HOST:PORT RUN}
log=$(mktemp)
node=""
leave() {
    trap '' INT TERM
    if [ -n "$node" ]; then
        kill "$node" 2>/dev/null || :
        wait "$node" || :
    fi
    rm -f "$log"
}
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
ray start --address="$cluster" --num-cpus=0 --object-store-memory=1000000000 --block >"$log" 2>&1 &
node=$!
until grep -q "Ray runtime started" "$log"; do
    if ! kill -0 "$node" 2>/dev/null; then
        cat "$log" >&2
        exit 1
    fi
    sleep 0.2
done
# In the background, so that a signal is heeded at once.
${FEDSIM:-fedsim} attack-captured "$run" &
attack=$!
trap 'kill "$attack" 2>/dev/null; wait "$attack" || :; exit 130' INT
trap 'kill "$attack" 2>/dev/null; wait "$attack" || :; exit 143' TERM
wait "$attack"
