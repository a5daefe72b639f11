"""For each machine and published Wan the fastest of the shipped JSONs that fit: the recipes in ds_configs/machines/ and a table.

    python tests/bench/machine_recipes.py             # prints the table of ds_configs/README.md
    python tests/bench/machine_recipes.py --write     # and writes the recipes anew
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]

from machines import FOLDER, HEAD, MACHINES, TEACHERS, best, recipe, row, write_wans  # noqa: E402

from wandistiller.files import write_json  # noqa: E402


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--write", action="store_true")
    write = made.parse_args().write
    print(HEAD, "|---" * (HEAD.count("|") - 1) + "|", sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        write_wans(Path(folder))
        for name, machine in MACHINES.items():
            for teacher in TEACHERS:
                choice, fits = best(Path(folder), teacher, machine)
                print(row(name, teacher, choice, fits), flush=True)
                if write and fits:
                    write_json(FOLDER / f"{name}_{teacher}.json", recipe(name, teacher, choice))


if __name__ == "__main__":
    main()
