"""The reader of a run's media: each is known as it was when the run first looked at it."""

from dataclasses import dataclass, field
from pathlib import Path

from wandistiller.data.media import MediaReader, Size


@dataclass(frozen=True)
class KnownMedia(MediaReader):
    """A reader that keeps the keys, so that what is cached is found when a file changes or goes away."""

    _keys: dict[tuple[str, Size, int], str] = field(default_factory=dict, compare=False, repr=False)

    def key(self, path: Path, size: Size, clip: int = 0) -> str:
        """Return a key of what the file had when it was first asked for."""
        asked = str(path), size, clip
        if asked not in self._keys:
            self._keys[asked] = super().key(path, size, clip)
        return self._keys[asked]
