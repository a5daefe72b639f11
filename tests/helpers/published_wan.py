"""The four published Wan pipelines as data, folders of them without weights, and hubs that hold a folder.

Sources: diffusers' scripts/convert_wan_to_diffusers.py and the repositories' own JSON files, as far as this
package reads them; written without network: `flow_shift` is the converter's 3 (5B: 5), not the repositories'.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from recipes import PROMPTS

COMMON = {
    "_class_name": "WanTransformer3DModel",
    "added_kv_proj_dim": None,
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "eps": 1e-06,
    "freq_dim": 256,
    "image_dim": None,
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
    "text_dim": 4096,
}
SMALL = COMMON | {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
LARGE = COMMON | {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
FIVE = COMMON | {
    "num_attention_heads": 24,
    "ffn_dim": 14336,
    "num_layers": 30,
    "in_channels": 48,
    "out_channels": 48,
}
# Wan2.1's file has no scale factors: they are the class's defaults. Means and deviations need weights.
VAE21 = {
    "_class_name": "AutoencoderKLWan",
    "attn_scales": [],
    "base_dim": 96,
    "dim_mult": [1, 2, 4, 4],
    "dropout": 0.0,
    "latents_mean": [0.0] * 16,
    "latents_std": [1.0] * 16,
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "z_dim": 16,
}
VAE22 = VAE21 | {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "in_channels": 12,
    "out_channels": 12,
    "is_residual": True,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "z_dim": 48,
}
INDEX = {
    "_class_name": "WanPipeline",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}
SECOND = {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.875}


@dataclass(frozen=True, kw_only=True)
class Published:
    """The content of one repository's JSON files."""

    transformer: dict[str, Any]
    vae: dict[str, Any]
    index: dict[str, Any]
    flow_shift: float = 3.0

    @property
    def scheduler(self) -> dict[str, Any]:
        return {
            "_class_name": "UniPCMultistepScheduler",
            "flow_shift": self.flow_shift,
            "num_train_timesteps": 1000,
            "prediction_type": "flow_prediction",
            "solver_order": 2,
            "use_flow_sigmas": True,
        }


PUBLISHED = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": Published(transformer=SMALL, vae=VAE21, index=INDEX),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": Published(transformer=LARGE, vae=VAE21, index=INDEX),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": Published(
        transformer=FIVE,
        vae=VAE22,
        index=INDEX | {"boundary_ratio": None, "expand_timesteps": True},
        flow_shift=5.0,
    ),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": Published(transformer=LARGE, vae=VAE21, index=INDEX | SECOND),
}

OF_IMAGES = INDEX | {"_class_name": "WanImageToVideoPipeline"}
WITH_STATES = OF_IMAGES | {
    "image_encoder": ["transformers", "CLIPVisionModel"],
    "image_processor": ["transformers", "CLIPImageProcessor"],
}
JOINED = LARGE | {"in_channels": 36}
STATES = JOINED | {"image_dim": 1280, "added_kv_proj_dim": 5120}
IMAGE_TO_VIDEO = {
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": Published(
        transformer=JOINED, vae=VAE21, index=OF_IMAGES | SECOND | {"boundary_ratio": 0.9}
    ),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": Published(transformer=STATES, vae=VAE21, index=WITH_STATES),
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": Published(
        transformer=STATES, vae=VAE21, index=WITH_STATES, flow_shift=5.0
    ),
    "Wan-AI/Wan2.1-FLF2V-14B-720P-Diffusers": Published(
        transformer=STATES | {"pos_embed_seq_len": 514}, vae=VAE21, index=WITH_STATES, flow_shift=16.0
    ),
}


def write_wans(folder: Path) -> Path:
    """Write prompts, and all published pipelines at folder/HUB_ID: the JSON files that `open_wan` reads."""
    (folder / "prompts.txt").write_text(PROMPTS)
    for hub_id, it in (PUBLISHED | IMAGE_TO_VIDEO).items():
        files = {"model_index": it.index, "vae/config": it.vae, "scheduler/scheduler_config": it.scheduler}
        experts = [part for part in ("transformer", "transformer_2") if part in it.index]
        for name, content in (files | {f"{e}/config": it.transformer for e in experts}).items():
            file = folder / hub_id / f"{name}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(content))
    return folder


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_cache(folder: Path, hub_id: str, source: Path, *refs: str) -> Path:
    """A hub cache, laid out by hand, that holds `source` as `hub_id` at COMMIT, to which `refs` point."""
    repository = folder / f"models--{hub_id.replace('/', '--')}"
    for file in (f for f in source.rglob("*") if f.is_file()):
        blob = repository / "blobs" / f"{len(list(repository.glob('blobs/*'))):040x}"
        link = repository / "snapshots" / COMMIT / file.relative_to(source)
        for made in (blob, link):
            made.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    for ref in refs:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(COMMIT)
    return folder


class _Hub(BaseHTTPRequestHandler):
    """Serves the files in `root` to `snapshot_download`: github.com/huggingface/huggingface_hub, 2.x."""

    def __init__(self, root: Path, requested: list[tuple[str, str]], *arguments: Any):
        self.root, self.requested = root, requested
        super().__init__(*arguments)

    def do_GET(self) -> None:
        path, headers = self.path.split("?")[0], {}
        refusal = {"org/gated": (403, "GatedRepo"), "org/none": (404, "RepoNotFound")}
        refused = next((v for k, v in refusal.items() if f"/{k}/" in path), None)
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        if path.endswith("/revision/nosuch"):
            refused = 404, "RevisionNotFound"
        elif not (name or "/revision/" in path or "/tree/" in path):
            refused = 404, "EntryNotFound"
        if refused:
            return self._send(refused[0], {"X-Error-Code": refused[1]}, b"{}")
        if "/revision/" in path:
            body = json.dumps({"id": "org/wan", "sha": COMMIT}).encode()
        elif "/tree/" in path:
            body = json.dumps([*self._listed()]).encode()
        else:
            file, body = self.root / name, b""
            headers = {"ETag": f'"{name.replace("/", "_")}"', "X-Repo-Commit": COMMIT}
            if self.command == "HEAD":
                headers["Content-Length"] = str(file.stat().st_size)
            else:
                body = file.read_bytes()
                self.requested.append((name, self.headers.get("Authorization", "")))
        return self._send(200, headers, body)

    do_HEAD = do_GET

    def _listed(self) -> Iterator[dict[str, Any]]:
        for i, f in enumerate(f for f in self.root.rglob("*") if f.is_file()):
            path = str(f.relative_to(self.root))
            yield {"type": "file", "path": path, "size": f.stat().st_size, "oid": f"{i:040x}"}

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(body)), "Content-Type": "application/json"} | headers
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub_of(root: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A hub on this machine whose every repository is `root`; yields its address and (file, token) pairs.

    It has no org/none, refuses org/gated, and no repository has the revision `nosuch`.
    """
    downloads: list[tuple[str, str]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hub, root, downloads))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", downloads
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
