"""Videos through PyAV: the frame that is shown at each time, upright, with square pixels, in 8-bit sRGB."""

from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from wandistiller.utils.files import file_fingerprint

if TYPE_CHECKING:  # an extra
    import av

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,asf,flv,ogg"
"""FFmpeg's names of the formats that are opened. No playlist is among them: those open other files."""
SDR_TRANSFERS = {1, 2, 4, 5, 6, 7, 11, 12, 13, 14, 15}
"""Transfer functions of ITU-T H.273 whose numbers are shown as they are, 2 being unspecified."""
SRGB_PRIMARIES = {1, 2, 5, 6, 7}
"""Primaries that are taken for those of sRGB: those of BT.709 and BT.601, or unspecified."""
UNSPECIFIED, BT709 = 2, 1
HD_HEIGHT, HD_WIDTH = 720, 1280
"""Size from which an unspecified matrix is that of BT.709, as players assume; smaller ones have BT.601's."""
DOLBY_VISION = ("dvhe", "dvh1", "dav1", "dva1", "dvav")
"""Names of sample entries; source: Dolby Vision Streams Within the ISO Base Media File Format, 2.1.2."""
ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""FFmpeg's own decoders of these codecs leave alpha out."""
SEEK_BACK = (0, 1, 5, 30)
"""Seconds before a wanted time that are tried in turn: some indexes point behind what they are asked for."""
MOST_DENOMINATOR = 1_001_000
"""Of a frame rate, as FFmpeg reads one."""
MATRIX_ONE = 2**16


class VideoError(ValueError):
    """The reason why a video cannot be read."""


def nearest(number: Fraction) -> int:
    """Round to the nearest integer, halves away from zero, as FFmpeg does."""
    down = abs(number) + Fraction(1, 2)
    return int(down) if number >= 0 else -int(down)


def frame_rate(fps: float) -> Fraction:
    """Return frames a second as a fraction, as FFmpeg reads 23.976."""
    return Fraction(fps).limit_denominator(MOST_DENOMINATOR)


class Video:
    """An open video; close it. Frame k at a rate F is the one that FFmpeg's filter fps=F gives.

    That is the last one whose time stamp, in units of 1/F and rounded, is not after k.
    """

    def __init__(self, path: Path):
        """Open the file.

        Raises:
            VideoError: it is no video, or of a format that is not in FORMATS.
        """
        self._path = path
        self._graph: tuple[Any, Any] = (None, None)
        self._open()

    def _open(self) -> None:
        import av

        if not self._path.is_file():
            raise VideoError("is no regular file")
        options = {"protocol_whitelist": "file", "format_whitelist": FORMATS}
        self._container = av.open(f"file:{self._path}", options=options, metadata_errors="replace")
        streams = [
            stream
            for stream in self._container.streams.video
            if stream.codec_context and not stream.disposition & stream.disposition.attached_pic
        ]
        if not streams:
            self._container.close()
            raise VideoError("has no moving pictures")
        self._stream = streams[0]
        self._stream.thread_type = "AUTO"
        self._decoder = self._stream.codec_context
        # a base layer that is shown without Dolby's metadata names its transfer function
        if self._decoder.codec_tag in DOLBY_VISION and self._decoder.color_trc == UNSPECIFIED:
            self._container.close()
            raise VideoError("is Dolby Vision without a base layer of its own; save it as SDR")
        self._has_own_decoder = self._stream.metadata.get("alpha_mode") == "1"
        # FFmpeg's time 0 is the beginning of the first stream, which may be sound
        begin = Fraction(self._container.start_time or 0, 10**6)
        self._offset = nearest(-begin / self._stream.time_base)

    def close(self) -> None:
        self._container.close()

    def number_of_frames(self, fps: float) -> int:
        """Count the frames at a rate: the whole file is read, but not decoded."""
        packets = (p for p in self._container.demux(self._stream) if p.size)
        stamped = ((p.pts if p.pts is not None else p.dts, p.duration or 0) for p in packets)
        times = sorted(pair for pair in stamped if pair[0] is not None)
        if not times:
            raise VideoError("no frame of it can be decoded")
        (first, _), (last, duration) = times[0], times[-1]
        before = times[-2][0] if len(times) > 1 else None
        end = last + self._last_duration(last, duration, before)
        return max(1, self._number(end, fps) - self._number(first, fps))

    def frames(self, fps: float, begin: int = 0) -> Iterator[Image.Image]:
        """Yield the frames at a rate from number `begin` on, RGB or RGBA, decoded as they are asked for."""
        decoded = self._decoded()
        if (current := next(decoded, None)) is None:
            raise VideoError("no frame of it can be decoded")
        number = first = self._number(current.pts, fps) + begin
        if begin:
            current, decoded = self._from(number, fps)
        before, picture = None, None
        for frame in decoded:
            while number < self._number(frame.pts, fps):
                picture = picture or self._picture(current)
                yield picture
                number += 1
            before, current, picture = current.pts, frame, None
        end = self._number(current.pts + self._last_duration(current.pts, current.duration, before), fps)
        for _ in range(number, max(end, first + 1 if not begin else 0)):
            picture = picture or self._picture(current)
            yield picture

    def _number(self, pts: int, fps: float) -> int:
        return nearest((pts + self._offset) * self._stream.time_base * frame_rate(fps))

    def _last_duration(self, pts: int, given: int, before: int | None) -> int:
        """Return how long the last frame is shown, in units of the time base, as FFmpeg estimates it.

        Args:
            given: in the file; 1 may be made up by FFmpeg, 0 is none.
            before: time stamp of the frame before.
        """
        gap = pts - before if before is not None else 0
        if given > 1 or given == 1 and gap <= 2:
            return given
        rate = self._stream.average_rate or self._stream.guessed_rate
        return gap if gap > 0 else given or (nearest(1 / rate / self._stream.time_base) if rate else 0)

    def _from(self, number: int, fps: float) -> tuple["av.VideoFrame", Iterator["av.VideoFrame"]]:
        """Return the first decoded frame, not after frame `number` at a rate, and those that follow it."""
        time_base = self._stream.time_base
        wanted = nearest(number / frame_rate(fps) / time_base) - self._offset
        for seconds in SEEK_BACK:
            self._container.seek(wanted - nearest(seconds / time_base), stream=self._stream)
            decoded = self._decoded()
            frame = next(decoded, None)
            if frame and frame.key_frame and not frame.is_corrupt and self._number(frame.pts, fps) <= number:
                return frame, decoded
        self._container.close()
        self._open()
        decoded = self._decoded()
        return next(decoded), decoded

    def _decoded(self) -> Iterator["av.VideoFrame"]:
        """Yield the frames from here on, each with a time; damaged parts are left out."""
        import av

        if self._has_own_decoder and (name := ALPHA_DECODERS.get(self._stream.codec_context.name)):
            self._decoder = av.CodecContext.create(name, "r")
        pts = 0  # of a frame without any time stamp: after the last one
        for packet in self._container.demux(self._stream):
            try:
                frames = self._decoder.decode(packet if packet.size else None)
            except (av.error.InvalidDataError, EOFError):
                continue
            for frame in frames:
                if frame.pts is None:
                    frame.pts = frame.dts if frame.dts is not None else pts
                pts = frame.pts + (frame.duration or 1)
                yield frame

    def _picture(self, frame: "av.VideoFrame") -> Image.Image:
        data = frame.side_data.get("DISPLAYMATRIX")
        matrix = None if data is None else np.frombuffer(bytes(data), np.int32)
        settings = (frame.format.name, frame.width, frame.height, frame.colorspace, frame.color_range)
        settings += (frame.color_trc, frame.color_primaries)
        if self._graph[0] != settings:
            self._graph = settings, self._converter(frame)
        if frame.colorspace == UNSPECIFIED and (frame.height >= HD_HEIGHT or frame.width >= HD_WIDTH):
            frame.colorspace = BT709
        graph = self._graph[1]
        graph.push(frame)
        return Image.fromarray(_turned(graph.pull().to_ndarray(), matrix, frame.rotation))

    def _converter(self, frame: "av.VideoFrame") -> Any:
        """Return a filter graph to 8-bit sRGB, with alpha if there is any, and square pixels."""
        from av.filter import Graph

        graph, aspect = Graph(), self._stream.sample_aspect_ratio or Fraction(1)
        width, height = max(frame.width, round(frame.width * aspect)), frame.height
        if aspect < 1:
            height = round(height / aspect)
        has_alpha = any(component.is_alpha for component in frame.format.components)
        scale = f"w={width}:h={height}:flags=lanczos+accurate_rnd+full_chroma_int{_in_srgb(frame)}"
        parts = [
            graph.add_buffer(
                width=frame.width, height=frame.height, format=frame.format, time_base=self._stream.time_base
            ),
            graph.add("scale", scale),
            graph.add("format", "rgba" if has_alpha else "rgb24"),
            graph.add("buffersink"),
        ]
        for one, following in zip(parts, parts[1:], strict=False):
            one.link_to(following)
        graph.configure()
        return graph


def _in_srgb(frame: "av.VideoFrame") -> str:
    """Return options of FFmpeg's filter scale by which a frame's colours become those of sRGB.

    White at 203 cd/m2 (PQ) or three quarters of the signal (HLG) becomes white (ITU-R BT.2408); what is
    brighter is clipped, and colours that sRGB has not are moved to the nearest that it has.
    """
    if frame.color_trc not in SDR_TRANSFERS:
        return ":out_transfer=iec61966-2-1:out_primaries=bt709:intent=relative_colorimetric"
    if frame.color_primaries not in SRGB_PRIMARIES:
        return ":in_transfer=bt709:out_transfer=bt709:out_primaries=bt709:intent=relative_colorimetric"
    return ""


def _turned(pixels_HWC: np.ndarray, matrix: np.ndarray | None, rotation: int) -> np.ndarray:
    """Turn by quarters, and mirror, as the 9 numbers of a display matrix say; None: there is none."""
    if matrix is None:
        return pixels_HWC
    a, b, _, c, d, *_ = (matrix / MATRIX_ONE).round().astype(int)
    if a * d - b * c < 0:  # mirrored left to right before it is turned
        pixels_HWC, a, b = pixels_HWC[:, ::-1], -a, -b
    quarters = {(1, 0): 0, (0, 1): 3, (-1, 0): 2, (0, -1): 1}.get((a, b), round(rotation / 90))
    return np.ascontiguousarray(np.rot90(pixels_HWC, quarters))


def read_frames(path: Path, fps: float, begin: int = 0) -> Iterator[Image.Image]:
    """Yield the frames of a video at a rate, RGB or RGBA, from number `begin` on.

    Raises:
        VideoError: it cannot be read.
    """
    import av

    try:
        with closing(Video(path)) as video:
            yield from video.frames(fps, begin)
    except av.FFmpegError as error:
        raise VideoError(error.strerror or str(error)) from None


@lru_cache(maxsize=1024)
def _counted(path: Path, _: str, fps: float) -> int:
    with closing(Video(path)) as video:
        return video.number_of_frames(fps)


def number_of_frames(path: Path, fps: float) -> int:
    """Return how many frames a video has at a rate.

    Raises:
        VideoError: it cannot be read.
    """
    import av

    try:
        return _counted(path, file_fingerprint(path), fps)
    except av.FFmpegError as error:
        raise VideoError(error.strerror or str(error)) from None
