#!/bin/sh
# Makes the keys of a deployment and hands each part to whom it belongs: DIR/shared (the authority's
# certificate, public keys) for everybody, DIR/server for the SuperLink, DIR/front (certificate and
# key in one file) for the front, DIR/node-N for a SuperNode, DIR/ray (a token) for the nodes of a
# Ray cluster.
# Keys that were handed out already are kept. What is handed out last is the front's: where that is
# missing, as after a kill, all are made again.
set -eu
umask 077
target=${1:?usage: make-keys.sh DIR NODES [HOST...]}
nodes=${2:?usage: make-keys.sh DIR NODES [HOST...]}
shift 2
if [ ! -s "$target/ray/token" ]; then
    mkdir -p "$target/ray"
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$target/ray/.token"
    mv "$target/ray/.token" "$target/ray/token"
fi
if [ -s "$target/front/front.pem" ]; then
    echo "keys are there already"
    exit 0
fi
hosts=""
for host in "${@:-superlink}"; do hosts="$hosts --host $host"; done
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
# shellcheck disable=SC2086 # one option a host
${FEDSIM:-fedsim} keys "$made" --nodes "$nodes" $hosts
mkdir -p "$target/shared" "$target/server" "$target/front"
cp "$made"/ca.pem "$made"/*.pub "$target/shared/"
number=0
while [ "$number" -lt "$nodes" ]; do
    mkdir -p "$target/node-$number"
    cp "$made/node-$number" "$target/node-$number/key"
    number=$((number + 1))
done
cp "$made/server.pem" "$made/server.key" "$target/server/"
cat "$made/server.pem" "$made/server.key" >"$target/front/.front.pem"
mv "$target/front/.front.pem" "$target/front/front.pem"
