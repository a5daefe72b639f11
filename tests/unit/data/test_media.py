"""Images and videos as pixels: turned, scaled to cover, cropped, thinned out in time, in the right bucket."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from grey_videos import numbers, video
from PIL import Image
from torch import Tensor

from wandistiller.data import buckets, media, videos
from wandistiller.data.buckets import make_buckets, media_dimensions, nearest_buckets
from wandistiller.data.media import MediaError, MediaReader, Size, video_problem


def load(path: Path, height: int = 16, width: int = 16, num_frames: int = 1, fps: float = 16.0) -> Tensor:
    return MediaReader(fps).read(path, Size(height, width, num_frames))


def picture(file: Path, array_HWC: np.ndarray, mode: str = "RGB") -> Path:
    Image.fromarray(array_HWC).convert(mode).save(file)
    return file


def noise_HWC(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_an_image_of_the_right_size_keeps_every_pixel_scaled_to_minus_1_and_1(tmp_path: Path) -> None:
    array = noise_HWC(16, 32)
    array[0, 0], array[0, 1] = 0, 255
    pixels_CFHW = load(picture(tmp_path / "a.png", array), 16, 32)
    assert pixels_CFHW.shape == (3, 1, 16, 32) and pixels_CFHW[:, 0, 0, 0].tolist() == [-1.0] * 3
    assert pixels_CFHW[:, 0, 0, 1].tolist() == [1.0] * 3
    actual_CHW = ((pixels_CFHW[:, 0] + 1) * 127.5).round().byte()
    assert actual_CHW.permute(1, 2, 0).tolist() == array.tolist()


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)], ids=["wide", "tall"])
def test_an_image_of_another_shape_is_cropped_in_the_middle(tmp_path: Path, shape: tuple[int, int]) -> None:
    array = np.zeros((*shape, 3), dtype=np.uint8)
    array[shape[0] // 2 - 8 : shape[0] // 2 + 8, shape[1] // 2 - 8 : shape[1] // 2 + 8] = 255
    assert torch.equal(load(picture(tmp_path / "a.png", array)), torch.ones(3, 1, 16, 16))


def test_a_small_image_is_enlarged_to_cover(tmp_path: Path) -> None:
    array = np.full((8, 8, 3), 51, dtype=np.uint8)
    pixels = load(picture(tmp_path / "a.png", array), 16, 32)
    torch.testing.assert_close(pixels, torch.full((3, 1, 16, 32), 51 / 127.5 - 1))


def test_a_photo_is_turned_as_its_camera_recorded(tmp_path: Path) -> None:
    array = np.zeros((16, 16, 3), dtype=np.uint8)
    array[:8] = 255  # bright above; orientation 3 means: show it upside down
    save_turned(tmp_path / "a.png", array, 3)
    pixels = load(tmp_path / "a.png")
    assert pixels[0, 0, 0, 0] == -1 and pixels[0, 0, -1, 0] == 1


def save_turned(file: Path, array_HWC: np.ndarray, orientation: int) -> Path:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(array_HWC).save(file, exif=exif)
    return file


def frames_of(file: Path, num_frames: int, fps: float = 16.0) -> list[int]:
    """Numbers of the frames that were taken, by their grey."""
    pixels_CFHW = load(file, 32, 32, num_frames, fps)
    return numbers(pixels_CFHW)


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [("a.mp4", 48, [1, 4, 7, 10, 13]), ("a.mp4", 24, [0, 2, 3, 5, 6]), ("a.gif", 50, [1, 4, 7, 10, 14])],
)
def test_a_faster_video_is_thinned_out_to_the_nearest_frames(
    tmp_path: Path, name: str, given: int, taken: list[int]
) -> None:
    assert frames_of(video(tmp_path / name, 20, given), 5) == taken


def test_only_the_frames_that_are_used_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, turned = videos._turned, []
    monkeypatch.setattr(videos, "_turned", lambda *given: turned.append(0) or turn(*given))
    assert frames_of(video(tmp_path / "a.mp4", 60), 5) == [0, 1, 2, 3, 4] and len(turned) == 5


@pytest.mark.parametrize("content", [b"", b"no medium", bytes(1000)])
@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.bmp", "a.mp4", "a.webm", "a.gif"])
def test_a_file_that_is_no_medium_cannot_be_read(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MediaError, match="cannot be read: "):
        load(tmp_path / name)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.bmp", "a.tif", "a.avif", "a.tga", "a.jp2"])
def test_an_image_that_is_cut_off_cannot_be_read(tmp_path: Path, name: str) -> None:
    whole = picture(tmp_path / name, noise_HWC(64, 64)).read_bytes()
    for share in (0.02, 0.2, 0.5, 0.9):
        (tmp_path / name).write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(MediaError, match="cannot be read: "):
            load(tmp_path / name)


DAMAGED = [f"a.{end}" for end in "png jpg webp bmp gif tif avif tga jp2 ppm".split()]


@pytest.mark.filterwarnings("ignore::Warning")  # Pillow's, of what it can still read
@pytest.mark.parametrize("times", [40, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["RGB", "P", "RGBA", "I;16"])
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_bytes_give_pixels_or_a_reason(tmp_path: Path, name: str, mode: str, times: int) -> None:
    random, image = np.random.default_rng(times), Image.fromarray(noise_HWC(64, 64))
    image = Image.new(mode, (64, 64), 9000) if mode == "I;16" else image.convert(mode)
    try:
        image.save(tmp_path / name)
    except (OSError, ValueError, KeyError):
        return  # the format has no such mode
    whole = (tmp_path / name).read_bytes()
    for _ in range(times):
        damaged = np.frombuffer(whole, np.uint8).copy()
        damaged[random.integers(0, min(len(damaged), 300), 4)] = random.integers(0, 256, 4)
        if random.random() < 0.2:
            damaged = damaged[: random.integers(0, len(damaged))]
        (tmp_path / name).write_bytes(damaged.tobytes())
        try:
            assert load(tmp_path / name).shape == (3, 1, 16, 16)
        except MediaError as error:
            assert str(error).startswith(("cannot be read: ", "is ", "has ")) and "\n" not in str(error)


def test_an_image_of_more_pixels_than_memory_is_not_decoded(tmp_path: Path) -> None:
    chunk = struct.pack(">IIBBBBB", 10**5, 10**5, 8, 2, 0, 0, 0)  # the header of 30 GB of pixels
    parts = [b"IHDR" + chunk, b"IDAT" + zlib.compress(bytes(10**6)), b"IEND"]
    framed = (len(p[4:]).to_bytes(4) + p + zlib.crc32(p).to_bytes(4) for p in parts)
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(framed))
    with pytest.raises(MediaError, match="decompression bomb"):
        load(tmp_path / "a.png")


def test_a_video_without_its_library_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert video_problem(tmp_path / "a.mp4") is None
    monkeypatch.setattr(media, "find_spec", lambda name: None)
    assert video_problem(tmp_path / "a.mp4").endswith("a.mp4: reading videos needs: pip install av.")


@pytest.mark.parametrize("size", [(480, 832), (64, 64), (720, 1280)])
def test_buckets_have_about_the_pixels_of_the_run_and_ratios_up_to_2(size: tuple[int, int]) -> None:
    buckets = make_buckets(*size, (16, 16))
    assert size in buckets and len(buckets) == len(set(buckets)) >= 3
    for height, width in buckets:
        assert height % 16 == width % 16 == 0 and 0.5 <= height / width <= 2
        assert height * width == pytest.approx(size[0] * size[1], rel=0.13)
    assert any(h > w for h, w in buckets) and any(h < w for h, w in buckets)


def test_a_medium_goes_to_the_bucket_of_the_nearest_aspect_ratio() -> None:
    buckets = [(48, 96), (64, 64), (96, 48)]
    shown = np.array([(480, 832), (100, 300), (1000, 1000), (98, 70), (832, 480), (300, 100), (100, 70)])
    nearest = [0, 0, 1, 1, 2, 2, 2]
    assert nearest_buckets(shown, buckets).tolist() == nearest
    assert nearest_buckets(shown, buckets[::-1]).tolist() == [2 - i for i in nearest]


def test_an_unreadable_medium_goes_to_the_most_common_bucket() -> None:
    shown = np.array([(9, 9), (0, 0), (1, 2), (2, 4)])
    assert nearest_buckets(shown, [(64, 64), (32, 64)]).tolist() == [0, 1, 1, 1]
    assert nearest_buckets(np.array([(0, 0)]), [(64, 64)]).tolist() == [0]


@pytest.mark.usefixtures("one_rank")
def test_dimensions_are_as_shown_cached_and_read_again_when_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        save_turned(tmp_path / "a.jpg", noise_HWC(24, 40), 6),
        picture(tmp_path / "b.png", noise_HWC(24, 40)),
        video(tmp_path / "c.mp4", 3, 8),
        tmp_path / "d.png",
    ]
    files[3].write_bytes(b"no medium")
    table, expected = tmp_path / "sizes.safetensors", [[40, 24], [24, 40], [32, 32], [0, 0]]
    assert media_dimensions(files.__getitem__, 4, table).tolist() == expected
    with monkeypatch.context() as without:
        without.setattr(buckets, "_dimensions", None)  # to read a file would raise
        assert media_dimensions(files[::-1].__getitem__, 4, table).tolist() == expected[::-1]
    picture(files[3], noise_HWC(7, 8))
    assert media_dimensions(files.__getitem__, 4, table).tolist() == [*expected[:3], [7, 8]]


@pytest.mark.parametrize("name", ["a.tif", "a.jpg", "a.png", "a.webp", "a.avif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_and_dimensions_are_as_shown_in_every_format_and_orientation(
    tmp_path: Path, name: str, orientation: int
) -> None:
    file = save_turned(tmp_path / name, np.zeros((24, 40, 3), dtype=np.uint8), orientation)
    expected = (40, 24) if orientation >= 5 else (24, 40)
    assert next(media.media_frames(file, 1.0)).size[::-1] == expected == buckets._dimensions(file)


def test_the_first_picture_of_a_camera_s_file_of_several_is_read(tmp_path: Path) -> None:
    pictures = [Image.new("RGB", (16, 16), colour) for colour in ("white", "black")]
    pictures[0].save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=pictures[1:])
    assert load(tmp_path / "a.jpg").min() == 1


def test_pages_and_moving_pictures_are_told_from_pictures(tmp_path: Path) -> None:
    pictures = [Image.new("RGB", (16, 16), colour) for colour in ("white", "black")]
    names = {"a.tif": "^has 2 pages; save the one", "a.avif": "animated", "a.webp": "animated"}
    for name, reason in (names | {"a.png": "animated"}).items():
        pictures[0].save(tmp_path / name, save_all=True, append_images=pictures[1:])
        with pytest.raises(MediaError, match=reason):
            load(tmp_path / name)
