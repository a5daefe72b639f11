#!/usr/bin/env bash
# The whole test suite, in the environment of quickstart.sh. Arguments go to pytest: bash launch/test.sh -k noise
source "$(dirname "$0")/env.sh"
if [ -e /usr/include/libaio.h ]; then
  build async_io AsyncIOBuilder "asynchronous disk access, a few minutes"
else
  echo "libaio is missing, so the tests of a teacher on NVMe are skipped; on Debian or Ubuntu: apt install libaio-dev"
fi
[ "${DS_ACCELERATOR-}" != cpu ] || build fused_adam FusedAdamBuilder "Adam of students that are not offloaded"
export OMP_NUM_THREADS=1 # two ranks must not fight for two cores
ruff check .
python -m pytest -q -n 2 --dist loadfile "$@"
