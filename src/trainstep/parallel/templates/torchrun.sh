#!/bin/sh
# Run a distributed command on several nodes: start this on every node with the same settings.
#
#   NODES=2 RANKS_PER_NODE=8 RENDEZVOUS=first-node:29400 sh torchrun.sh -m benchmarks parallel --ranks 16 --batch 16
#
# RENDEZVOUS is a host and a free port that every node reaches; JOB tells jobs on the same hosts apart.
set -eu
: "${NODES:?how many nodes}" "${RANKS_PER_NODE:?one a device}" "${RENDEZVOUS:?host:port of the first node}"
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${JOB:-trainstep}" \
    --max-restarts 0 "$@"
