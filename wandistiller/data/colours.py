"""Pictures of every mode of Pillow as 8-bit sRGB: depth, colour profile, and alpha over a background."""

import io
import re
import struct
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageColor

from wandistiller.data.videos import SDR_TRANSFERS, SRGB_PRIMARIES
from wandistiller.distributed import collectives
from wandistiller.utils.errors import problem

RGB = tuple[int, int, int]
WHITE: RGB = (255, 255, 255)
SAME = 2
"""Levels of 255; a profile that moves no colour further is sRGB, and the pixels stay as they are."""
SIDE = 9
"""Colours along each axis of the lattice that tells whether a profile is sRGB."""
MODE_OF = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}
"""Mode of the pixels that a profile is for, by its colour space."""


CODED_BYTES = 2**20
"""Bytes at a file's beginning in which it says how its colours are coded."""
PNG_BEGIN = b"\x89PNG\r\n\x1a\n"


class DepthError(ValueError):
    """The file does not say which of its numbers is white."""


def background_of(name: str) -> RGB:
    """Return the colour of a name or of #rrggbb. Raises ValueError for anything else, and for alpha."""
    if len(colour := ImageColor.getrgb(name)) != 3:
        raise ValueError(f"{name}: a background has no alpha")
    return colour


def background_problems(name: str) -> list[str]:
    """List the problem of a background that is no colour."""
    try:
        background_of(name)
    except ValueError:
        return [problem("recipe", "background", name, "Write a colour: white, black, or #rrggbb.")]
    return []


def to_srgb(image: Image.Image, background: RGB = WHITE) -> Image.Image:
    """Convert to RGB in sRGB, its transparent parts over `background`.

    Raises:
        DepthError: 32-bit or floating-point numbers, whose white is not known.
    """
    image.load()
    profile = image.info.get("icc_profile")
    opaque, alpha = _parts(_eight_bit(image))
    rgb = _in_srgb(opaque, profile) if profile else opaque.convert("RGB")
    if alpha is None:
        return rgb
    return Image.composite(rgb, Image.new("RGB", rgb.size, background), alpha)


def coded_colours_problem(path: Path) -> str | None:
    """Return why a picture's colours cannot be read: HDR, or primaries wider than sRGB's without a profile.

    Source: code points of ITU-T H.273, in a PNG's chunk cICP (PNG, third edition) or the box colr of AVIF
    and HEIF (ISO/IEC 23008-12). A gain map makes a picture no HDR: its base is SDR, and is what is read.
    """
    with path.open("rb") as stream:
        head = stream.read(CODED_BYTES)
    if head.startswith(PNG_BEGIN):
        found = [
            struct.unpack("BB", part) for part in re.findall(rb"\x00\x00\x00\x04cICP(..)", head, re.DOTALL)
        ]
    elif head[4:8] == b"ftyp":
        found = [struct.unpack(">HH", part) for part in re.findall(rb"colrnclx(....)", head, re.DOTALL)]
    else:
        return None
    for primaries, transfer in found:
        if transfer not in SDR_TRANSFERS:
            name = {16: "PQ", 18: "HLG"}.get(transfer, f"transfer function {transfer} of H.273")
            return f"is an HDR picture ({name}); save it as SDR, in sRGB"
        if primaries not in SRGB_PRIMARIES and b"colrprof" not in head:
            wide = f"primaries {primaries} of H.273"
            return f"has wider colours than sRGB ({wide}) and no colour profile; save it in sRGB"
    return None


def _eight_bit(image: Image.Image) -> Image.Image:
    """Return greys of more bits as L, or as LA: by the full range of their bits, rounded.

    16-bit colours are 8-bit already: Pillow takes their upper byte.
    """
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PPM", "PNG")):
        kind = "floating-point" if image.mode == "F" else "32-bit or signed"
        raise DepthError(f"has {kind} numbers, whose white is not known; save it with 8 or 16 bits")
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


def _in_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert from the profile's colours; by the mode alone if the profile is damaged or for another."""
    space, transform = _transform(profile)
    if space == "L" and image.mode == "RGB":  # a palette of greys
        image = image.convert("L")
    if space == "RGB" and image.mode == "L":
        image = image.convert("RGB")
    if transform is None or space != image.mode:
        return image.convert("RGB")
    return ImageCms.applyTransform(image, transform)


@lru_cache(maxsize=64)
def _transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """Return the mode that a profile is for and its way to sRGB; None if it is sRGB, or cannot be used."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        mode = MODE_OF.get(source.profile.xcolor_space, "")
        transform = ImageCms.buildTransform(
            source,
            ImageCms.createProfile("sRGB"),
            mode or "RGB",
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        collectives.log0(
            "media     a colour profile cannot be used, its pictures are taken as sRGB: %s", reason
        )
        return "", None
    if mode in ("RGB", "L"):
        axis = np.linspace(0, 255, SIDE if mode == "RGB" else 256).round().astype(np.uint8)
        grid = np.stack(np.meshgrid(*[axis] * 3), -1).reshape(1, -1, 3) if mode == "RGB" else axis[None]
        lattice = Image.fromarray(np.ascontiguousarray(grid))
        moved = np.asarray(ImageCms.applyTransform(lattice, transform)).astype(int)
        if np.abs(moved - np.asarray(lattice.convert("RGB"))).max() <= SAME:
            return mode, None
    return mode, transform
