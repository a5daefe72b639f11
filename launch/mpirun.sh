#!/usr/bin/env bash
# Open MPI's mpirun, on one node or on those that MPI names:
#   RANKS=8 bash launch/mpirun.sh train --recipe ds_configs/recipes/quickstart.json
#   RANKS=16 MPI="--host gpu01:8,gpu02:8 -x MASTER_ADDR=gpu01" bash launch/mpirun.sh train --recipe ds_configs/recipes/quickstart.json
set -euo pipefail
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
exec mpirun -n "${RANKS:?number of processes in all}" ${MPI:-} python -m wandistiller "$@"
