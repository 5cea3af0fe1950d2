"""A callback for the Trainer of transformers: it predicts the step, measures it, and logs both.

    trainer.add_callback(PredictionCallback(trainer, "h100:8", sequence_length=4096))
    trainer.train()

At the start it reads TrainingArguments and the model's config as ``fivefold read`` reads them from files, and prints
the prediction. Once enough steps are measured, or at the end, it prints both and gives them to the trainer's loggers.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from transformers import TrainerCallback

from fivefold.api.job_words import JobWords
from fivefold.errors import UserError
from fivefold.integrations.reporting import StepReport, hide_progress_bars, load_machine_of_run, logger
from fivefold.requests.configs import describe_notes, load_config
from fivefold.requests.job import FIELDS

if TYPE_CHECKING:
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.step import Step

LENGTH_KEYS = ("max_length", "max_seq_length")  # the sequence length in the arguments of TRL
ALWAYS_GIVEN = ("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "bf16")


class PredictionCallback(TrainerCallback):
    """Predict the step of a Trainer, measure it, and log predicted next to measured.

    ``machine``: as on the command line, such as ``h100:8``; without a number it has as many GPUs as the run has ranks.
    ``sequence_length``: in tokens, by default that of the arguments (``max_length`` of TRL). ``ignore``: names of
    arguments that may change the step and that Fivefold does not model. ``report_after``: report after this many steps
    instead of at the end. ``folder``: where ``step.json`` is written, which ``fivefold show`` takes. Other keywords are
    those of a job, such as ``adapter="lora:16"``, and override what was read.

    A prediction that is not possible is a warning of one line; the step is measured in any case.
    """

    def __init__(
        self,
        trainer: Any,
        machine: str | Machine,
        *,
        sequence_length: int | None = None,
        ignore: Iterable[str] = (),
        report_after: int | None = None,
        folder: str | Path | None = None,
        **job: Unpack[JobWords],
    ) -> None:
        if report_after is not None and report_after < 4:
            raise UserError(
                f"report_after={report_after}: the time is that of the steps after the third; use 4 or more"
            )
        self.trainer, self.machine, self.ignore, self.folder = trainer, machine, tuple(ignore), folder
        self.sequence_length, self.report_after, self.job = sequence_length, report_after, job
        self.predicted: Step | None = None
        self.measured: Step | None = None
        self._report: StepReport | None = None
        self._lengths: set[int] = set()
        self._hook: Any = None

    # Events of the trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Predict the step, print and log it, and begin to measure."""
        model, optimizer = self.trainer.model_wrapped, self.trainer.optimizer
        machine = None
        try:
            self.predicted, machine = self.predict(args)
        except UserError as error:
            with hide_progress_bars():
                logger.warning("no prediction: %s", _translate_line(str(error)))
        self._hook = self.trainer.model.register_forward_pre_hook(self._note_length, with_kwargs=True)
        self._report = StepReport(
            model,
            getattr(optimizer, "optimizer", optimizer),  # accelerate's wrapper has the optimizer that steps
            predicted=self.predicted,
            machine=machine,
            tokens=self._count_tokens(args),
            log=self._log,
            prints=state.is_world_process_zero,
            folder=self.folder,
        )
        self._report.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Report once enough steps are measured, before loggers close at the end of training."""
        if state.global_step >= (self.report_after or state.max_steps):
            self.report()

    def on_train_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Report a training that ended early."""
        self.report()

    # What is predicted and measured

    def predict(self, args: Any) -> tuple[Step, Machine]:
        """Return the predicted step of these TrainingArguments, and its machine; raises ``UserError``."""
        from fivefold.api.functions import predict
        from fivefold.job import Job
        from fivefold.layout.spec import Layout

        machine = load_machine_of_run(self.machine, world=args.world_size)
        if hasattr(self.trainer.model, "peft_config") and "adapter" not in self.job:
            raise UserError("the model has PEFT adapters; name them with adapter='lora:16' or 'qlora:16'")
        model = self._read_model()
        layout, job = self._read_arguments(args, model, machine)
        words = {FIELDS.get(name, name): value for name, value in self.job.items() if value is not None}
        job = Job.read(job.model_dump() | words, origin="PredictionCallback") if words else job
        return predict(model, machine, Layout.parse(str(layout)), job=job), machine

    def report(self) -> None:
        """End the measurement, and print and log predicted next to measured; every rank of the run takes part."""
        if self._report is None:
            return
        report, self._report = self._report, None
        self._hook.remove()
        report.end(tokens=self._count_seen_tokens(self.trainer.args))
        self.measured = report.measured
        if report.prints and self.predicted is not None and self.measured is not None:
            self._warn_of_lengths(self.predicted)

    def _warn_of_lengths(self, predicted: Step) -> None:
        """Warn of batches whose sequences are not as long as predicted."""
        sequence = int(str(predicted.job["sequence"]))
        if other_lengths := self._lengths - {sequence}:
            lengths = f"{min(other_lengths)} to {max(other_lengths)}"
            logger.warning(
                "the prediction is of sequences of %d tokens, and batches had %s; pack or pad them, or predict "
                "sequence_length=%d",
                sequence,
                lengths,
                max(self._lengths),
            )

    def _log(self, figures: dict[str, float]) -> None:
        """Give figures to the loggers of the trainer (TensorBoard, W&B, …) and to its history."""
        self.trainer.log(figures)

    def _note_length(self, module: Any, inputs: Any, keywords: dict[str, Any]) -> None:
        tokens = keywords.get("input_ids", inputs[0] if inputs else None)
        if tokens is not None and tokens.dim() == 2 and module.training:
            self._lengths.add(int(tokens.shape[1]))

    def _count_tokens(self, args: Any) -> int:
        """Return the tokens of a step over all ranks; 0 if the sequence length is not known."""
        return (self._find_sequence(args) or 0) * _count_sequences(args)

    def _count_seen_tokens(self, args: Any) -> int:
        """Return the tokens of a step over all ranks, from its batches; 0 if their lengths differ."""
        return max(self._lengths) * _count_sequences(args) if len(self._lengths) == 1 else 0

    def _find_sequence(self, args: Any) -> int | None:
        lengths = (getattr(args, key, None) for key in LENGTH_KEYS)
        return self.sequence_length or next((length for length in lengths if length), None)

    def _read_model(self) -> Model:
        """Return the model of the config of the trainer's model."""
        from fivefold.model.catalog import from_values

        config = self.trainer.model.config
        return from_values(config.to_dict(), name=config.model_type, source="model.config")

    def _read_arguments(self, args: Any, model: Model, machine: Machine) -> tuple[Any, Any]:
        """Return layout and job of TrainingArguments, read as ``fivefold read`` reads a file of them."""
        from fivefold.interop.format import Overrides

        sequence = self._find_sequence(args)
        if sequence is None:
            raise UserError("TrainingArguments do not give the sequence length; add sequence_length=4096")
        values = _list_changed_arguments(args) | {"max_length": sequence}
        config = self.trainer.model.config
        dtype = getattr(self.trainer.model, "dtype", None)
        values |= {"attn_implementation": getattr(config, "_attn_implementation", None) or "sdpa"}
        if dtype is not None and (name := str(dtype).removeprefix("torch.")) != "float32":
            values["dtype"] = name
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "TrainingArguments.json"
            path.write_text(json.dumps(values, default=str), encoding="utf-8")
            overrides = Overrides(
                ranks=args.world_size, ranks_per_node=machine.ranks_per_node, model=model, vocab=model.vocab
            )
            read = load_config([str(path)], overrides, ignore=self.ignore)
        for line in describe_notes(read.notes):
            logger.info("%s", _translate_line(line))
        return read.layout, read.job


def _count_sequences(args: Any) -> int:
    """Return the sequences of a step over all ranks."""
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _translate_line(line: str) -> str:
    """Return a line of the reading of files in the words of this callback."""
    line = re.sub(r"\S*/TrainingArguments\.json", "TrainingArguments", line)
    return re.sub(r"--ignore (\S+)", lambda match: f"ignore={tuple(match[1].split(','))}", line)


def _list_changed_arguments(args: Any) -> dict[str, Any]:
    """Return the arguments that differ from their defaults, and those that decide the batch and precision."""
    changed = {}
    for field in fields(args):
        value = getattr(args, field.name)
        value = value.value if isinstance(value, Enum) else value
        value = value.to_dict() if hasattr(value, "to_dict") else value  # accelerator_config
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        default = default.value if isinstance(default, Enum) else default
        if field.name == "use_cpu":  # the machine is the user's
            continue
        if field.init and (value != default or field.name in ALWAYS_GIVEN) and value is not None:
            changed[field.name] = value
    return changed
