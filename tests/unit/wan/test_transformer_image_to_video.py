"""Networks and sampling of image-to-video Wans, compared with diffusers' own pipeline."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from drawing import stock
from networks import network_of
from PIL import Image
from safetensors.torch import load_file, save_file
from small_wan import IMAGE_FORMS, make_wan
from torch import Tensor

from wandistiller.batch import Batch, Conditioning
from wandistiller.experts import Expert
from wandistiller.flow import with_noise
from wandistiller.network.sampling import denoise
from wandistiller.teacher.base import Guidance, GuidedTeacher, LocalTeacher
from wandistiller.wan.loaded_components import Encoder, load_image_encoder, mask_of
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.transformer import velocity

CPU = torch.device("cpu")
SIDE, FRAMES = 32, 5
PROMPT, NEGATIVE = "a red circle", "a blue square"


@pytest.fixture(scope="session", params=IMAGE_FORMS)
def image_wan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wan(tmp_path_factory.mktemp("wan"), **IMAGE_FORMS[request.param])


def images(number: int) -> list[Image.Image]:
    generator = torch.Generator().manual_seed(3)
    shape = number, SIDE, SIDE, 3
    return [
        Image.fromarray(p.numpy()) for p in torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    ]


def pixels(frames: list[Image.Image]) -> Tensor:
    """Return pixels_CTHW in [-1, 1]."""
    stacked = torch.stack([torch.frombuffer(bytearray(f.tobytes()), dtype=torch.uint8) for f in frames])
    return stacked.view(len(frames), SIDE, SIDE, 3).permute(3, 0, 1, 2) / 127.5 - 1


def given(folder: Path) -> tuple[Conditioning, Tensor, list[Image.Image]]:
    """Return a sample's conditioning, the text of the negative prompt, and the given frames."""
    wan = open_wan(str(folder))
    frames = images(len(wan.config.given_places))
    encoded = wan.load_given_frames(CPU).encode(pixels(frames), FRAMES)
    text, null = (Encoder(folder, torch.float32, CPU).encode(p) for p in (PROMPT, NEGATIVE))
    return Conditioning(text[None], **{name: t[None] for name, t in encoded.items()}), null, frames


def test_four_guided_steps_are_those_of_diffusers_pipeline(image_wan: Path) -> None:
    wan, pipeline = open_wan(str(image_wan)), stock(image_wan)
    conditioning, null, frames = given(image_wan)
    noise_BCFHW = torch.randn(1, *wan.latent_shape(SIDE, SIDE, FRAMES))
    networks = {
        Expert.HIGH_NOISE: pipeline.transformer,
        Expert.LOW_NOISE: pipeline.transformer_2 or pipeline.transformer,
    }
    guidance = Guidance(null, dict.fromkeys(Expert, 2.0))
    teacher = GuidedTeacher(LocalTeacher({e: network_of(module) for e, module in networks.items()}), guidance)
    x0_BCFHW, _ = denoise(teacher.velocity, wan, wan.shift, noise_BCFHW, conditioning, 4)
    theirs = pipeline(
        image=frames[0],
        last_image=frames[1] if len(frames) == 2 else None,
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        height=SIDE,
        width=SIDE,
        num_frames=FRAMES,
        num_inference_steps=4,
        guidance_scale=2.0,
        latents=noise_BCFHW,
        output_type="latent",
        max_sequence_length=512,
    ).frames
    assert (x0_BCFHW - theirs).norm() / theirs.norm() < 1e-5


def by_hand(network: WanTransformer3DModel, batch: Batch, first_frame_given: bool) -> Tensor:
    """Return diffusers' output for one sample, called as `WanImageToVideoPipeline.__call__` does."""
    given, t = batch.conditioning, 1000 * batch.sigma_B
    text = F.pad(given.text_BLD, (0, 0, 0, 512 - given.text_BLD.shape[1]))
    if first_frame_given:
        mask = torch.ones(1, 1, *batch.x_t_BCFHW.shape[2:])
        mask[:, :, 0] = 0
        hidden = (1 - mask) * given.first_BCFHW + mask * batch.x_t_BCFHW
        t = (mask[0][0][:, ::2, ::2] * t).flatten()[None]
    else:
        hidden = torch.cat([batch.x_t_BCFHW, given.joined_BCFHW], dim=1)
    image = given.image_BLD
    if image is not None and network.config.pos_embed_seq_len:
        image = image.view(2, -1, image.shape[-1])
    return network(hidden, t, text, encoder_hidden_states_image=image, return_dict=False)[0]


def test_a_training_step_has_the_loss_and_gradients_of_diffusers_own_call(image_wan: Path) -> None:
    wan, (conditioning, _, _) = open_wan(str(image_wan)), given(image_wan)
    network, expands = stock(image_wan).transformer, wan.config.expands_time
    x0 = torch.randn(1, *wan.latent_shape(SIDE, SIDE, FRAMES))
    batch = with_noise(x0, conditioning, Expert.HIGH_NOISE, [0.7], [(0, "noise")])
    found = {}
    for name in ("ours", "theirs"):
        if name == "ours":
            error = velocity(network, batch) - batch.v_BCFHW
        else:
            error = by_hand(network, batch, expands) - (batch.noise_BCFHW - batch.x0_BCFHW)
            error = torch.cat([0 * error[:, :, :1], error[:, :, 1:]], dim=2) if expands else error
        loss = error.square().mean()
        loss.backward()
        found[name] = loss.detach(), {n: p.grad.clone() for n, p in network.named_parameters()}
        network.zero_grad()
    (loss, grads), (their_loss, their_grads) = found.values()
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
    for name, gradient in grads.items():
        assert (gradient - their_grads[name]).norm() <= 1e-5 * their_grads[name].norm() + 1e-9, name


def test_two_samples_at_once_are_those_of_one_each(image_wan: Path) -> None:
    wan, (conditioning, _, _) = open_wan(str(image_wan)), given(image_wan)
    network = stock(image_wan).transformer
    x0 = torch.randn(2, *wan.latent_shape(SIDE, SIDE, FRAMES))
    both = conditioning.map(lambda t: torch.cat([t, 0.5 * t]))
    keys = [(0, "a"), (0, "b")]
    batch = with_noise(x0, both, Expert.HIGH_NOISE, [0.9, 0.5], keys)
    with torch.no_grad():
        v_BCFHW = velocity(network, batch)
        for i in range(2):
            one = batch.with_tensors([t[i : i + 1] for t in batch.tensors()])
            torch.testing.assert_close(velocity(network, one)[0], v_BCFHW[i], rtol=1e-4, atol=1e-5)


def test_blank_states_have_the_shapes_of_real_ones(image_wan: Path) -> None:
    wan, (conditioning, _, _) = open_wan(str(image_wan)), given(image_wan)
    latent = wan.latent_shape(SIDE, SIDE, FRAMES)
    blank = wan.config.blank_state(latent, text_tokens=conditioning.text_BLD.shape[1])
    shapes, found = ([t.shape for t in given.tensors()[:2]] for given in (conditioning, blank.conditioning))
    assert found == shapes and len(conditioning.tensors()) == len(blank.conditioning.tensors())
    state = blank.with_tensors([t.to("meta") for t in blank.tensors()])
    assert velocity(wan.config.meta().to("meta"), state).shape == (1, *latent)


def test_given_first_frame_has_no_noise_and_no_velocity(tmp_path: Path) -> None:
    folder = make_wan(tmp_path, **IMAGE_FORMS["Wan2.2-TI2V-5B"])
    wan, (conditioning, _, _) = open_wan(str(folder)), given(folder)
    x0 = conditioning.with_given(torch.randn(1, *wan.latent_shape(SIDE, SIDE, FRAMES)))
    batch = with_noise(x0, conditioning, Expert.HIGH_NOISE, [0.7], [(0, "noise")])
    first = conditioning.first_BCFHW
    assert torch.equal(batch.noise_BCFHW[:, :, :1], first) and not batch.v_BCFHW[:, :, :1].any()
    torch.testing.assert_close(batch.x_t_BCFHW[:, :, :1], first)
    with torch.no_grad():
        v_BCFHW = velocity(stock(folder).transformer, batch)
        noisy = replace(batch, x_t_BCFHW=batch.x_t_BCFHW + torch.eye(2)[0].view(1, 1, 2, 1, 1))
        again = velocity(stock(folder).transformer, noisy)
    assert not v_BCFHW[:, :, :1].any() and v_BCFHW[:, :, 1:].any() and torch.equal(v_BCFHW, again)


def test_an_image_encoder_with_the_names_of_transformers_4_is_read_whole(tmp_path: Path) -> None:
    folder = make_wan(tmp_path, **IMAGE_FORMS["Wan2.1-I2V-14B"])
    file, state = folder / "image_encoder" / "model.safetensors", load_image_encoder(folder / "image_encoder")
    before = {name: p.clone() for name, p in state.named_parameters()}
    old = {f"vision_model.{name}": p for name, p in load_file(file).items()}
    save_file(old | {"vision_model.embeddings.position_ids": torch.arange(5)[None]}, file, {"format": "pt"})
    open_wan(str(folder)).require_weights()
    after = dict(load_image_encoder(folder / "image_encoder").named_parameters())
    assert all(torch.equal(after[name], p) for name, p in before.items())


def test_mask_is_1_at_given_frames_of_each_latent_frame() -> None:
    assert mask_of([0], 9, 4).T.tolist() == [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert mask_of([0, -1], 9, 4).T.tolist() == [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]]
