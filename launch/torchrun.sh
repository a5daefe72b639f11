#!/usr/bin/env bash
# torchrun, on one node or, started on each of them, on several:
#   RANKS=8 bash launch/torchrun.sh train --recipe ds_configs/recipes/quickstart.json
#   NODES=2 NODE_RANK=0 MASTER_ADDR=gpu01 RANKS=8 bash launch/torchrun.sh train --recipe ds_configs/recipes/quickstart.json
set -euo pipefail
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
RANKS=${RANKS:-$(python -c 'import torch; print(torch.cuda.device_count() or 1)')} # of this node
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + RANKS - 1) / RANKS))} # torchrun itself would leave each rank one core
# it would kill a rank 30 s after Ctrl-C, in the step that is to be saved
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-1800}
exec torchrun --nproc_per_node "$RANKS" --nnodes "${NODES:-1}" --node_rank "${NODE_RANK:-0}" \
  --master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "${MASTER_PORT:-29500}" -m wandistiller "$@"
