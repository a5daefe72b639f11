"""Call a function of a helper in a process group; started on each rank by `ranks.call`.

    python tests/helpers/call_on_rank.py FOLDER

FOLDER/call is the pickled function with its arguments, FOLDER/rank_N what it returned on rank N.
"""

import pickle
import sys
from pathlib import Path

from wandistiller.distributed import collectives
from wandistiller.engine.patches import patch_deepspeed

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    patch_deepspeed()
    collectives.init("warning")
    function, arguments = pickle.loads((folder / "call").read_bytes())
    result = function(*arguments)
    (folder / f"rank_{collectives.rank()}").write_bytes(pickle.dumps(result))
    collectives.destroy()
