"""Pictures of every mode and format become 8-bit sRGB: depth, profiles, alpha over a background."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from wandistiller.data import buckets
from wandistiller.data.colours import to_srgb
from wandistiller.data.media import MediaError, MediaReader, Size

SIDE = 16
COLOUR = (200, 40, 90)
GREY = 90  # = luma of COLOUR, below
GREYS = {"1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I;16N"}
MODES = [*sorted(GREYS), *"P PA RGB RGBA RGBa RGBX CMYK YCbCr LAB HSV".split()]


def plain(mode: str, side: int = SIDE) -> Image.Image:
    """One colour in any mode: COLOUR, or GREY of as many bits, or white of one bit."""
    if mode.startswith("I;16"):
        return Image.new(mode, (side, side), GREY * 257)
    if mode == "La":
        return Image.new("LA", (side, side), (GREY, 255)).convert("La")
    if mode == "LAB":
        to_lab = ImageCms.buildTransform(
            ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB"
        )
        return ImageCms.applyTransform(plain("RGB", side), to_lab)
    if mode == "1":
        return Image.new("1", (side, side), 1)
    if mode in GREYS:
        return Image.new("L", (side, side), GREY).convert(mode)
    if mode == "RGBa":
        return plain("RGBA", side).convert("RGBa")
    if mode in ("P", "PA"):
        return Image.new("RGB", (side, side), COLOUR).quantize(4).convert(mode)
    return Image.new("RGB", (side, side), COLOUR).convert(mode)


def expected(mode: str) -> tuple[int, int, int]:
    return (255,) * 3 if mode == "1" else (GREY,) * 3 if mode in GREYS else COLOUR


def assert_colour(image: Image.Image, colour: tuple[int, int, int], loss: int) -> None:
    assert image.mode == "RGB"
    off = np.abs(np.asarray(image).astype(int) - colour)
    assert off.max() <= loss, (image.getpixel((3, 3)), colour)


@pytest.mark.parametrize("mode", MODES)
def test_a_colour_in_any_mode_stays_that_colour(mode: str) -> None:
    assert_colour(to_srgb(plain(mode)), expected(mode), 3)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bits_of_grey_are_divided_by_257(tmp_path: Path, kind: str) -> None:
    values = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    Image.fromarray(values).save(tmp_path / "a", kind)
    with Image.open(tmp_path / "a") as image:
        assert np.asarray(to_srgb(image))[..., 0].ravel().tolist() == list(range(256))


@pytest.mark.parametrize("mode", ["F", "I"])
def test_numbers_whose_white_is_not_known_are_passed_over_with_the_reason(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (SIDE, SIDE), 100).save(tmp_path / "a.tif")
    with pytest.raises(MediaError, match=r"which number is white in its mode"):
        MediaReader(16.0).read(tmp_path / "a.tif", Size(SIDE, SIDE, 1))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "La"])
@pytest.mark.parametrize("background", [(255, 255, 255), (0, 0, 255)])
def test_a_half_transparent_colour_is_the_mean_with_the_background(
    mode: str, background: tuple[int, int, int]
) -> None:
    grey = mode in GREYS
    own, base = ((GREY,) * 3, "LA") if grey else (COLOUR, "RGBA")
    image = Image.new(base, (4, 4), (*(own[:1] if grey else own), 128))
    if mode == "PA":
        alpha, image = image.getchannel("A"), plain("PA", 4)
        image.putalpha(alpha)
    mean = tuple(round((a * 128 + b * 127) / 255) for a, b in zip(own, background, strict=True))
    assert_colour(to_srgb(image if mode == "PA" else image.convert(mode), background), mean, 2)


@pytest.mark.parametrize("name", ["a.png", "a.gif", "bytes.png", "colour.png", "a.webp"])
def test_hidden_colour_does_not_show(tmp_path: Path, name: str) -> None:
    file, more = tmp_path / name, {}
    image = Image.new("RGBA", (SIDE, SIDE), (*COLOUR, 0))
    if name == "bytes.png":
        image, more = plain("RGB").quantize(4), {"transparency": bytes(4)}
    elif name == "colour.png":
        image, more = plain("RGB"), {"transparency": COLOUR}
    image.save(file, **more)
    pixels_CFHW = MediaReader(16.0, (255, 0, 0)).read(file, Size(SIDE, SIDE, 1))
    assert pixels_CFHW[:, 0, 5, 5].tolist() == [1, -1, -1]


def test_an_image_without_profile_or_with_that_of_srgb_keeps_its_bits(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for more in ({}, {"icc_profile": srgb}, {"icc_profile": srgb[:200]}, {"icc_profile": b"none"}):
        noise.save(tmp_path / "a.png", **more)
        with Image.open(tmp_path / "a.png") as image:
            assert to_srgb(image).tobytes() == noise.tobytes()


def swapped_profile() -> bytes:
    """sRGB's profile with the tags of red and blue exchanged: RGB files with it have BGR pixels."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return profile.replace(b"rXYZ", b"tmp0").replace(b"bXYZ", b"rXYZ").replace(b"tmp0", b"bXYZ")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_colours_of_a_profile_become_those_of_srgb(mode: str) -> None:
    file = io.BytesIO()
    plain(mode).save(file, "PNG", icc_profile=swapped_profile())
    with Image.open(file) as image:
        assert_colour(to_srgb(image), COLOUR[::-1], 2)


def with_cicp(file: Path, primaries: int, transfer: int) -> Path:
    """Write a grey PNG with a chunk cICP, or an AVIF whose box says the same."""
    if file.suffix == ".png":
        Image.new("RGB", (16, 16), "grey").save(file)
        whole, chunk = file.read_bytes(), b"cICP" + bytes([primaries, transfer, 0, 1])
        file.write_bytes(
            whole[:33] + struct.pack(">I", 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) + whole[33:]
        )
        return file
    Image.new("RGB", (16, 16), "grey").save(file)
    whole = file.read_bytes()
    place = whole.index(b"colrnclx") + 8
    file.write_bytes(whole[:place] + struct.pack(">HH", primaries, transfer) + whole[place + 4 :])
    return file


@pytest.mark.parametrize("name", ["a.png", "a.avif"])
@pytest.mark.parametrize(
    ("primaries", "transfer"), [(9, 16), (9, 18), (1, 8), (12, 13)], ids=["PQ", "HLG", "linear", "P3"]
)
def test_pictures_whose_code_points_are_not_srgb_are_named(
    tmp_path: Path, name: str, primaries: int, transfer: int
) -> None:
    reason = rf"is an HDR or wide-gamut picture \(primaries {primaries}, transfer function {transfer} of"
    with pytest.raises(MediaError, match=reason):
        MediaReader(16.0).read(with_cicp(tmp_path / name, primaries, transfer), Size(16, 16, 1))


@pytest.mark.parametrize("name", ["a.png", "a.avif"])
def test_pictures_whose_code_points_are_srgb_s_are_read(tmp_path: Path, name: str) -> None:
    pixels_CFHW = MediaReader(16.0).read(with_cicp(tmp_path / name, 1, 13), Size(16, 16, 1))
    assert (pixels_CFHW - (128 / 127.5 - 1)).abs().max() < 0.02


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif", "a.gif", "a.avif", "a.webp"])
def test_postscript_and_other_formats_start_no_program(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/run\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    (tmp_path / name).write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n"
    )
    with pytest.raises(MediaError, match="cannot be read: "):
        MediaReader(16.0).read(tmp_path / name, Size(16, 16, 1))
    assert not (tmp_path / "run").exists() and buckets._dimensions(tmp_path / name) == (0, 0)


@pytest.mark.slow
def test_a_large_picture_is_read_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    Image.new("L", (10_000, 9_500)).save(tmp_path / "a.png")
    assert MediaReader(16.0).read(tmp_path / "a.png", Size(16, 16, 1)).min() == -1 and not recwarn.list
