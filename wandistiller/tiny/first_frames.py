"""The toy world of the embedded image-to-video teacher: a given picture, which moves as the prompt says.

Scenes are those of `clips`, but their motion begins in the first frame, which is the same for all motions:
the picture alone says what is seen, the prompt alone how it moves. A tenth of the scenes is held out.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from wandistiller.tiny import clips
from wandistiller.tiny.clips import HELD_OUT, SEEN, ClipScene

TEMPLATES = (
    "{motion}",
    "it is {motion}",
    "the shape is {motion}",
    "a shape that is {motion}",
    "The shape is {motion}.",
)
"""The canonical wording first, then the paraphrases that the text encoder is also trained on."""
ATTRIBUTES = {"motion": clips.ATTRIBUTES["motion"]}
FOLDER = Path(__file__).parent / "first_frames"
ROWS = {"tiny-i2v": FOLDER / "seen.jsonl", "tiny-i2v:held_out": FOLDER / "held_out.jsonl"}
"""The embedded data: a prompt and a picture in each row."""
PICTURE = "{colour}_{shape}_on_{background}.png"


@dataclass(frozen=True)
class FirstFrameScene(ClipScene):
    """One clip, of which a prompt says the motion."""

    templates = TEMPLATES

    @property
    def picture(self) -> str:
        """Name of the file with its first frame."""
        return PICTURE.format(**vars(self))


SPECS = {name: FirstFrameScene(**vars(scene)) for name, scene in clips.SPECS.items()}
"""All scenes by the name that they have in `clips`."""
NAMES = {(scene.worded(0), scene.picture): name for name, scene in SPECS.items()}
"""Names of scenes by prompt and picture."""
__all__ = ["HELD_OUT", "NAMES", "ROWS", "SEEN", "SPECS", "render", "scene_name"]


def scene_name(prompt: str, image: Path | None) -> str:
    """Return the name of the scene of a prompt and its first frame; the prompt if they are of none."""
    return NAMES.get((prompt, image.name if image else ""), prompt)


def render(name: str, seed: int | None = None) -> Tensor:
    """Draw the clip of a scene: clip_CFHW, float32 in [0, 1]; see `clips.render`."""
    return clips.render(name, seed, begins=True)
