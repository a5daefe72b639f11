#!/usr/bin/env bash
# Open MPI's mpirun, on one node or on those that it is told of:
#   RANKS=8 bash launch/mpirun.sh train --recipe ds_configs/recipes/quickstart.json
#   RANKS=16 MPI="--host gpu01:8,gpu02:8 -x MASTER_ADDR=gpu01" bash launch/mpirun.sh train --recipe ds_configs/recipes/quickstart.json
# MPICH and Intel MPI: the same, with MPI="-hosts gpu01,gpu02 -ppn 8 -genv MASTER_ADDR gpu01"
set -euo pipefail
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
exec mpirun -n "${RANKS:?number of processes in all}" ${MPI:-} python -m wandistiller "$@"
