"""A teacher in ComfyUI's files is the teacher in diffusers' folder, bit for bit; bad files are refused."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comfy_files import COMFY, comfy_files, published_files, weights_in
from diffusers import AutoencoderKLWan
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from published_wan import IMAGE_TO_VIDEO, PUBLISHED
from ranks import write_json
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from torch import Tensor

from wandistiller.experts import Expert
from wandistiller.export.formats.diffusers import _copy_component
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import TINY, read_json
from wandistiller.wan.loaded_components import Encoder, load_vae
from wandistiller.wan.original_names import original_vae_name
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.published import VAE21, VAE22, KnownWan, known_wans
from wandistiller.wan.transformer_config import TransformerConfig

TEACHER = TINY["tiny"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, shared by these tests."""
    folder = tmp_path_factory.getbasetemp() / "xdg"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "wandistiller"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON of the embedded teacher's files. Do not write into its folder."""
    return comfy_files(TEACHER, tmp_path_factory.mktemp("comfy") / "models")


@pytest.fixture
def copied(files: Path, tmp_path: Path) -> Path:
    """The JSON of a copy of these files."""
    return Path(shutil.copytree(files.parent, tmp_path / "models")) / files.name


def names_of(config: dict) -> list[str]:
    with torch.device("meta"):
        return list(AutoencoderKLWan.from_config(config).state_dict())


def test_original_names_of_wan21_s_vae_are_those_that_diffusers_converts() -> None:
    originals = {original_vae_name(name, VAE21): name for name in names_of(VAE21)}
    assert convert_wan_vae_to_diffusers(originals) == {name: name for name in originals.values()}


@pytest.mark.parametrize(
    ("name", "original"),
    [
        (
            "encoder.down_blocks.1.resnets.0.conv_shortcut.weight",
            "encoder.downsamples.1.downsamples.0.shortcut.weight",
        ),
        (
            "encoder.down_blocks.2.downsampler.time_conv.bias",
            "encoder.downsamples.2.downsamples.2.time_conv.bias",
        ),
        ("decoder.up_blocks.0.resnets.2.norm2.gamma", "decoder.upsamples.0.upsamples.2.residual.3.gamma"),
        ("decoder.up_blocks.1.upsampler.resample.1.bias", "decoder.upsamples.1.upsamples.3.resample.1.bias"),
        ("encoder.mid_block.attentions.0.to_qkv.weight", "encoder.middle.1.to_qkv.weight"),
        ("post_quant_conv.weight", "conv2.weight"),
    ],
)
def test_original_names_of_wan22_s_vae_number_the_parts_of_each_block(name: str, original: str) -> None:
    """As diffusers' scripts/convert_wan_to_diffusers.py converts them."""
    assert name in names_of(VAE22)
    assert original_vae_name(name, VAE22) == original


@pytest.mark.parametrize(
    "name", [n for n, it in (PUBLISHED | IMAGE_TO_VIDEO).items() if not it.transformer["image_dim"]]
)
def test_every_published_wan_without_an_image_encoder_is_known(name: str) -> None:
    published, (wan,) = (PUBLISHED | IMAGE_TO_VIDEO)[name], [w for w in known_wans() if w.name == name]
    assert wan.transformer.shapes == TransformerConfig.of(published.transformer).shapes
    usual = {"boundary_ratio": None, "expand_timesteps": False}
    index = usual | wan.files["model_index.json"]
    assert index.pop("_name_or_path") == name
    assert index == usual | published.index | {"tokenizer": ["transformers", "T5Tokenizer"]}
    assert wan.files["scheduler/scheduler_config.json"] == published.scheduler
    vae = {key: value for key, value in published.vae.items() if not key.startswith("latents_")}
    assert names_of(wan.files["vae/config.json"]) == names_of(vae)


@pytest.mark.parametrize(
    ("dtype", "prefix"),
    slow_but(
        [(torch.bfloat16, COMFY)],
        [(None, ""), (torch.bfloat16, COMFY), (torch.float16, "diffusion_model.")],
    ),
)
def test_weights_of_files_are_read_as_they_are_stored(
    dtype: torch.dtype | None, prefix: str, tmp_path: Path
) -> None:
    wan = open_wan(str(comfy_files(TEACHER, tmp_path, dtype, prefix)))
    wan.require_weights()
    for expert in wan.configs:
        reader, stored = wan.reader(expert), weights_in(TEACHER / expert.value)
        assert reader.stored.keys() == stored.keys()
        for name, value in stored.items():
            reader.read(name, out := torch.empty(value.shape))
            assert torch.equal(out, value.to(dtype or value.dtype).float())


@pytest.mark.parametrize("wan", [wan for wan in known_wans() if "/" in wan.name], ids=lambda wan: wan.name)
def test_a_published_wan_is_known_by_the_headers_of_its_files(wan: KnownWan, tmp_path: Path) -> None:
    found = open_wan(str(published_files(wan, tmp_path)))
    assert found.hub_id == wan.name
    assert len(found.configs) == wan.networks
    assert found.config.takes_image == ("I2V" in wan.name and "TI2V" not in wan.name)
    assert found.shift == (5.0 if "5B" in wan.name else 3.0)


def test_a_folder_of_parts_with_their_index_is_one_network(files: Path, tmp_path: Path) -> None:
    """As the original Wan2.2's `high_noise_model`."""
    state, folder = load_file(files.parent / HIGH), tmp_path / "high_noise_model"
    folder.mkdir()
    names, weight_map = sorted(state), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"diffusion_pytorch_model-{number:05}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    write_json(folder / "diffusion_pytorch_model.safetensors.index.json", index)
    here = {key: str(files.parent / name) for key, name in read_json(files).items()}
    wan = open_wan(str(write_json(tmp_path / "t.json", here | {"transformer": "high_noise_model"})))
    wan.require_weights()
    reader, plain = (w.reader(Expert.HIGH_NOISE) for w in (wan, open_wan("tiny")))
    for name, stored in plain.stored.items():
        values = [torch.empty(stored.shape) for _ in range(2)]
        reader.read(name, values[0])
        plain.read(name, values[1])
        assert torch.equal(*values)


def test_the_pipeline_of_files_has_the_settings_of_the_folder(files: Path) -> None:
    ours, folder = open_wan(str(files)), open_wan("tiny")
    for key in ("configs", "boundary", "shift", "vae", "text_width", "spatial"):
        assert getattr(ours, key) == getattr(folder, key)
    assert ours.revision is None


def test_the_vae_and_the_text_of_files_are_the_folder_s_bit_for_bit(files: Path) -> None:
    view = open_wan(str(files)).path
    pairs = zip(load_vae(view / "vae").parameters(), load_vae(TEACHER / "vae").parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    prompts = "a red circle on a blue background, left", "unknown words: Größe, 北京", ""
    for prompt in prompts:
        texts = [Encoder(folder, torch.bfloat16, CPU).encode(prompt) for folder in (view, TEACHER)]
        assert torch.equal(*texts)


def test_a_changed_file_is_another_teacher_and_a_moved_one_is_the_same(files: Path, copied: Path) -> None:
    before = open_wan(str(copied)).identity
    assert before == open_wan(str(files)).identity
    file = copied.parent / "wan_low_noise.safetensors"
    state = load_file(file)
    save_file(state | {"time_projection.1.weight": state["time_projection.1.weight"] + 1}, file)
    assert open_wan(str(copied)).identity != before


def test_no_weight_is_copied(files: Path) -> None:
    view = open_wan(str(files)).path
    copied = [f for f in view.rglob("*") if f.is_file() and not f.is_symlink()]
    assert {f.suffix for f in copied} == {".json"}


def test_an_export_copies_a_vae_under_diffusers_names_and_leaves_the_user_s_file(
    files: Path, tmp_path: Path
) -> None:
    vae = tmp_path / "diffusion_pytorch_model.safetensors"  # the name that the copy has
    vae.write_bytes(before := (files.parent / VAE).read_bytes())
    here = {key: str(files.parent / name) for key, name in read_json(files).items()} | {"vae": vae.name}
    view = open_wan(str(write_json(tmp_path / "t.json", here))).path
    _copy_component(view / "vae", copied := tmp_path / "student" / "vae")
    assert vae.read_bytes() == before
    made, stored = weights_in(copied), weights_in(TEACHER / "vae")
    assert made.keys() == stored.keys() and all(torch.equal(value, made[n]) for n, value in stored.items())
    assert {file.name for file in copied.iterdir()} == {"config.json", vae.name}


def spoilt(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        state = load_file(file)
        change(state)
        save_file(state, file)

    return spoil


def in_8_bits(state: dict[str, Tensor]) -> None:
    name = "blocks.0.ffn.0.weight"
    state |= {name: state[name].to(torch.float8_e4m3fn), "blocks.0.ffn.0.scale_weight": torch.ones(())}


HIGH, TEXT, VAE = "wan_high_noise.safetensors", "umt5.safetensors", "vae.safetensors"
BAD = {
    "missing tensor": (
        HIGH,
        spoilt(lambda s: s.pop("blocks.3.ffn.2.bias")),
        "1 tensor(s) missing: `blocks.3.ffn.2.bias`",
    ),
    "wrong shape": (
        HIGH,
        spoilt(lambda s: s.update({"head.head.bias": torch.zeros(3)})),
        "`head.head.bias` has the shape [3]; tiny asks for [64]",
    ),
    "VACE": (
        HIGH,
        spoilt(lambda s: s.update({"vace_blocks.0.x": torch.zeros(2)})),
        "not known to this model: `vace_blocks.0.x`",
    ),
    "another network": (
        HIGH,
        spoilt(lambda s: s.update({k: torch.zeros(7) for k in s})),
        "those of none of these: Wan-AI/Wan2.1-T2V-14B-Diffusers",
    ),
    "another model's": (HIGH, lambda file: save_file({"x": torch.zeros(2)}, file), "those of none of these"),
    "scaled fp8": (
        HIGH,
        spoilt(in_8_bits),
        "8 bits or less, whose rounding a student would learn. Give a .saf",
    ),
    "GGUF": (HIGH, lambda file: file.write_bytes(b"GGUF" + bytes(99)), "it is a GGUF file"),
    "LFS pointer": (
        VAE,
        lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"),
        "Git LFS",
    ),
    "pickle": (
        VAE,
        lambda file: torch.save({"x": torch.zeros(2)}, file),
        "a pickle of PyTorch...wan_2.1_vae",
    ),
    "cut off": (TEXT, lambda file: file.write_bytes(file.read_bytes()[:-9]), "no whole safetensors file"),
    "no tokenizer": (
        TEXT,
        spoilt(lambda s: s.pop("spiece_model")),
        "the tensor `spiece_model`, cannot be read",
    ),
    "damaged tokenizer": (
        TEXT,
        spoilt(lambda s: s.update(spiece_model=torch.full((9,), 255, dtype=torch.uint8))),
        "its tokenizer, the tensor `spiece_model`, cannot be read",
    ),
    "another VAE": (
        VAE,
        spoilt(lambda s: s.pop("conv1.bias")),
        "1 tensor(s) missing: `conv1.bias`",
    ),
    "no file": (VAE, Path.unlink, "There is no file"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_in_one_message(name: str, copied: Path, cache: Path) -> None:
    file, spoil, text = BAD[name]
    spoil(copied.parent / file)
    with pytest.raises(ConfigError) as error:
        open_wan(str(copied))
    (problem,) = error.value.problems
    first, _, rest = text.partition("...")
    assert file in problem and first in problem and rest in problem
    assert not list(cache.glob(".scratch*"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"transformer_2": None}, "is one of two networks"),
        ({"transformer": "wan_low_noise.safetensors", "transformer_2": HIGH}, "in each other's place"),
        ({"vae": None}, "`vae` is missing"),
        ({"tokenizer": "x"}, '`tokenizer` is "x". Unknown key.'),
    ],
)
def test_a_json_that_names_other_files_is_refused(
    changes: dict[str, str | None], text: str, copied: Path
) -> None:
    values = read_json(copied) | changes
    write_json(copied, {key: name for key, name in values.items() if name})
    with pytest.raises(ConfigError) as error:
        open_wan(str(copied))
    assert text in str(error.value)


def test_one_file_as_the_teacher_says_how_to_name_all(files: Path) -> None:
    with pytest.raises(
        ConfigError, match='Write a JSON that names all its files, and give that: {"transformer"'
    ):
        open_wan(str(files.parent / HIGH))
