"""Pictures of every mode of Pillow as 8-bit sRGB: depth, colour profile, and alpha over a background."""

import io
import re
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageColor

from wandistiller.data.videos import SDR_TRANSFERS, SRGB_PRIMARIES
from wandistiller.distributed import collectives
from wandistiller.utils.errors import problem

RGB = tuple[int, int, int]
WHITE: RGB = (255, 255, 255)
MODE_OF = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}
"""Mode of the pixels that a profile is for, by its colour space."""
CODED_BYTES = 2**20
"""Bytes at a file's beginning in which it says how its colours are coded."""
CODED = re.compile(rb"\x00\x00\x00\x04cICP(.)(.)|colrnclx\x00(.)\x00(.)", re.DOTALL)
"""Primaries and transfer function by ITU-T H.273: in a PNG's chunk cICP (PNG, third edition), and in the box
colr of AVIF and HEIF (ISO/IEC 23008-12)."""


def background_of(name: str) -> RGB:
    """Return the colour of a name or of #rrggbb. Raises ValueError for anything else, and for alpha."""
    if len(colour := ImageColor.getrgb(name)) != 3:
        raise ValueError(f"{name}: a background has no alpha")
    return colour


def background_problems(name: str) -> list[str]:
    try:
        background_of(name)
    except ValueError:
        return [problem("recipe", "background", name, "Write a colour: white, black, or #rrggbb.")]
    return []


def to_srgb(image: Image.Image, background: RGB = WHITE) -> Image.Image:
    """Convert to RGB in sRGB, its transparent parts over `background`.

    Raises:
        ValueError: 32-bit or floating-point numbers, whose white is not known.
    """
    image.load()
    profile = image.info.get("icc_profile")
    opaque, alpha = _parts(_eight_bit(image))
    mode, transform = _transform(profile) if profile else ("", None)
    if {mode, opaque.mode} == {"L", "RGB"}:  # a palette of greys
        opaque = opaque.convert(mode)
    # by the mode alone if there is no profile, or it is damaged or for another mode
    rgb = ImageCms.applyTransform(opaque, transform) if mode == opaque.mode else opaque.convert("RGB")
    if alpha is None:
        return rgb
    return Image.composite(rgb, Image.new("RGB", rgb.size, background), alpha)


def coded_colours_problem(path: Path) -> str | None:
    """Return why a picture's colours cannot be read: HDR, or primaries wider than sRGB's without a profile.

    A gain map makes a picture no HDR: its base is SDR, and is what is read.
    """
    with path.open("rb") as stream:
        head = stream.read(CODED_BYTES)
    for match in CODED.finditer(head):
        primaries, transfer = (code[0] for code in match.groups() if code)
        is_wide = primaries not in SRGB_PRIMARIES and b"colrprof" not in head
        if transfer not in SDR_TRANSFERS or is_wide:
            codes = f"primaries {primaries}, transfer function {transfer} of ITU-T H.273"
            return f"is an HDR or wide-gamut picture ({codes}) without a profile; save it as SDR, in sRGB"
    return None


def _eight_bit(image: Image.Image) -> Image.Image:
    """Return greys of more bits as L, or as LA: by the full range of their bits, rounded.

    16-bit colours are 8-bit already: Pillow takes their upper byte.
    """
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PPM", "PNG")):
        raise ValueError(f"which number is white in its mode {image.mode} is not known; save 8 or 16 bits")
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return image
    tags = getattr(image, "tag_v2", {})  # of TIFF
    most = 2 ** tags.get(258, (16,))[0] - 1
    values_HW = np.asarray(image).astype(np.uint32)
    # pillow 13 turns 8-bit TIFFs whose 0 is white, but not those of 16 bits
    seen_HW = most - values_HW if tags.get(262) == 0 else values_HW
    grey = Image.fromarray(((seen_HW * 255 + most // 2) // most).clip(0, 255).astype(np.uint8))
    if (hidden := image.info.get("transparency")) is not None:
        grey.putalpha(Image.fromarray(np.where(values_HW == hidden, 0, 255).astype(np.uint8)))
    return grey


def _parts(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Return the picture without alpha, and its alpha if it has any."""
    if image.mode in ("La", "RGBa"):  # colours multiplied by alpha
        image = image.convert(image.mode.upper())
    elif image.mode == "PA" or image.has_transparency_data:
        image = image if image.mode in ("LA", "RGBA") else image.convert("RGBA")
    if image.mode in ("LA", "RGBA"):
        return image.convert(image.mode[:-1]), image.getchannel("A")
    return image if image.mode in ("L", "CMYK") else image.convert("RGB"), None


@lru_cache(maxsize=64)
def _transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """Return the mode that a profile is for and its way to sRGB; none if it is damaged."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        mode, srgb = MODE_OF[source.profile.xcolor_space], ImageCms.createProfile("sRGB")
        intent, flags = ImageCms.Intent.RELATIVE_COLORIMETRIC, ImageCms.Flags.BLACKPOINTCOMPENSATION
        return mode, ImageCms.buildTransform(source, srgb, mode, "RGB", intent, flags)
    except (ImageCms.PyCMSError, LookupError, OSError, ValueError, TypeError) as error:
        text = "media     a colour profile cannot be used, its pictures are taken as sRGB: %s"
        collectives.log0(text, (str(error) or repr(error)).splitlines()[0])
        return "", None
