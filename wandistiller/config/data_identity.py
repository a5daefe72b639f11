"""The data of a run as one digest, for checkpoints."""

from wandistiller.config.run_config import RunConfig
from wandistiller.data.colours import WHITE, background_of
from wandistiller.data.dataset import MediaType, PromptDataset
from wandistiller.data.latent_cache import Rollouts
from wandistiller.data.media import LETTERBOX, Size
from wandistiller.utils.files import digest


def data_digest(
    items: PromptDataset, run: RunConfig, rollouts: Rollouts, size: Size, buckets: list[Size]
) -> str:
    """Hash the prompts, the names of media, and all settings that samples are made by.

    Later settings count where they are not the default and there are media that they change, so that the
    digests of earlier runs stay.
    """
    background, more = background_of(run.background), []
    if background != WHITE and items.first(MediaType.IMAGE, MediaType.GIF):
        more.append(background)
    if run.fit == LETTERBOX and items.first(MediaType.IMAGE, MediaType.GIF, MediaType.VIDEO):
        more += [run.fit, background]
    if run.clips_per_video > 1 and items.first(MediaType.GIF, MediaType.VIDEO):
        more.append(f"{run.clips_per_video} clips")
    return digest(items.digest, *map(str, (rollouts, size, buckets)), run.video_fps, *more)
