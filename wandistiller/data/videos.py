"""Videos through PyAV: the frame that is shown at each time, upright, with square pixels, in 8-bit sRGB."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:  # an extra
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,asf,flv,ogg,gif"
"""FFmpeg's names of the formats that are opened. No playlist is among them: those open other files."""
SDR_TRANSFERS = {1, 2, 4, 5, 6, 7, 11, 12, 13, 14, 15}
"""Transfer functions of ITU-T H.273 whose numbers are shown as they are, 2 being unspecified."""
SRGB_PRIMARIES = {1, 2, 5, 6, 7}
"""Primaries that are taken for those of sRGB: those of BT.709 and BT.601, or unspecified."""
UNSPECIFIED = 2
HD_HEIGHT, HD_WIDTH = 720, 1280
"""Size from which an unspecified matrix is that of BT.709, as players assume; smaller ones have BT.601's."""
DOLBY_VISION = ("dvhe", "dvh1", "dav1", "dva1", "dvav")
"""Names of sample entries; source: Dolby Vision Streams Within the ISO Base Media File Format, 2.1.2."""


def nearest(number: Fraction) -> int:
    """Round a time to the nearest integer, halves up, as FFmpeg does."""
    return math.floor(number + Fraction(1, 2))


def frame_rate(fps: float) -> Fraction:
    """Return frames a second as a fraction, as FFmpeg reads 23.976."""
    return Fraction(fps).limit_denominator(1_001_000)


def _choice(stream: "VideoStream") -> tuple[bool, bool, bool, int]:
    """Return what makes a stream the one to read, most important first: FFmpeg's choice, no thumbnail."""
    mark, context = stream.disposition, stream.codec_context  # None: of a codec that is not known
    is_shown = bool(context) and not mark & mark.attached_pic
    size = context.width * context.height if context else 0
    return is_shown, stream.frames != 1, bool(mark & mark.default), size


@contextmanager
def _opened(path: Path) -> Iterator[tuple["InputContainer", "VideoStream"]]:
    """Open a video for a block. Raises ValueError with the reason why it cannot be read."""
    import av

    if not path.is_file():
        raise ValueError("is no regular file")
    options = {"protocol_whitelist": "file", "format_whitelist": FORMATS}
    try:
        with av.open(f"file:{path}", options=options, metadata_errors="replace") as container:
            stream = max(container.streams.video, key=_choice, default=None)
            if stream is None or not _choice(stream)[0]:
                raise ValueError("has no moving pictures")
            # a base layer that is shown without Dolby's metadata names its transfer function
            context = stream.codec_context
            if context.codec_tag in DOLBY_VISION and context.color_trc == UNSPECIFIED:
                raise ValueError("is Dolby Vision without a base layer of its own; save it as SDR")
            if stream.metadata.get("alpha_mode") == "1":  # which FFmpeg's own decoders leave out
                raise ValueError("is a WebM with alpha, which is not read; save it as .mov, or without alpha")
            stream.thread_type = "AUTO"
            yield container, stream
    except av.FFmpegError as error:
        raise ValueError(error.strerror or str(error)) from None


def _decoded(container: "InputContainer", stream: "VideoStream") -> Iterator["VideoFrame"]:
    """Yield the frames from here on, each with a time; damaged parts are left out."""
    import av

    # FFmpeg's time 0 is that of the first stream, maybe of sound
    offset, end = nearest(-Fraction(container.start_time or 0, 10**6) / stream.time_base), 0
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except (av.error.InvalidDataError, EOFError):
            continue
        for frame in frames:
            stamp = frame.pts if frame.pts is not None else frame.dts
            frame.pts = stamp + offset if stamp is not None else end
            end = frame.pts + (frame.duration or 1)
            yield frame


def read_frames(path: Path, fps: float) -> Iterator[Image.Image]:
    """Yield the frames of a video at a rate, RGB or RGBA, from one filter graph of FFmpeg.

    They are those of FFmpeg's filter fps: frame k is the last one whose time stamp, in units of 1/fps and
    rounded, is not after k.

    Raises:
        ValueError: with the reason why it cannot be read.
    """
    from av.filter import Graph

    with _opened(path) as (container, stream):
        decoded = _decoded(container, stream)
        if (first := next(decoded, None)) is None:
            raise ValueError("no frame of it can be decoded")
        aspect, graph = stream.sample_aspect_ratio or 1, Graph()
        size = round(first.width * max(1, aspect)), round(first.height / min(1, aspect))
        has_alpha = any(component.is_alpha for component in first.format.components)
        graph.link_nodes(
            graph.add_buffer(first, time_base=stream.time_base),
            graph.add("fps", str(frame_rate(fps))),
            graph.add("scale", "{}:{}:lanczos+accurate_rnd+full_chroma_int".format(*size) + _in_srgb(first)),
            graph.add("format", "rgba" if has_alpha else "rgb24"),
            graph.add("buffersink"),
        ).configure()
        matrix = first.side_data.get("DISPLAYMATRIX")
        before, least = first.pts, math.ceil(1 / frame_rate(fps) / stream.time_base)  # it shows one, if short
        for frame in chain([first], decoded, [None]):
            if frame:
                if frame.duration <= 1:  # made up: FFmpeg takes the gap then, for the last one's
                    frame.duration = max(frame.duration, frame.pts - before)
                before, frame.duration = frame.pts, max(frame.duration, first.pts + least - frame.pts)
            graph.push(frame)
            with suppress(BlockingIOError, EOFError):  # of PyAV, where there is none yet, or no more
                while True:
                    yield Image.fromarray(_turned(graph.pull().to_ndarray(), matrix))


def _in_srgb(frame: "VideoFrame") -> str:
    """Return options of FFmpeg's filter scale by which a video's colours become those of sRGB.

    White at 203 cd/m2 (PQ) or three quarters of the signal (HLG) becomes white (ITU-R BT.2408); what is
    brighter is clipped, and colours outside sRGB are moved to the nearest in it.
    """
    is_hd = frame.height >= HD_HEIGHT or frame.width >= HD_WIDTH
    matrix = ":in_color_matrix=bt709" if frame.colorspace == UNSPECIFIED and is_hd else ""
    mapped = ":out_primaries=bt709:intent=relative_colorimetric"
    if frame.color_trc not in SDR_TRANSFERS:
        return f"{matrix}:out_transfer=iec61966-2-1{mapped}"
    if frame.color_primaries not in SRGB_PRIMARIES:
        return f"{matrix}:in_transfer=bt709:out_transfer=bt709{mapped}"
    return matrix


def _turned(pixels_HWC: np.ndarray, matrix: Any) -> np.ndarray:
    """Turn by quarters, and mirror, as the 9 numbers of a display matrix say."""
    if matrix is None:
        return pixels_HWC
    a, b, _, c, d, *_ = np.frombuffer(matrix, np.int32).astype(float)
    if a * d < b * c:  # mirrored left to right before it is turned
        pixels_HWC, a, b = pixels_HWC[:, ::-1], -a, -b
    return np.ascontiguousarray(np.rot90(pixels_HWC, -round(2 * math.atan2(b, a) / math.pi)))
