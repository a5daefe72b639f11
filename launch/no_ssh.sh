#!/usr/bin/env bash
# Several nodes without ssh between them: start this on each, numbered from 0 in the order of the hostfile.
# DEEPSPEED="--exclude gpu03" and the like go to the launcher, the same on all nodes; who is left out has no number.
#   NODE_RANK=0 MASTER_ADDR=gpu01 bash launch/no_ssh.sh train --recipe ds_configs/recipes/quickstart.json
set -euo pipefail
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
. "$(dirname "$0")/hostfile.sh"
exec deepspeed --hostfile "$HOSTFILE" --no_ssh --node_rank "${NODE_RANK:?number of this node, from 0}" \
  --master_addr "${MASTER_ADDR:?name or address of node 0}" --master_port "${MASTER_PORT:-29500}" \
  ${DEEPSPEED:-} --module wandistiller "$@"
