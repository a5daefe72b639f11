#!/usr/bin/env bash
# The tests, in the environment of quickstart.sh.
#   bash launch/test.sh            the default suite: about 9 minutes on two cores
#   bash launch/test.sh --all      also the tests marked slow and multinode: over two hours
#   bash launch/test.sh --simulated-gpu    those on simulated GPUs, slow ones too: up to an hour
#   bash launch/test.sh -x -k flow    other arguments go to pytest
source "$(dirname "$0")/env.sh"
if [ -e /usr/include/libaio.h ]; then
  (build async_io AsyncIOBuilder "asynchronous disk access, a few minutes") || echo "it does not build, so tests with it fail" >&2
else
  echo "libaio is missing, so the tests of a teacher on NVMe are skipped; on Debian or Ubuntu: apt install libaio-dev"
fi
export OMP_NUM_THREADS=1 # two ranks must not fight for two cores
marks="not slow and not multinode"
[ "$gpus" ] || marks+=" and not gpu"
words=()
for word; do
  case $word in
    --all) marks="" && (pip install -q datasets==5.2.0 || true) ;; # 300 MB, which these tests alone need
    --simulated-gpu) marks=simulated ;;
    *) words+=("$word") ;;
  esac
done
ruff check .
# Three workers on two cores, as many tests wait for processes. A file stays on one worker, as its tests share runs; files go
# in order (tests/integration, the longest, before tests/unit), so that no worker is left alone with a long one.
exec python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "$marks" "${words[@]}"
