"""Run on ranks by test_bad_input.py: many command lines in one process group, and what each came to on each rank.

    python -m torch.distributed.run --nproc_per_node=2 tests/bad_inputs_on_ranks.py CASES RESULTS

CASES: a JSON list of [folder, command line], with `{rank}` for the number of the rank.
"""

import dataclasses
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from bad_inputs import outcome  # noqa: E402

from wandistiller import distributed  # noqa: E402

if __name__ == "__main__":
    distributed.init("warning")
    found = []
    for folder, words in json.loads(Path(sys.argv[1]).read_text()):
        found.append(outcome([word.replace("{rank}", str(distributed.rank())) for word in words], Path(folder)))
        distributed.barrier()
    everyone = distributed.gather_objects([dataclasses.asdict(o) for o in found])
    if distributed.rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(everyone))
    distributed.finish()
