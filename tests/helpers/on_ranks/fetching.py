"""Called on ranks by test_train.py: when each of them looks at its teacher's weights."""

import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from wandistiller.cli import train
from wandistiller.distributed import collectives
from wandistiller.wan.folder import WanFolder
from wandistiller.wan.pipeline import open_wan


def looks(wan: Path) -> tuple[float, float]:
    """Return when this rank began and ended to look; the first takes its time, as a download does."""
    seen, require_weights = [], WanFolder.require_weights

    def look(folder: WanFolder) -> None:
        seen.append(time.monotonic())
        time.sleep(0.5 * (collectives.rank() == 0))
        require_weights(folder)
        seen.append(time.monotonic())

    with patch.object(WanFolder, "require_weights", look):
        train._require_weights([SimpleNamespace(folder=open_wan(str(wan)))] * 2)
    begin, end = seen
    return begin, end
