"""The world of pictures and its judge, in closed form: no network is opened here."""

import torch

from wandistiller.tiny import shapes


def test_one_scene_in_ten_is_held_out() -> None:
    seen, held_out = set(shapes.SEEN), set(shapes.HELD_OUT)
    assert (len(seen), len(held_out), len(seen & held_out)) == (1008, 112, 0)


def test_every_attribute_of_held_out_scenes_is_seen() -> None:
    for attribute, names in shapes.ATTRIBUTES.items():
        assert {getattr(shapes.SPECS[prompt], attribute) for prompt in shapes.SEEN} == set(names)


def test_every_canonical_picture_is_its_own_nearest_candidate() -> None:
    assert all(shapes.fully_right(shapes.canonical_images(), list(shapes.SPECS)))


def test_every_jittered_picture_is_judged_right() -> None:
    image_BCHW = torch.stack([shapes.render(prompt, 7) for prompt in shapes.SPECS])
    assert all(shapes.fully_right(image_BCHW, list(shapes.SPECS)))


def test_jitter_depends_on_the_seed_alone() -> None:
    first, again, other = (shapes.render(shapes.SEEN[0], seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
