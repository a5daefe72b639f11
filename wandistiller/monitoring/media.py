"""Pictures and videos as parts of an HTML page that needs no other file and fits a phone."""

import base64
from html import escape
from pathlib import Path

from PIL import Image


def wide(content: str) -> str:
    """Let a part that is wider than the page scroll sideways, without the page."""
    return f'<div class="wide">{content}</div>'


def image(content: bytes, kind: str, name: str, style: str = "") -> str:
    """Show a picture of the MIME type image/`kind`."""
    return f'<img alt="{escape(name)}" style="{style}" src="{_data(content, f"image/{kind}")}">'


def still(picture: Path) -> str:
    """Show a PNG."""
    return image(picture.read_bytes(), "png", picture.stem, _size(picture))


def shown(picture: Path, *, plays_at_once: bool = True) -> str:
    """Show a PNG or, where its animation is, the MP4 beside it with the PNG as poster, over and over.

    Without sound and inline, as phones ask for. The poster's top is the animation's beginning, so that a
    browser that makes the poster as low as the animation shows that.
    """
    animation = picture.with_suffix(".mp4")
    if not animation.is_file():
        return still(picture)
    flags = f"controls{' autoplay' * plays_at_once} loop muted playsinline"
    poster, source = _data(picture.read_bytes(), "image/png"), _data(animation.read_bytes(), "video/mp4")
    name = f'aria-label="{escape(picture.stem)}" style="{_size(picture)}"'
    return f'<video {name} {flags} poster="{poster}" src="{source}"></video>'


def _size(picture: Path) -> str:
    """Fill the page with it, up to twice its width."""
    with Image.open(picture, formats=["PNG"]) as opened:
        return f"width: min(100%, {2 * opened.width}px)"


def _data(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
