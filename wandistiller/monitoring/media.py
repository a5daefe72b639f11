"""Pictures and videos as parts of an HTML page that needs no other file and fits a phone."""

import base64
from html import escape
from pathlib import Path

from PIL import Image


def wide(content: str) -> str:
    """Let a part that is wider than the page scroll sideways, without the page."""
    return f'<div class="wide">{content}</div>'


def image(content: bytes, kind: str, name: str) -> str:
    """Show a picture of the MIME type image/`kind`."""
    return f'<img alt="{escape(name)}" src="{_data(content, f"image/{kind}")}">'


def shown(picture: Path, *, plays_at_once: bool = True) -> str:
    """Show a PNG or, where its animation is, the MP4 beside it with the PNG as poster, over and over.

    The poster's top is the animation's beginning. Without sound and inline, as phones ask for; there it is
    as wide as in the file, 44rem at most, and elsewhere as the page, but never over twice its width.
    """
    animation, content = picture.with_suffix(".mp4"), picture.read_bytes()
    if not animation.is_file():
        return wide(image(content, "png", picture.stem))
    with Image.open(picture) as opened:
        width = opened.width
    size = f"width: min(max(100%, min(44rem, {width}px)), {2 * width}px)"
    flags = f"controls{' autoplay' * plays_at_once} loop muted playsinline"
    sources = f'poster="{_data(content, "image/png")}" src="{_data(animation.read_bytes(), "video/mp4")}"'
    return wide(f'<video aria-label="{escape(picture.stem)}" {flags} style="{size}" {sources}></video>')


def _data(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
