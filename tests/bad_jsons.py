# ruff: noqa: E501 (a case a line)
"""Wrong inputs of `bad_inputs`: the student's JSON, the two DeepSpeed JSONs, flags, and the other commands."""

import json
from collections.abc import Iterator
from typing import Any

from bad_inputs import ENGINE, Case

STUDENTS: list[tuple[dict[str, Any], str]] = [
    ({"num_layer": 2}, "`num_layer` is 2. There is no such key. Did you mean `num_layers`?"),
    ({"num_layers": "2"}, '`num_layers` is "2". Write a positive integer, or a share'),
    ({"num_layers": True}, "`num_layers` is true. Write a positive integer, or a share"),
    ({"num_layers": 0}, "`num_layers` is 0. Write a positive integer, or a share"),
    ({"num_layers": 1.5}, "`num_layers` is 1.5. Write a positive integer, or a share"),
    ({"num_layers": -0.5}, "`num_layers` is -0.5. Write a positive integer, or a share"),
    ({"num_layers": 9}, "`num_layers` is 9...has 4. Write at most that"),
    ({"num_layers": 10**9, "init": "random"}, "`num_layers` is 1000000000. Write an integer from 1 to 1024."),
    ({"ffn_dim": 10**9, "init": "random"}, "`ffn_dim` is 1000000000. Write an integer from 1 to 1000000."),
    ({"num_attention_heads": [2]}, "`num_attention_heads` is [2]. Write a positive integer"),
    ({"num_attention_heads": 3, "init": "random"}, "`num_attention_heads` is 3. It does not divide the teacher's 2."),
    ({"attention_head_dim": 33, "init": "random"}, "`attention_head_dim` is 33. Write an even integer from 2 to 1024."),
    ({"ffn_dim": {}}, "`ffn_dim` is {}. Write a positive integer"),
    ({"keep_layers": []}, "`keep_layers` is []. Write rising layer numbers from 0 to 3."),
    ({"keep_layers": [3, 1]}, "`keep_layers` is [3, 1]. Write rising layer numbers from 0 to 3."),
    ({"keep_layers": [1, 1]}, "`keep_layers` is [1, 1]. Write rising layer numbers"),
    ({"keep_layers": [0, 4]}, "`keep_layers` is [0, 4]. Write rising layer numbers from 0 to 3."),
    ({"keep_layers": [0, True]}, "`keep_layers` is [0, true]. Write rising layer numbers"),
    ({"keep_layers": ["0"]}, '`keep_layers` is ["0"]. Write rising layer numbers'),
    ({"keep_layers": "some"}, '`keep_layers` is "some". Write uniform, ends, importance, or a list'),
    ({"keep_layers": [0, 1], "num_layers": 3}, "`num_layers` is 3. keep_layers names 2; leave one of the two keys out."),
    ({"experts": 2}, "`experts` is 2. Write one or two."),
    ({"experts": ["one"]}, '`experts` is ["one"]. Write one or two.'),
    ({"from_expert": "both"}, '`from_expert` is "both". Write low_noise or high_noise or average.'),
    ({"from_expert": "average", "experts": "two"}, "`from_expert` is \"average\". Each of two experts starts from its own"),
    ({"width_basis": 0}, "`width_basis` is 0. Write channels or principal or truncate."),
    ({"width_basis": "principal"}, "`width_basis` is \"principal\". The hidden width is the teacher's; leave it out"),
    ({"ffn_units": None}, "`ffn_units` is null. Write activation or weight."),
    ({"ffn_units": "weight"}, "`ffn_units` is \"weight\". ffn_dim is the teacher's; leave it out"),
    ({"init": 5}, "`init` is 5. Write teacher, random, or a folder"),
    ({"init": ""}, '`init` is "". Write teacher, random, or a folder'),
    ({"init": "nowhere"}, '`init` is "nowhere". Write teacher, random, or a folder'),
    ({"init": "{wan}", "num_layers": 2}, '"init" names a folder, which fixes the architecture. Leave the sizes out.'),
    ({"init": "random", "keep_layers": "ends"}, "`keep_layers` is \"ends\". It chooses what is kept of the teacher; leave it out"),
]  # fmt: skip
BUCKET = "Write a whole number from 1 to 10000000000."
FLAG = "Write true or false."
ZERO: list[tuple[str, Any, str]] = [  # of `zero_optimization`, in the student's JSON and the teacher's
    ("stage", "3", 'is "3". Write a whole number, 0 or more.'), ("stage", True, "is true. Write a whole number, 0 or more."),
    ("stage", 4, "is 4. "), ("stage", None, "is null. Write a whole number, 0 or more."),
    ("reduce_bucket_size", "5e8", f'is "5e8". {BUCKET}'), ("reduce_bucket_size", 0, f"is 0. {BUCKET}"),
    ("reduce_bucket_size", -5e8, f"is -500000000.0. {BUCKET}"), ("reduce_bucket_size", 10**15, f"is {10**15}. {BUCKET}"),
    ("reduce_bucket_size", 1.5, f"is 1.5. {BUCKET}"), ("allgather_bucket_size", "auto!", 'is "auto!". Write an even whole'),
    ("allgather_bucket_size", 3, "is 3. Write an even whole number from 2 to 10000000000."), ("sub_group_size", 0, "is 0. Write a positive whole number."),
    ("stage3_prefetch_bucket_size", -1, "is -1. Write a whole number, 0 or more."),
    ("stage3_max_live_parameters", "1e9", 'is "1e9". Write a whole number, 0 or more.'),
    ("stage3_param_persistence_threshold", [], "is []. Write a whole number, 0 or more."),
    ("overlap_comm", "true", f'is "true". {FLAG}'), ("contiguous_gradients", 1, f"is 1. {FLAG}"),
    ("reduce_scatter", None, f"is null. {FLAG}"), ("offload_param", "cpu", 'is "cpu". Write an object, {...}.'),
    ("offload_param", {"device": "gpu"}, '.device` is "gpu"'), ("offload_param", {"device": 0}, ".device` is 0. Write text."),
    ("offload_param", {"devise": "cpu"}, '.devise` is "cpu". There is no such key. Did you mean `device`?'),
    ("offload_param", {"device": "cpu", "buffer_count": 0}, ".buffer_count` is 0. Write a positive whole number."),
    ("offload_param", {"device": "cpu", "pin_memory": "no"}, f'.pin_memory` is "no". {FLAG}'),
    ("offload_param", {"device": "nvme"}, ".nvme_path` is null. Write a folder on a fast disk."),
    ("cpu_ofload", True, "is true. There is no such key. Did you mean `cpu_offload`?"),
]  # fmt: skip
SECTIONS: list[tuple[dict[str, Any], str]] = [  # in the student's JSON and the teacher's
    ({"zero_optimization": 3}, "`zero_optimization` is 3. Write an object, {...}."),
    ({"zero_optimization": None}, "`zero_optimization` is null. Write an object, {...}."),
    ({"zero_optimisation": {}}, "`zero_optimisation` is {}. There is no such key. Did you mean `zero_optimization`?"),
    ({"bf16": True}, "`bf16` is true. Write an object, {...}."),
    ({"bf16": {"enabled": "yes"}}, f'`bf16.enabled` is "yes". {FLAG}'),
    ({"bf16": {"enabled": 1}}, f"`bf16.enabled` is 1. {FLAG}"),
    ({"fp16": {"enabled": True, "loss_scale": "dynamic"}}, '`fp16.loss_scale` is "dynamic". Write a number, 0 or more.'),
    ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "`fp16.loss_scale_window` is 0. Write a positive whole number."),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "`bf16` and `fp16` are both enabled. Keep one."),
    ({"activation_checkpointing": []}, "`activation_checkpointing` is []. Write an object, {...}."),
    ({"activation_checkpointing": {"number_checkpoints": -1}}, "`activation_checkpointing.number_checkpoints` is -1. Write a pos"),
    ({"aio": "fast"}, '`aio` is "fast". Write an object, {...}.'),
    ({"aio": {"block_size": "1MB"}}, '`aio.block_size` is "1MB". Write a positive integer.'),
    ({"aio": {"queue_dept": 8}}, "`aio.queue_dept` is 8. There is no such key. Did you mean `queue_depth`?"),
    ({"data_types": {"grad_accum_dtype": "int8"}}, '`data_types.grad_accum_dtype` is "int8". Write fp32, fp16 or bf16.'),
    ({"checkpoint": {"tag_validation": 1}}, "`checkpoint.tag_validation` is 1. Write WARN, IGNORE or FAIL."),
    ({"communication_data_type": 16}, "`communication_data_type` is 16. Write text."),
    ({"communication_data_type": "int4"}, "communication_data_type"),
    ({"gradient_clipping": "1.0"}, '`gradient_clipping` is "1.0". Write a number, 0 or more.'),
    ({"gradient_clipping": -1}, "`gradient_clipping` is -1. Write a number, 0 or more."),
    ({"steps_per_print": 0}, "`steps_per_print` is 0. Write a positive integer."),
    ({"wall_clock_breakdown": "false"}, f'`wall_clock_breakdown` is "false". {FLAG}'),
    ({"flops_profiler": {"enabled": True, "profile_step": 0}}, "`flops_profiler.profile_step` is 0. Write a positive integer."),
    ({"tensorboard": {"enabled": True, "output": "x"}}, "output"),
    ({"sparse_gradients": True}, "`sparse_gradients` is true. There is no such key."),
    ({"dump_state": 1}, f"`dump_state` is 1. {FLAG}"),
]  # fmt: skip
OPTIMIZER = ENGINE["optimizer"]
ENGINES: list[tuple[dict[str, Any], str]] = [  # in the student's JSON alone
    ({"optimizer": None}, "`optimizer` is null. Write an object, {...}."),
    ({"comet": {"api_key": "abc"}}, "`comet.api_key` is a secret. Remove it, and set COMET_API_KEY in the environment."),
    ({"optimizer": "AdamW"}, '`optimizer` is "AdamW". Write an object, {...}.'),
    ({"optimizer": {"type": "SGD"}}, '`optimizer.type` is "SGD". Write one of: Adam, AdamW'),
    ({"optimizer": {"type": "Adamw2"}}, '`optimizer.type` is "Adamw2"...Did you mean `Adam`?'),
    ({"optimizer": {"type": "AdamW", "params": 3}}, "`optimizer.params` is 3. Write an object, {...}."),
    *(({"optimizer": OPTIMIZER | {"params": {key: value}}}, f"`optimizer.params.{key}` is {json.dumps(value)}. {said}")
      for key, value, said in [
          ("lr", "1e-4", "Write a number from 0 to 1."), ("lr", -1e-4, "Write a number from 0 to 1."),
          ("lr", 100, "Write a number from 0 to 1."), ("lr", None, "Write a number from 0 to 1."),
          ("betas", 0.9, "Write two numbers from 0 to below 1"), ("betas", [0.9], "Write two numbers from 0 to below 1"),
          ("betas", [0.9, 1.0], "Write two numbers from 0 to below 1"), ("betas", ["0.9", 0.99], "Write two numbers"),
          ("eps", "1e-8", "Write a number, 0 or more."), ("eps", -1e-8, "Write a number, 0 or more."),
          ("weight_decay", [0.1], "Write a number, 0 or more."), ("weight_decay", -1, "Write a number, 0 or more."),
          ("amsgrad", 0, FLAG), ("leraning_rate", 1e-4, "There is no such key."),
      ]),
    *(({"scheduler": {"type": kind, "params": params}}, said) for kind, params, said in [
        ("Cosine", {}, '`scheduler.type` is "Cosine". Write one of: WarmupLR'),
        ("WarmupLR", {"warmup_num_steps": 0}, "`scheduler.params.warmup_num_steps` is 0. Write a positive integer."),
        ("WarmupLR", {"warmup_num_steps": "10"}, '`scheduler.params.warmup_num_steps` is "10". Write a positive integer.'),
        ("WarmupLR", {"warmup_max_lr": -1}, "`scheduler.params.warmup_max_lr` is -1. Write a number from 0 to 1."),
        ("WarmupLR", {"warmup_type": "cosine"}, '`scheduler.params.warmup_type` is "cosine". Write log or linear.'),
        ("WarmupDecayLR", {}, "`scheduler.params.total_num_steps` is missing, which WarmupDecayLR has no default for. Write it."),
        ("WarmupCosineLR", {"total_num_steps": 1.5}, "`scheduler.params.total_num_steps` is 1.5. Write a positive integer."),
        ("OneCycle", {"cycle_min_lr": 0.1}, "`scheduler.params.cycle_max_lr` is missing"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "`scheduler.params.lr_range_test_step_size` is 0. Write a positive integer."),
        ("WarmupLR", {"warmup_steps": 5}, "`scheduler.params.warmup_steps` is 5. There is no such key. Did you mean `warmup_num_steps`?"),
    ]),
    ({"scheduler": []}, "`scheduler` is []. Write an object, {...}."),
    ({"train_batch_size": "4"}, '`train_batch_size` is "4". Write a positive integer.'),
    ({"train_batch_size": 0}, "`train_batch_size` is 0. Write a positive integer."),
    ({"train_batch_size": 2.0}, "`train_batch_size` is 2.0. Write a positive integer."),
    ({"gradient_accumulation_steps": 3}, "train_batch_size...4"),
    ({"wandistiller": {"checkpoint": "mlp"}, "activation_checkpointing": {}}, '`wandistiller.checkpoint` is "mlp". Write one of'),
    ({"wandistiller": {"checkpoint_every": 0}, "activation_checkpointing": {}}, "`wandistiller.checkpoint_every` is 0. Write 1"),
    ({"zero_optimization": {"stage": 2, "compute_grad_norm": False}}, "Write `gradient_clipping`: 0, or remove it."),
    ({"zero_optimization": {"stage": 1, "legacy_stage1": True}}, "DeepSpeed has removed it. Remove it."),
    ({"zero_optimization": {"stage": 2, "zenflow": {}}}, "`zero_optimization.zenflow` is {}...Remove it."),
    ({"prescale_gradients": True}, "`prescale_gradients` is true. DeepSpeed does not support it with ZeRO's reduce_scatter. Remove it."),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "It needs `zero_optimization.offload_optimizer`."),
    ({"checkpoint": {"writer": {}}}, "`checkpoint.writer` is {}. DeepSpeed's other writers fail here. Remove it."),
    ({"data_types": {"param_dtype": "bf16"}}, "`data_types.param_dtype` is \"bf16\". The sections bf16 and fp16 say fp32. Remove it."),
    ({"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["x"]}}, "Write classes that can be imported"),
    ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "DeepSpeed's FusedAdam has none. Write `torch_adam`: true"),
    ({"optimizer": {"type": "AdamW", "params": {"foreach": False}}}, "Only torch's own Adam has it. Write `torch_adam`: true"),
    ({"data_efficiency": "x"}, '`data_efficiency` is "x". Write an object, {...}.'),
]  # fmt: skip


def of_jsons() -> Iterator[Case]:
    for changes, said in STUDENTS:
        yield Case(f"student: {json.dumps(changes)}", (f"{{here}}/student.json: {said}",), {"student.json": changes})
    for changes, said in ENGINES:
        yield Case(f"engine: {json.dumps(changes)}", (f"{{here}}/engine.json: ...{said}",), {"engine.json": ENGINE | changes})
    for name, base in (("engine", ENGINE), ("placement", {})):
        for key, value, said in ZERO:
            changes = {"zero_optimization": {"stage": 3} | {key: value}}
            said = f"{{here}}/{name}.json: ...`zero_optimization.{key}...{said}"
            yield Case(f"{name}: {key} {json.dumps(value)}", (said,), {f"{name}.json": base | changes})
        for changes, said in SECTIONS:
            yield Case(f"{name}: {json.dumps(changes)}", (f"{{here}}/{name}.json: ...{said}",), {f"{name}.json": base | changes})


FLAGS: list[tuple[tuple[str, ...], str]] = [
    (("--lr", "nan"), "command line: `lr` is NaN. Write a finite number."), (("--lr", "much"), "invalid float value: 'much'"),
    (("--shift", "inf"), "command line: `shift` is Infinity. Write a finite number."),
    (("--guidance_scale=-inf",), "command line: `guidance_scale` is -Infinity. Write a finite number."),
    (("--max_steps", "1e3"), "invalid int value: '1e3'"), (("--seed", ""), "invalid int value: ''"),
    (("--height", "9" * 5000), "invalid int value"), (("--learning_rates", "{"), "not valid JSON"),
    (("--learning_rates", "[1]"), "command line: `learning_rates` is [1]. Write a value of type dict"),
    (("--lora", "[" * 5000), "not valid JSON"), (("--lora", '{"rank": NaN}'), "command line: `lora.rank` is NaN. Write a finite"),
    (("--heigth", "64"), "unrecognized arguments: --heigth 64"), (("--frozen",), "expected at least one argument"),
    (("--teacher_dtype", "int8"), "invalid choice: 'int8'"), (("--recipe",), "expected one argument"),
    (("--recipe", "{here}/none.json"), "{here}/none.json: no such file. Mend the path."),
    (("--output_dir", ""), "command line: `output_dir` is missing. Give --output_dir"),
    (("--num_steps", "3", "--max_steps", "4"), "command line: `num_steps` is 3. `max_steps` is 4 and means the same. Keep one."),
    (("--num_epochs", "3", "--max_steps", "4"), "`max_steps` and `num_epochs` are both given. Keep one."),
    (("--lr", "0.1", "--deepspeed_config", "{here}/engine.json"), "`lr` is 0.1, but ...engine.json...is 0.0001. Keep one."),
    (("--teacher_on_cpu", "--teacher_deepspeed_config", "{here}/placement.json"), "which means ...host_cpu.json, but ...Keep one."),
    (("--data_path", "caf\udce9.txt"), "`data_path` is ...It holds a character that no file name or prompt can have. Remove it."),
]  # fmt: skip
SAMPLE = ("sample", "--model", "{wan}", "--prompts", "a", "--output", "{here}/out", "--height", "32", "--width", "32", "--steps", "1")
EVALUATE = ("evaluate", "--student", "{wan}", "--teacher_path", "{wan}")
EXPORT = ("export", "--output", "{here}/out", "--checkpoint", "{here}")
COMMANDS: list[tuple[tuple[str, ...], str]] = [
    (("distil",), "invalid choice: 'distil'"), ((), "the following arguments are required: COMMAND"),
    (("train", "now"), "unrecognized arguments: now"), (("sample",), "the following arguments are required: --model"),
    ((*SAMPLE, "--steps", "100000"), "`steps` is 100000. Write a positive number, at most 1000."),
    ((*SAMPLE, "--guidance_scale", "nan"), "`guidance_scale` is NaN. Write a finite number."),
    ((*SAMPLE, "--seed", "9" * 30), "Write a number from 0 to 1000000000000000000."),
    ((*SAMPLE, "--num_frames", "3"), "`num_frames` is 3. Write 4k + 1, e.g. 1."),
    ((*SAMPLE, "--height", "1000000"), "`height` is 1000000. This teacher knows places up to 1024."),
    ((*SAMPLE, "--prompts", " "), '`prompts` is " ". Write some text, or name a .txt'),
    ((*SAMPLE, "--prompts", "{here}/none.txt"), "{here}/none.txt: no such file or folder. Give prompts"),
    ((*SAMPLE, "--output", "{here}/prompts.txt/x"), "`output` is ..., but {here}/prompts.txt is a file. Name a folder."),
    ((*SAMPLE, "--model", "{here}"), "{here}: no file {here}/model_index.json. Give a complete diffusers Wan pipeline"),
    ((*SAMPLE, "--dtype", "int8"), "invalid choice: 'int8'"),
    (EXPORT, "{here}: no checkpoint there. Name the --output_dir of a run"), (("export",), "are required: --checkpoint, --output"),
    ((*EXPORT, "--checkpoint", "{here}/" + "x" * 300), "is too long a name. Give a shorter path."),
    ((*EXPORT, "--dtype", "fp8"), "invalid choice: 'fp8'"), (("evaluate",), "are required: --student"),
    (EVALUATE[:3], "no wandistiller.json in it. Give a folder that `wandistiller export`"),
    ((*EVALUATE, "--batch", "0"), "`batch` is 0. Write a positive number"),
    ((*EVALUATE, "--steps", "-1"), "`steps` is -1. Write a positive number"),
    ((*EVALUATE, "--guidance_scale", "inf"), "`guidance_scale` is Infinity. Write a finite number."),
    ((*EVALUATE, "--output", "{here}/prompts.txt"), "`output` is ...is a file. Name a folder."),
    ((*EVALUATE, "--clip_path", "{here}"), "`clip_path` is ...no config.json in it. Give a CLIP folder"),
    ((*EVALUATE, "--teacher_deepspeed_config", "{here}"), "{here}: is a folder. Name a file."),
]  # fmt: skip


def of_commands() -> Iterator[Case]:
    for flags, said in FLAGS:
        yield Case(f"flags: {' '.join(flags)[:60]!a}", (said,), flags=flags)
    for words, said in COMMANDS:
        name = " ".join(w for w in words if w not in (*SAMPLE[1:], *EVALUATE[1:])) or "nothing"
        yield Case(f"command: {name[:60]}", (said,), argv=words or ("--local_rank", "0"))
