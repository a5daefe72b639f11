"""Run on ranks by test_bad_input.py: many command lines in one process group, and their outcomes by rank.

    python -m torch.distributed.run --nproc_per_node=2 tests/helpers/bad_inputs_on_ranks.py CASES RESULTS

CASES: a JSON list of [folder, command line], with `{rank}` for the number of the rank.
"""

import dataclasses
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from bad_inputs import outcome

from wandistiller.distributed import collectives

if __name__ == "__main__":
    collectives.init("warning")
    found = []
    for folder, words in json.loads(Path(sys.argv[1]).read_text()):
        found.append(
            outcome([word.replace("{rank}", str(collectives.rank())) for word in words], Path(folder))
        )
        collectives.barrier()
    everyone = collectives.gather_objects([dataclasses.asdict(o) for o in found])
    if collectives.rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(everyone))
    collectives.destroy()
