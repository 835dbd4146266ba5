#!/usr/bin/env bash
# Trains on two nodes with torchrun. Run it on both; the first argument is the number of the node, the second
# the name or address of node 0, and what follows goes to digits.py:
#
#   node-a$ ./two_nodes.sh 0 node-a --max-epochs 3
#   node-b$ ./two_nodes.sh 1 node-a --max-epochs 3
#
# To have all processes started again when one has died, up to 3 times, and continue from the last checkpoint, which both
# nodes must be able to read:
#
#   node-a$ RESTARTS=3 ./two_nodes.sh 0 node-a --auto-resume
#   node-b$ RESTARTS=3 ./two_nodes.sh 1 node-a --auto-resume
#
# To see it without a second machine, run both on one, in two terminals, with 127.0.0.1 as the address.
# PROCESSES (on each node) is 1 unless you set it; PORT, where the nodes meet, is 29500.
set -euo pipefail

if (( $# < 2 )); then
  echo "usage: $0 NODE_NUMBER ADDRESS_OF_NODE_0 [OPTION OF digits.py]..." >&2
  exit 2
fi
node="$1" address="$2"
shift 2

cd "$(dirname "$0")"
exec torchrun --nnodes 2 --node-rank "$node" --nproc-per-node "${PROCESSES:-1}" --max-restarts "${RESTARTS:-0}" \
  --master-addr "$address" --master-port "${PORT:-29500}" \
  digits.py --num-nodes 2 --devices "${PROCESSES:-1}" "$@"
