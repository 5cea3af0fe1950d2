"""What the real software understands of the update in a written config: exactly what the job says.

Of drawn jobs, the optimizer's settings, the learning rate of every step, clipping, seed, steps, batch and adapter are
compared with the objects that the software itself makes of the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fivefold.interop.equivalence import resolve_adapter
from fivefold.interop.format import ConfigPlan
from fivefold.interop.write import write
from fivefold.job import Job
from fivefold.model.weights import list_targets
from fivefold.trainer.optimizers.optimizer import compute_learning_rate
from tests.interop.draws import Range, list_written_plans

transformers = pytest.importorskip("transformers")
# Versions before 5 know the old name alone.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")

TUNED = Range(models=("llama3-8b",), recipes=("bf16-grad16", "bf16-autocast"), axes=("dp",), fine_tuning=True)
TRAINED = Range(models=("llama3-8b",), recipes=("bf16-grad16", "bf16", "fp32"), axes=("dp",), acs=("none", "full"))
OPTIMIZERS = {  # transformers' names of each optimizer, from trainer_optimizer.py and not from the writer's table
    "adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw8bit", "adamw_torch_4bit": "adamw4bit",
    "adafactor": "adafactor", "sgd": "sgd",
}  # fmt: skip
COUNT = 12  # configs of each stack


def list_drawn(to: str, *stacks: str, among: Range) -> Iterator[tuple[ConfigPlan, dict[str, str]]]:
    """Yield drawn plans that ``to`` can express with the files that are written."""
    for stack in stacks:
        drawn = list_written_plans(stack, to=to, count=COUNT, among=among)
        assert len(drawn) == COUNT
        for plan in drawn:
            written, rate = write(plan, to=to), plan.job.learning_rate
            if among is TUNED or to in ("accelerate", "deepspeed"):
                warms_from_minimum = rate.kind == "wsd" and rate.floor > 0 and rate.warmup_steps > 0
                assert any("warms up from its minimum" in remark for remark in written.remarks) == warms_from_minimum
            yield plan, dict(written.files)


def list_rates(job: Job) -> list[float]:
    """Return our learning rate of every step."""
    return [compute_learning_rate(job.learning_rate, step=step, steps=job.steps) for step in range(job.steps)]


def list_transformers_rates(kind: str, kwargs: Mapping[str, Any], *, job: Job, peak: float, warmup: int) -> list[float]:
    """Return the learning rate of every step of transformers' schedule."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    schedule = transformers.get_scheduler(
        kind, optimizer, num_warmup_steps=warmup, num_training_steps=job.steps, scheduler_specific_kwargs=dict(kwargs)
    )
    rates = list[float]()
    for _ in range(job.steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


def check_rates(rates: list[float], job: Job) -> None:
    """Hold the rate of every step against ours; transformers warms up from 0, and ends a step after the last."""
    rate, ours = job.learning_rate, list_rates(job)
    decay = (rate.decay_steps or job.steps // 5) if rate.kind == "wsd" else job.steps - rate.warmup_steps
    step = rate.peak * max(1 / max(1, rate.warmup_steps), 2 / decay)
    if rate.kind == "wsd":  # whose warm-up begins at the minimum, as the writer says
        for number in range(rate.warmup_steps):
            share = rate.floor + (1 - rate.floor) * number / rate.warmup_steps
            assert rates[number] == pytest.approx(rate.peak * share)
        ours[: rate.warmup_steps] = rates[: rate.warmup_steps]
    assert max(rates) == pytest.approx(rate.peak)
    for number, (theirs, wanted) in enumerate(zip(rates, ours, strict=True)):
        limit = step if rate.warmup_steps or number >= job.steps - decay else 1e-9
        assert abs(theirs - wanted) <= limit * 1.001, (number, theirs, wanted, rate)


def check_arguments(said: Any, plan: ConfigPlan, *, pairs: bool, warmup: Callable[[int], int]) -> None:
    """Hold TrainingArguments, or an object with their names, against the job."""
    job, layout = plan.job, plan.layout
    assert (said.max_steps, said.seed) == (job.steps, job.seed)
    assert (said.weight_decay, said.adam_epsilon) == (job.optimizer.weight_decay, job.optimizer.epsilon)
    assert (said.adam_beta1, said.adam_beta2) == job.optimizer.betas
    assert said.max_grad_norm == job.optimizer.clip
    sequences = said.per_device_train_batch_size * (2 if pairs else 1)
    assert sequences == layout.mbs
    assert sequences * said.gradient_accumulation_steps * layout.dp == job.global_batch
    assert bool(said.gradient_checkpointing) == (layout.ac == "full")
    optimizer = str(getattr(said.optim, "value", said.optim))
    assert OPTIMIZERS[optimizer] == job.optimizer.kind
    kind = str(getattr(said.lr_scheduler_type, "value", said.lr_scheduler_type))
    kwargs = said.lr_scheduler_kwargs or {}
    kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
    rates = list_transformers_rates(kind, kwargs, job=job, peak=float(said.learning_rate), warmup=warmup(job.steps))
    check_rates(rates, job)


def check_adapter(plan: ConfigPlan, names: Mapping[str, str], said: Any, *, on: bool, every: tuple[Any, ...]) -> None:
    """Hold what a trainer understands of the adapter against the job; ``names``: its name of each field."""
    adapter = resolve_adapter(plan.job.adapter, plan.model)
    assert on == (adapter is not None)
    if adapter is None:
        return
    assert getattr(said, names["rank"]) == adapter.rank
    assert getattr(said, names["alpha"]) == adapter.alpha
    assert getattr(said, names["dropout"]) == adapter.dropout or plan.job.objective == "dpo"
    assert bool(getattr(said, names["rank_stabilized"])) == adapter.rank_stabilized
    assert bool(getattr(said, names["magnitudes"])) == (adapter.kind == "dora")
    targets = getattr(said, names["targets"])
    targets = targets.split(",") if isinstance(targets, str) else list(targets or ())
    wanted = set(list_targets(plan.model, adapter) or adapter.targets)
    assert set(targets) == wanted or tuple(targets) in (every, ())


@pytest.mark.parametrize(("to", "stack"), [("accelerate", "fsdp2"), ("deepspeed", "deepspeed")])
def test_transformers_understands_the_arguments(to: str, stack: str) -> None:
    parser = transformers.HfArgumentParser((transformers.TrainingArguments,))
    for plan, files in list_drawn(to, stack, among=TRAINED):
        values = yaml.safe_load(files["arguments.yaml"])
        assert values.pop("max_length") == plan.job.sequence
        values |= {"deepspeed": None, "use_cpu": True, "bf16": False, "fp16": False, "tf32": None}
        values = {
            key: value for key, value in values.items() if key not in ("model_name_or_path", "attn_implementation")
        }
        (said,) = parser.parse_dict(values)
        check_arguments(said, plan, pairs=False, warmup=said.get_warmup_steps)
        if to == "deepspeed":
            config = json.loads(files["deepspeed.json"])
            assert config["gradient_clipping"] == plan.job.optimizer.clip
            assert config["train_batch_size"] == plan.job.global_batch


def test_trl_understands_its_config(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    names = {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target_modules",
             "rank_stabilized": "use_rslora", "magnitudes": "use_dora"}  # fmt: skip
    for plan, files in list_drawn("trl", "ddp", "fsdp2", "deepspeed", among=TUNED):
        pairs = plan.job.objective == "dpo"
        parser = trl.TrlParser((trl.DPOConfig if pairs else trl.SFTConfig, trl.ModelConfig))
        values = yaml.safe_load(files["train.yaml"])
        for key in ("datasets", "dataset_name", "dataset_train_split", "dataset_test_split"):
            values.pop(key, None)
        path = tmp_path / "train.yaml"
        path.write_text(yaml.safe_dump(values | {"use_cpu": True, "bf16": False, "tf32": None, "deepspeed": None}))
        said, model, *_ = parser.parse_args_and_config(["--config", str(path)], return_remaining_strings=False)
        check_arguments(said, plan, pairs=pairs, warmup=said.get_warmup_steps)
        assert said.max_length == plan.job.sequence
        adapter = plan.job.adapter
        check_adapter(plan, names, model, on=model.use_peft, every=("all-linear",))
        assert model.load_in_4bit == (adapter is not None and adapter.base == "nf4")
        assert model.load_in_8bit == (adapter is not None and adapter.base == "int8")
        if pairs:
            assert said.beta == plan.job.dpo_beta
            assert said.loss_type == ["sigmoid"]


def test_axolotl_understands_its_config() -> None:
    schema = pytest.importorskip("axolotl.utils.schemas.config").AxolotlInputConfig
    names = {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target_modules",
             "rank_stabilized": "peft_use_rslora", "magnitudes": "peft_use_dora"}  # fmt: skip
    for plan, files in list_drawn("axolotl", "ddp", "fsdp2", "deepspeed", among=TUNED):
        config = schema(**(yaml.safe_load(files["axolotl.yaml"]) | {"deepspeed": None}))

        class Said:
            """Axolotl's fields under the names that its builder gives them (core/builders/base.py)."""

            per_device_train_batch_size = config.micro_batch_size
            optim = config.optimizer
            lr_scheduler_type = config.lr_scheduler

            def __getattr__(self, name: str, config: Any = config) -> Any:
                return getattr(config, name)

        pairs, adapter = plan.job.objective == "dpo", plan.job.adapter
        check_arguments(Said(), plan, pairs=pairs, warmup=lambda _, config=config: config.warmup_steps)
        assert config.sequence_len == plan.job.sequence
        every = () if adapter is None else adapter.targets
        check_adapter(plan, names, config, on=config.adapter in ("lora", "qlora"), every=every)
        assert bool(config.load_in_4bit) == (adapter is not None and adapter.base == "nf4")
        assert bool(config.load_in_8bit) == (adapter is not None and adapter.base == "int8")
        assert (str(getattr(config.rl, "value", config.rl)) == "dpo") == pairs


def test_llamafactory_understands_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    arguments = pytest.importorskip("llamafactory.hparams")
    names = {"rank": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target",
             "rank_stabilized": "use_rslora", "magnitudes": "use_dora"}  # fmt: skip
    parser = transformers.HfArgumentParser(
        (
            arguments.ModelArguments,
            arguments.DataArguments,
            transformers.Seq2SeqTrainingArguments,
            arguments.FinetuningArguments,
        )
    )
    for plan, files in list_drawn("llamafactory", "ddp", "fsdp2", "deepspeed", among=TUNED):
        values = yaml.safe_load(files["train.yaml"]) | {"use_cpu": True, "bf16": False, "tf32": None, "deepspeed": None}
        model, data, said, tuning = parser.parse_dict(values)
        pairs, adapter = plan.job.objective == "dpo", plan.job.adapter
        # LLaMA-Factory turns recomputation on by itself (model_utils/checkpointing.py)
        said.gradient_checkpointing = not model.disable_gradient_checkpointing
        check_arguments(said, plan, pairs=pairs, warmup=said.get_warmup_steps)
        # packed samples are padded to one token more than cutoff_len (data_args.py, data/processor/supervised.py)
        assert data.cutoff_len + bool(data.packing) == plan.job.sequence
        check_adapter(plan, names, tuning, on=tuning.finetuning_type == "lora", every=("all",))
        bits = None if adapter is None or adapter.base is None else {"nf4": 4, "int8": 8}[adapter.base]
        assert model.quantization_bit == bits
        assert tuning.stage == {"dpo": "dpo", "sft": "sft", "pretrain": "pt"}[plan.job.objective]
        if pairs:
            assert (tuning.pref_beta, tuning.pref_loss) == (plan.job.dpo_beta, "sigmoid")


def test_torchtitan_understands_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchtitan.config.manager")
    from tests.third_party.test_torchtitan import parse_plan

    for plan, _ in list_drawn("torchtitan", "torchtitan", among=TRAINED):
        config, job = parse_plan(plan, tmp_path, monkeypatch), plan.job
        rate, schedule = job.learning_rate, config.lr_scheduler
        (group,) = config.optimizer.param_groups
        assert (group.pattern, group.optimizer_name) == (".*", "AdamW")
        assert group.optimizer_kwargs == {
            "lr": rate.peak, "betas": job.optimizer.betas, "eps": job.optimizer.epsilon,
            "weight_decay": job.optimizer.weight_decay,
        }  # fmt: skip
        assert (config.training.max_norm, config.training.steps) == (job.optimizer.clip, job.steps)
        assert config.debug.seed == job.seed
        assert schedule.warmup_steps == rate.warmup_steps
        if rate.kind == "constant":
            assert schedule.decay_ratio == 0 or schedule.min_lr_factor == 1
        else:
            assert schedule.decay_type == {"cosine": "cosine", "wsd": "linear"}[rate.kind]
            assert schedule.min_lr_factor == rate.floor
            steps = round((1 if schedule.decay_ratio is None else schedule.decay_ratio) * job.steps)
            assert steps in (
                (rate.decay_steps or job.steps // 5,)
                if rate.kind == "wsd"
                else (job.steps, job.steps - rate.warmup_steps)
            )


def test_nanotron_understands_its_config(tmp_path: Path, nanotron_config: Any) -> None:
    among = TRAINED._replace(models=("tiny", "llama2-7b"), recipes=("bf16", "fp32"), acs=("none",))
    for plan, files in list_drawn("nanotron", "nanotron", among=among):
        (tmp_path / "nanotron.yaml").write_text(files["nanotron.yaml"])
        config, job = nanotron_config.get_config_from_file(str(tmp_path / "nanotron.yaml")), plan.job
        said, rate = config.optimizer, job.learning_rate
        schedule = said.learning_rate_scheduler
        assert (said.weight_decay, said.clip_grad or 0.0) == (job.optimizer.weight_decay, job.optimizer.clip)
        assert (said.adam_beta1, said.adam_beta2) == job.optimizer.betas
        assert said.adam_eps == job.optimizer.epsilon
        assert (config.tokens.train_steps, config.general.seed) == (job.steps, job.seed)
        assert (schedule.learning_rate, schedule.lr_warmup_steps) == (rate.peak, rate.warmup_steps)
        if rate.kind == "constant":
            assert schedule.min_decay_lr == schedule.learning_rate
        else:
            assert schedule.lr_decay_style == {"cosine": "cosine", "wsd": "linear"}[rate.kind]
            assert schedule.min_decay_lr == pytest.approx(rate.floor * rate.peak)
        if rate.kind == "wsd":
            assert schedule.lr_decay_steps == (rate.decay_steps or job.steps // 5)


def test_bridge_understands_its_config(tmp_path: Path, hide_transformer_engine: None) -> None:
    pytest.importorskip("megatron.bridge")
    from megatron.bridge.training.config import ConfigContainer

    among = TRAINED._replace(recipes=("bf16",))
    for plan, files in list_drawn("bridge", "megatron-bridge", among=among):
        (tmp_path / "run_config.yaml").write_text(files["run_config.yaml"])
        config, job = ConfigContainer.from_yaml(str(tmp_path / "run_config.yaml")), plan.job
        rate, said, schedule = job.learning_rate, config.optimizer, config.scheduler
        assert (said.adam_beta1, said.adam_beta2) == job.optimizer.betas
        assert said.adam_eps == job.optimizer.epsilon
        assert (said.clip_grad, said.weight_decay) == (job.optimizer.clip, job.optimizer.weight_decay)
        assert (said.lr, config.train.train_iters) == (rate.peak, job.steps)
        assert config.rng.seed == (job.seed or 1234)  # Megatron refuses 0, which the writer says
        assert schedule.lr_warmup_iters == rate.warmup_steps
        assert schedule.lr_decay_style == {"cosine": "cosine", "wsd": "WSD", "constant": "constant"}[rate.kind]
        if rate.kind != "constant":
            assert said.min_lr == pytest.approx(rate.floor * rate.peak)
        if rate.kind == "wsd":
            assert schedule.lr_wsd_decay_iters == (rate.decay_steps or job.steps // 5)
            assert schedule.lr_wsd_decay_style == "linear"
