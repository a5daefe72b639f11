#!/usr/bin/env bash
# The whole test suite, in the environment of quickstart.sh. Arguments go to pytest: bash launch/test.sh -k noise
source "$(dirname "$0")/env.sh"
export OMP_NUM_THREADS=1 # two ranks must not fight for two cores
ruff check .
python -m pytest -q "$@"
