"""The pipelines that the package brings along, by their names."""

from pathlib import Path

FOLDERS = {"tiny": "pipeline", "tiny-video": "video_pipeline", "tiny-i2v": "image_pipeline"}
TINY = {name: Path(__file__).parent.parent / "tiny" / folder for name, folder in FOLDERS.items()}
