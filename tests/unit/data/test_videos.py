"""Videos as they are shown: in time, upright, with square pixels, in sRGB, over a background."""

import os
import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from grey_videos import by_ffmpeg, encoder, timed_video, video
from PIL import Image
from slow_cases import slow_but

from wandistiller.data.media import MediaError, MediaReader, Size
from wandistiller.data.videos import read_frames
from wandistiller.utils.images import write_mp4

BLUE = (0, 0, 255)
PQ, HLG, BT709, BT2020, P3 = 16, 18, 1, 9, 12
"""Code points of ITU-T H.273."""


def taken(file: Path, fps: float) -> list[int]:
    """Numbers of the frames at a rate."""
    return [round(np.asarray(picture).mean() / 4) for picture in read_frames(file, fps)]


def random_stamps(random_: random.Random) -> list[Fraction]:
    """Begin at 0 or later; go on evenly, by one of three steps, or with gaps."""
    step, kind = (
        1 / random_.choice([8, 12.5, 15, 16, 24, 29.97, 30, 60]),
        random_.choice(["even", "mixed", "gaps"]),
    )
    seconds = [random_.choice([0, 0, 0.033, 1.4])]
    for _ in range(random_.randint(1, 58)):
        gap = random_.randint(2, 40) if random_.random() < 0.1 else 1
        times = {"even": 1, "mixed": random_.choice([1, 2, 4]), "gaps": gap}
        seconds.append(seconds[-1] + step * times[kind])
    return [Fraction(second).limit_denominator(90_000) for second in seconds]


@pytest.mark.parametrize("seed", slow_but(range(4), range(200)))
def test_frames_are_those_of_ffmpeg_s_own_filter(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    file = timed_video(tmp_path / random_.choice(["a.mp4", "a.mkv", "a.mov", "a.ts"]), random_stamps(random_))
    for fps in (16, random_.choice([8, 10, 23.976, 24, 30, 60])):
        assert taken(file, fps) == by_ffmpeg(file, fps)


def test_an_avi_without_time_stamps_has_its_header_s_rate(tmp_path: Path) -> None:
    file = video(tmp_path / "a.avi", 40, 30)
    assert taken(file, 15) == by_ffmpeg(file, 15) and len(taken(file, 15)) == 20


def test_every_gif_picture_is_shown_for_its_own_time(tmp_path: Path) -> None:
    pictures = [Image.new("L", (32, 32), 40 * n) for n in range(4)]
    pictures[0].save(
        tmp_path / "a.gif", save_all=True, append_images=pictures[1:], duration=[100, 300, 0, 100]
    )
    pixels_CFHW = MediaReader(10.0).read(tmp_path / "a.gif", Size(32, 32, 6))
    assert ((pixels_CFHW[0, :, 0, 0] + 1) * 127.5 / 40).round().tolist() == [0, 1, 1, 1, 2, 3]


def two_streams(file: Path, frames: dict[str, int], default: str = "", large: str = "") -> Path:
    """Write a video of streams by their codec, each of so many frames; mjpeg's are brighter."""
    with av.open(str(file), "w") as container:
        streams = {codec: container.add_stream(codec, rate=16) for codec in frames}
        for codec, stream in streams.items():
            stream.width = stream.height = 64 if codec == large else 32
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            stream.disposition = 1 if codec in default.split() else 0
        for codec, stream in streams.items():
            grey = np.full((stream.height, stream.width, 3), 200 if codec == "mjpeg" else 40, np.uint8)
            for _ in range(frames[codec]):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(grey)))
            container.mux(stream.encode())
    return file


@pytest.mark.parametrize(
    ("mjpeg", "default", "large", "grey"),
    [
        (1, "", "", 40),  # a thumbnail beside the clip
        (1, "mjpeg", "mjpeg", 40),
        (8, "mjpeg", "libx264", 200),  # as ffmpeg chooses
        (8, "libx264", "mjpeg", 40),
        (8, "mjpeg libx264", "mjpeg", 200),
        (8, "mjpeg libx264", "libx264", 40),
    ],
)
def test_of_several_streams_ffmpeg_s_choice_is_read_and_never_a_thumbnail(
    tmp_path: Path, mjpeg: int, default: str, large: str, grey: int
) -> None:
    file = two_streams(tmp_path / "a.mov", {"mjpeg": mjpeg, "libx264": 8}, default, large)
    shown = list(read_frames(file, 16))
    assert len(shown) == 8 and np.asarray(shown[0]).mean() == pytest.approx(grey, abs=4)
    if mjpeg > 1:
        assert by_ffmpeg(file, 16)[0] == grey // 4


def coded(
    file: Path, ycc: Sequence[tuple[int, int, int]], transfer: int, primaries: int, matrix: int
) -> Path:
    """Write frames of one colour each, (Y, Cb, Cr) of 10 bits in the limited range."""
    with encoder(file, "ffv1", (32, 32), "yuv420p10le") as (stream, write):
        for colour in ycc:
            frame = av.VideoFrame(32, 32, "yuv420p10le")
            for plane, number in zip(frame.planes, colour, strict=True):
                plane.update(np.full(plane.buffer_size // 2, number, np.uint16).tobytes())
            for target in (frame, stream.codec_context):
                target.color_trc, target.color_primaries = transfer, primaries
                target.colorspace, target.color_range = matrix, 1
            write(frame)
    return file


def colours(file: Path) -> list[list[int]]:
    return [np.asarray(picture)[16, 16].tolist() for picture in read_frames(file, 16.0)]


def luma(signal: float) -> tuple[int, int, int]:
    return 64 + round(876 * signal), 512, 512


@pytest.mark.parametrize(("transfer", "white"), [(PQ, 0.5807), (HLG, 0.75)])
def test_reference_white_of_hdr_is_white_and_brighter_is_not_darker(
    tmp_path: Path, transfer: int, white: float
) -> None:
    """PQ codes 203 cd/m2 as 0.5807; ITU-R BT.2408."""
    file = coded(tmp_path / "a.mkv", [luma(s) for s in (0, white / 2, white, 1)], transfer, BT2020, BT2020)
    black, grey, reference, peak = (colour[1] for colour in colours(file))
    assert black == 0 and 20 < grey < 120 and reference >= 250 and peak == 255


def test_sdr_keeps_its_numbers(tmp_path: Path) -> None:
    file = coded(tmp_path / "a.mkv", [luma(n / 255) for n in (0, 64, 128, 255)], BT709, BT709, BT709)
    assert colours(file) == [pytest.approx([n] * 3, abs=1) for n in (0, 64, 128, 255)]


TO_P3 = np.array([[0.8225, 0.1774, 0.0], [0.0332, 0.9669, 0.0], [0.0171, 0.0724, 0.9108]])
"""Linear light of sRGB's primaries as that of P3's."""


def test_dolby_vision_without_a_base_layer_of_its_own_is_named(tmp_path: Path) -> None:
    file = video(tmp_path / "v.mp4", 8)
    file.write_bytes(file.read_bytes().replace(b"avc1", b"dva1"))  # Dolby's name of H.264
    with pytest.raises(ValueError, match="is Dolby Vision without a base layer of its own"):
        next(read_frames(file, 30))


def test_wide_primaries_become_those_of_srgb(tmp_path: Path) -> None:
    """Screens show a signal's power 2.4 (BT.1886)."""
    colour = np.array([200, 110, 60])
    red, green, blue = (TO_P3 @ (colour / 255) ** 2.4) ** (1 / 2.4)
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    ycc = luma(y)[0], 512 + round(896 * (blue - y) / 1.8556), 512 + round(896 * (red - y) / 1.5748)
    ((wide,), (own,)) = (
        colours(coded(tmp_path / f"{primaries}.mkv", [ycc], BT709, primaries, BT709))
        for primaries in (P3, BT709)
    )
    assert wide == pytest.approx(colour, abs=9)  # FFmpeg maps between gamuts in another space
    assert own == pytest.approx([round(255 * c) for c in (red, green, blue)], abs=2) and own[0] < 195


def test_an_unspecified_matrix_is_that_of_hd_for_hd(tmp_path: Path) -> None:
    reds = []
    for name, size in (("hd.mkv", (1280, 720)), ("sd.mkv", (640, 480))):
        red = av.VideoFrame.from_image(Image.new("RGB", size, "red"))
        matrix = "ITU709" if name == "hd.mkv" else "ITU601"
        frame = red.reformat(format="yuv420p", dst_colorspace=matrix)
        frame.colorspace = 2
        with encoder(tmp_path / name, "ffv1", size) as (_, write):
            write(frame)
        reds += colours(tmp_path / name)
    assert reds == [pytest.approx([255, 0, 0], abs=4)] * 2


def half_hidden(file: Path, codec: str, pixels: str) -> Path:
    """Write a video that is red on the left, and whose green right half is transparent."""
    rgba = np.zeros((64, 64, 4), np.uint8)
    rgba[:, :32] = (255, 0, 0, 255)
    rgba[:, 32:] = (0, 255, 0, 0)
    with encoder(file, codec, (64, 64), pixels) as (_, write):
        for _ in range(5):
            write(av.VideoFrame.from_ndarray(rgba, format="rgba").reformat(format=pixels))
    return file


@pytest.mark.parametrize(
    ("name", "codec", "pixels"), [("a.mov", "qtrle", "argb"), ("a.mov", "prores_ks", "yuva444p10le")]
)
def test_transparent_parts_of_videos_show_the_background(
    tmp_path: Path, name: str, codec: str, pixels: str
) -> None:
    file = half_hidden(tmp_path / name, codec, pixels)
    pixels_CFHW = (MediaReader(16.0, BLUE).read(file, Size(64, 64, 5)) + 1) * 127.5
    assert pixels_CFHW[:, 4, 32, 8].tolist() == pytest.approx([255, 0, 0], abs=8)
    assert pixels_CFHW[:, 4, 32, 56].tolist() == pytest.approx(BLUE, abs=8)


def test_a_webm_with_alpha_is_refused_and_its_hidden_colours_never_shown(tmp_path: Path) -> None:
    file = half_hidden(tmp_path / "a.webm", "libvpx-vp9", "yuva420p")
    with pytest.raises(MediaError, match="is a WebM with alpha, which is not read; save it as .mov"):
        MediaReader(16.0, BLUE).read(file, Size(64, 64, 5))


def halves(file: Path, **settings: object) -> Path:
    """Write a video of 64 x 32 pixels, white on the left, with settings of its stream."""
    pixels_HWC = np.zeros((32, 64, 3), np.uint8)
    pixels_HWC[:, :32] = 255
    with encoder(file, "libx264", (64, 32)) as (stream, write):
        if "aspect" in settings:
            stream.codec_context.sample_aspect_ratio = settings["aspect"]
        if "rotation" in settings:
            stream.set_display_rotation(settings["rotation"])
        for _ in range(4):
            write(av.VideoFrame.from_ndarray(pixels_HWC))
    return file


@pytest.mark.parametrize(("aspect", "size"), [(Fraction(2), (128, 32)), (Fraction(1, 2), (64, 64))])
def test_pixels_are_square(tmp_path: Path, aspect: Fraction, size: tuple[int, int]) -> None:
    assert next(read_frames(halves(tmp_path / "a.mp4", aspect=aspect), 16.0)).size == size


@pytest.mark.parametrize(("rotation", "white"), [(90, (8, 56)), (-90, (8, 8)), (180, (56, 8))])
def test_videos_are_upright_and_nothing_is_printed(
    tmp_path: Path, rotation: int, white: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    picture = next(read_frames(halves(tmp_path / "a.mp4", rotation=rotation), 16.0))
    assert picture.size == ((64, 32) if rotation == 180 else (32, 64))
    assert picture.getpixel(white)[0] > 250 and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["playlist.mp4", "concat.mp4", "svg.webm", "sound.mp4"])
def test_files_that_name_other_files_and_sounds_are_no_videos(tmp_path: Path, name: str) -> None:
    video(tmp_path / "other.ts", 8)
    texts = {
        "playlist.mp4": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nother.ts\n#EXT-X-ENDLIST\n",
        "concat.mp4": "ffconcat version 1.0\nfile other.ts\n",
        "svg.webm": '<svg xmlns="http://www.w3.org/2000/svg"><image href="other.ts"/></svg>',
    }
    if name in texts:
        (tmp_path / name).write_text(texts[name])
    else:
        with av.open(str(tmp_path / name), "w") as container:
            stream = container.add_stream("aac", rate=16000, layout="mono")
            sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            sound.sample_rate = 16000
            container.mux(stream.encode(sound))
            container.mux(stream.encode())
    with pytest.raises(MediaError, match="cannot be read: "):
        MediaReader(16.0).read(tmp_path / name, Size(32, 32, 1))


def test_a_name_that_looks_like_an_address_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert taken(video(Path("a.mp4"), 8).rename("http:x.mp4"), 16.0) == list(range(8))


@pytest.mark.parametrize("name", ["a.mp4", "a.png", "a.gif"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(MediaError, match="is no regular file"):
        MediaReader(16.0).read(tmp_path / name, Size(32, 32, 1))


@pytest.mark.parametrize("damage", slow_but(range(4), range(12)))
def test_damaged_videos_give_pixels_or_a_reason(tmp_path: Path, damage: int) -> None:
    random_, suffix = np.random.default_rng(damage), ["mp4", "mkv", "ts", "webm"][damage % 4]
    file = tmp_path / f"a.{suffix}"
    whole = np.frombuffer(
        video(file.with_suffix(".mkv" if suffix == "webm" else f".{suffix}"), 40).read_bytes(), np.uint8
    )
    for _ in range(10):
        damaged = whole.copy()
        damaged[random_.integers(0, len(damaged), 20)] = random_.integers(0, 256, 20)
        file.write_bytes(damaged[: random_.integers(1, len(damaged))].tobytes())
        try:
            assert MediaReader(16.0).read(file, Size(32, 32, 5)).shape == (3, 5, 32, 32)
        except MediaError as error:
            assert str(error).startswith(("cannot be read: ", "is ", "has ")) and "\n" not in str(error)


def test_an_mp4_that_is_written_has_the_colours_and_frames_of_its_pictures(tmp_path: Path) -> None:
    pictures = [Image.new("RGB", (32, 32), colour) for colour in ("red", "lime", "blue", "white")]
    write_mp4(tmp_path / "a.mp4", lambda: pictures, 16, plays=2)
    expected = [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]] * 2
    assert colours(tmp_path / "a.mp4") == [pytest.approx(colour, abs=6) for colour in expected]
