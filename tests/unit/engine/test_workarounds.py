"""Patches of DeepSpeed, and workarounds that change no number."""

import ctypes
import gc
import os
import subprocess
import weakref
from pathlib import Path

import cpuinfo
import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import PinMemoryBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
from deepspeed.runtime.engine import DeepSpeedEngine
from engines import engine, learner_of
from on_ranks import compiler, tuning
from ranks import call
from small_wan import small_transformer

from wandistiller.config.run_config import RunConfig
from wandistiller.engine import workarounds
from wandistiller.engine.patches import numbers_alone, patch_deepspeed
from wandistiller.experts import Expert
from wandistiller.student import learner
from wandistiller.utils.keyed_random import keyed_normal

pytestmark = pytest.mark.usefixtures("one_rank")


def weights_after(steps: int, size: int) -> list[torch.Tensor]:
    """Weights and moments after updates of Adam."""
    weights = torch.nn.Parameter(keyed_normal((size,), "weights"))
    adam = DeepSpeedCPUAdam([weights], lr=1e-2, weight_decay=0.1)
    adam.register_step_pre_hook(lambda optimizer, *_: workarounds.reset_adam_step_cache(optimizer))
    workarounds.share_adam_s_time(adam)
    for step in range(steps):
        weights.grad = keyed_normal((size,), "gradient", step)
        adam.step()
    return [weights.detach(), *(adam.state[weights][name] for name in ("exp_avg", "exp_avg_sq"))]


@pytest.mark.parametrize("size", [4096, 4096 * 2 + 77, 5])
def test_adam_in_parts_changes_no_bit(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights_after(3, size)
    monkeypatch.setattr(workarounds, "ADAM_PART", 1024)
    assert all(map(torch.equal, weights_after(3, size), whole))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_that_seldom_waits_has_the_same_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for wait in (learner.wait_seldom, lambda _: None):
        monkeypatch.setattr(learner, "wait_seldom", wait)
        student = tuning.build(RunConfig(lora={"rank": 4}), tuning.engine(2, dtype, gradient_clipping=0.01))
        losses = [tuning.learn(student, step) for step in range(3)]
        norm = student.engine(Expert.HIGH_NOISE).get_global_grad_norm()
        found.append(torch.tensor([*losses, norm]))
    assert torch.equal(*found) and found[0].isfinite().all()


def test_gpu_architectures_with_letters_are_read_by_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", numbers_alone("8.0 9.0a;10.0f+PTX"))
    builder = FusedAdamBuilder()
    builder.jit_mode = True
    builder.compute_capability_args()
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0;10.0+PTX"


def test_of_gpu_architectures_by_name_nothing_is_left_so_that_deepspeed_asks_the_gpus() -> None:
    assert numbers_alone("Ampere;9.0a") == numbers_alone("Hopper") == ""
    assert numbers_alone("9.0+PTX") == "9.0+PTX"


def test_the_processor_is_known_as_the_library_knows_it() -> None:
    found, whole = cpuinfo.get_cpu_info(), cpuinfo.cpuinfo._get_cpu_info_internal()
    assert all(found[key] == whole[key] for key in ("arch", "bits", "vendor_id_raw"))
    assert set(found["flags"]) <= set(whole["flags"])
    assert all((flag in found["flags"]) == (flag in whole["flags"]) for flag in ("avx2", "avx512f"))


def test_patches_are_applied_once() -> None:
    before = OpBuilder.jit_load, DeepSpeedEngine.__init__, cpuinfo.get_cpu_info
    patch_deepspeed()
    assert before == (OpBuilder.jit_load, DeepSpeedEngine.__init__, cpuinfo.get_cpu_info)
    assert OpBuilder.jit_load.__module__ == patch_deepspeed.__module__


def test_an_engine_that_was_destroyed_leaves_no_network() -> None:
    student = learner_of(small_transformer(0, 1), engine(zero_optimization={"stage": 2}))
    network = weakref.ref(student.engine(Expert.HIGH_NOISE).module)
    workarounds.destroy_engines(student.engines.values())
    del student
    gc.collect()
    assert network() is None


def test_steps_with_adam_import_nothing_of_torch_s_compiler() -> None:
    assert call(compiler.is_imported_after_steps, [1, 2, 3], ranks=1) == [False]


def test_pin_memory_exports_nothing_of_a_libstdcpp_that_is_linked_statically(tmp_path: Path) -> None:
    """Its streams replaced those of cuDNN, as DeepSpeed loads the extension with RTLD_GLOBAL."""
    source, library = tmp_path / "a.cpp", tmp_path / "a.so"
    source.write_text('#include <sstream>\nextern "C" void print(long x) { std::ostringstream() << x; }\n')
    flags = ["-shared", "-fPIC", "-static-libstdc++", *PinMemoryBuilder().extra_ldflags()]
    subprocess.run(["g++", source, "-o", library, *flags], check=True)
    found = ctypes.CDLL(str(library))
    assert hasattr(found, "print") and not hasattr(found, "_ZNSo9_M_insertIlEERSoT_")
