"""Mistakes planted in planner, interop, web and data, and for each the test that must fail.

    python -m tests.endure.mutations            plants each in a copy of the repository, and runs its test there
    python -m tests.endure.mutations --only 3 17 40-59

``old_faults.py`` holds those that were once in the code, ``tests/agree/loop/test_mutation.py`` those of the training
loop. The quick test of this table checks that each text still stands in its file once, and that each test is there.
The tests run in forks of a process that has imported the libraries (``warm_tests.py``). Exits 1 if a test passes with
its mistake.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from tests.endure.mutation import edit
from tests.endure.old_faults import OLD_FAULTS
from tests.endure.stop_signals import end_at_stop_signal
from tests.endure.warm_tests import start_warm_tests

ROOT = Path(__file__).parents[2]
COPIED = ("fivefold", "tests", "benchmarks", "docs", "examples", "pyproject.toml", "README.md", "CHANGELOG.md")

READ_BACK = "interop/test_read_back.py::test_the_update_is_read_back_exactly"
WRITTEN = "interop/test_read_back.py::test_the_written_file_has_the_keys_of_the_software"
WRITERS = [
    *edit("interop/huggingface/emit.py", READ_BACK,
          ("no warm-up is written", '"warmup_steps": job.learning_rate.warmup_steps', '"warmup_steps": 0'),
          ("no minimum rate is written", 'min_lr_ratio": rate.floor', 'min_lr_ratio": 0.0'),
          ("the decay takes one step", 'num_decay_steps": rate.decay_steps', 'num_decay_steps": 1')),
    *edit("interop/huggingface/emit.py", WRITTEN,
          ("clipping is DeepSpeed's default", '"gradient_clipping": job.optimizer.clip', '"gradient_clipping": 1.0')),
    *edit("interop/huggingface/emit.py",
          "interop/test_read_back.py::test_another_optimizer_is_read_back_or_is_an_error_by_name",
          ("8-bit moments are written as fp32", '"adamw8bit": "adamw_bnb_8bit"', '"adamw8bit": "adamw_torch_fused"')),
    *edit("interop/megatron/emit.py", READ_BACK,
          ("the minimum rate is a share", "job.learning_rate.floor * job.learning_rate.peak:",
           "job.learning_rate.floor:"),
          ("no warm-up is written", '"lr_warmup_iters": job.learning_rate.warmup_steps', '"lr_warmup_iters": 0'),
          ("the decay is the default", "job.learning_rate.decay_steps or max", "None or max"),
          ("betas change places", '"adam_beta1": job.optimizer.betas[0]', '"adam_beta1": job.optimizer.betas[1]')),
    *edit("interop/megatron_bridge/emit.py", WRITTEN,
          ("the data has its own seed", "random_seed: {job.seed or", "random_seed: {0 or")),
    *edit("interop/nanotron/emit.py", READ_BACK,
          ("the seed is not written", '"general.seed": job.seed', '"general.seed": 0'),
          ("the rate decays to zero", "if rate.kind == 'constant' else rate.floor",
           "if rate.kind == 'constant' else 0.0")),
    *edit("interop/nanotron/emit.py", WRITTEN,
          ("the decay starts late", "job.steps - decay_steps if rate", "job.steps if rate")),
    *edit("interop/torchtitan/emit.py", READ_BACK,
          ("the seed is not written", '"debug.seed": job.seed', '"debug.seed": 0'),
          ("a fifth of the steps decays", '"lr_scheduler.decay_ratio": decay / steps',
           '"lr_scheduler.decay_ratio": 0.2')),
]  # fmt: skip
READERS = [
    *edit("interop/huggingface/adapters.py",
          "interop/test_huggingface.py::test_trl_s_adapters_have_its_defaults",
          ("TRL's alpha is twice the rank", '("lora_r", 16),\n    ("lora_alpha", 32)',
           '("lora_r", 16),\n    ("lora_alpha", None)')),
    *edit("interop/huggingface/adapters.py",
          "interop/test_huggingface.py::test_a_quantized_base_with_adapters_is_read",
          ("alpha is the default", "names.alpha[1] if alpha is None else alpha", "names.alpha[1]"),
          ("the rank is the default", "values.optional(names.rank[0]) or names.rank[1]", "names.rank[1]")),
    *edit("interop/huggingface/adapters.py",
          "interop/test_huggingface.py::test_variants_of_adapters_are_counted_or_named",
          ("variants are not doubted", 'not in (None, False, "", [], {}):', "is Ellipsis:")),
    *edit("interop/huggingface/data.py", "interop/test_data.py::test_a_config_becomes_a_run_file",
          ("packing is always best-fit", 'if values["packing"] else "none"\n    if values["packing"] and',
           '\n    if values["packing"] and'),
          ("the loss is on replies alone", "if values[\"train_on_prompt\"] else None", "if False else None")),
    *edit("interop/huggingface/data.py", "interop/test_data.py::test_another_objective_is_not_understood",
          ("other losses of pairs are DPO's", 'if values["pref_loss"] != "sigmoid":', "if False:")),
    *edit("interop/nanotron/to_job.py", "interop/test_nanotron.py::test_written_config_is_read_back",
          ("a replica's batch is the global one", '"job.global_batch": dp * mbs', '"job.global_batch": mbs')),
    *edit("interop/nanotron/to_job.py", "interop/test_nanotron.py::test_recomputation_has_two_keys",
          ("recomputation is not read", 'values["parallelism.recompute_layer"] or granularity', "granularity")),
    *edit("interop/torchtitan/to_job.py", "interop/test_torchtitan.py::test_replicated_shards_are_read_as_shard_groups",
          ("replicas are shards", '"layout.dp": copies * shard_count', '"layout.dp": shard_count')),
    *edit("interop/torchtitan/to_job.py", "interop/test_torchtitan.py::test_published_configs_of_torchtitan_are_read",
          ("a pipeline gathers for every forward", 'reshard_policy == "default" and pp > 1', "False")),
    *edit("interop/keys.py", "interop/test_own_keys.py::test_a_key_with_an_effect_is_an_error_unless_it_is_ignored",
          ("keys with an effect are harmless", "if key and key.kind == kind and",
           "if key and key.kind == kind == 'near' and")),
    *edit("requests/configs.py", "cli/test_from.py::test_a_key_that_is_not_modelled_is_a_one_line_error",
          ("every key is ignored", "if not _is_named(key, accepted)]",
           "if not _is_named(key, accepted) and accepted]")),
    *edit("requests/configs.py", "cli/test_from.py::test_an_answer_lists_ignored_keys",
          ("ignored keys are not said", "ignored=reading.not_understood", "ignored=()")),
]  # fmt: skip
RUNS = [
    *edit("planner/run_estimate.py", "planner/test_run_estimate.py::test_a_checkpoint_holds_masters_and_moments",
          ("a checkpoint has no moments", "job.precision.updated_bytes + states", "job.precision.updated_bytes")),
    *edit("planner/run_estimate.py", "planner/test_run_estimate.py",
          ("a restart repeats no write", "site.restart_seconds + write_seconds  #", "site.restart_seconds  #"),
          ("evaluations are free", "return training * (1 + site.evaluation) / share", "return training / share"),
          ("checkpoints cost intervals", '"checkpoints": pieces * pause_seconds', '"checkpoints": pieces * interval'),
          ("a host has all disks", "max(1, ceil(step.world / machine.ranks_per_node))", "step.world")),
    *edit("trainer/logs/step_line.py", "trainer/logs/test_step_line.py",
          ("a ramp's batches have the MFU of full ones", " * batch / job.global_batch", "")),
    *edit("step.py", "planner/test_run_estimate.py::test_rate_per_gpu_is_over_all_ranks",
          ("a GPU's rate is over dp and cp", "time.step_seconds / layout.world",
           "time.step_seconds / layout.dp / layout.cp")),
    *edit("trainer/faults/spikes.py",
          "trainer/faults/test_spikes.py::test_the_window_of_usual_losses_is_kept_across_a_resume",
          ("the window of a spike begins anew", 'deque(facts.get("losses", []),', "deque([],")),
    *edit("trainer/faults/spikes.py", "trainer/faults/test_spikes.py::test_spikes_are_detected",
          ("a spike enters the window", "        if loss > limit:\n",
           "        self.recent.append(loss)\n        if loss > limit:\n"),
          ("a flat loss has spikes", "max(deviation, FLAT * abs(median))", "deviation")),
]  # fmt: skip
MEMORY = [
    *edit("planner/time/memory_risk.py",
          "planner/time/test_memory_risk.py::test_risk_grows_with_peak_fragmentation_and_communicators",
          ("fragments are free", "return lost * fragments", "return 0 * fragments"),
          ("communicators are free", " + count_driver_bytes(self.machine, layout, self.job.stack)", "")),
    *edit("planner/time/memory_risk.py",
          "planner/time/test_memory_risk.py::test_the_limit_of_the_peak_is_where_the_risk_passes_its_limit",
          ("the limit is of the other tail", "_find_value(1 - risk, self._choose_quantiles(layout))",
           "_find_value(risk, self._choose_quantiles(layout))")),
    *edit("planner/time/memory_risk.py",
          "planner/time/test_memory_risk.py::test_risk_is_the_share_of_comparable_runs_above_capacity",
          ("the risk is of fitting", "return 1 - _find_level(", "return _find_level("),
          ("errors are those of tensors", 'read_comparable("driver"', 'read_comparable("allocated"')),
]  # fmt: skip
NETWORK = "planner/time/test_network.py"
TIME = [
    *edit("planner/time/network.py", NETWORK,
          ("a strided group lies in one node", "local = min(group.ranks, max(1, links[0].span // group.stride))",
           "local = min(group.ranks, links[0].span)"),
          ("a ring sends all shards", "turns * (ranks - 1) / ranks * place", "turns * place"),
          ("two nodes exchange sums twice", "(1 if place.nodes == 2 else 2) /", "2 /"),
          ("all peers are on NICs", "place.local - 1, place.ranks - place.local", "place.local - 1, place.ranks - 1"),
          ("long messages take no longer", "return curve[-1][1] * size / curve[-1][0]", "return curve[-1][1]"),
          ("a reduce-scatter of gloo takes one turn", "return _price_ring(place, constants, turns=2)[-1]",
           "return _price_ring(place, constants, turns=1 + (collective == 'all_reduce'))[-1]"),
          ("an expert's rows travel once per copy", "return candidates * (1 - (1 - 1 / candidates) ** copies.number)",
           "return copies.number")),
    *edit("planner/questions/context_length.py", "planner/questions/test_context_length.py",
          ("lengths are planned with another batch", "job=job.replace(sequence=tokens), risk",
           "job=job.replace(sequence=tokens, global_batch=machine.ranks), risk"),
          ("the context length is never in the way", "    if model.positions < target:\n", "    if False:\n")),
    *edit("planner/compare.py", "planner/test_compare.py",
          ("speeds are of one GPU", "[one.tokens_per_second_per_gpu * one.world for",
           "[one.tokens_per_second_per_gpu for")),
]  # fmt: skip
WEB = [
    *edit("web/guard.py", "web/test_security.py::test_requests_from_other_sites_are_rejected",
          ("any host is this one", "return hostname in LOOPBACK and", "return hostname is not None and"),
          ("other sites may load", 'not in ("none", "same-origin")', 'not in ("none", "same-origin", "cross-site")'),
          ("any origin may ask", 'origin != f"http://{host}"', "not origin")),
    *edit("web/guard.py", "web/test_security.py::test_a_body_of_unknown_length_ends_at_the_limit",
          ("a body without a length has no limit", "            if left < 0:", "            if left < -(2**40):")),
    *edit("web/folder.py", "web/test_security.py::test_files_outside_the_served_folder_are_not_read",
          ("links lead out", "(self.root / text).resolve()", "(self.root / text).absolute()")),
    *edit("web/folder.py", "web/test_runs.py::test_too_large_piped_or_outside_files_are_errors_at_once",
          ("pipes are read", "        if is_special_file:", "        if False:"),
          ("large files are read", "        if size > limit:", "        if False:")),
    *edit("web/runs.py", "web/test_runs.py",
          ("the first step counts twice", "for line in timed_lines[1:]", "for line in timed_lines"),
          ("the oldest run is first", "key=lambda path: -path.stat()", "key=lambda path: path.stat()"),
          ("a resumed run has ended", "return None if was_resumed and is_live(folder, name) else", "return"),
          ("damaged logs end the page", "    except UserError:  # damaged", "    except KeyError:  # damaged")),
    *edit("web/dropped.py", "web/test_files.py::test_large_files_are_rejected_and_the_oldest_removed",
          ("the newest file is removed", "self._kept.pop(0)", "self._kept.pop()")),
    *edit("web/question.py", "web/test_copies.py::test_user_settings_apply_to_pages_and_what_they_copy",
          ("the user's software is ignored", "if settings.stack and stack is None and", "if False and")),
    *edit("web/copies.py", "web/test_copies.py::test_a_step_is_the_same_by_command_and_in_python",
          ("settings are not copied", "*words, *options, *settings])", "*words, *options])"),
          ("Python has no job", "fields = collect_fields(None, list(query.settings), **job)", "fields = {}")),
]  # fmt: skip
DATA = [
    *edit("trainer/data/packing.py", "trainer/data/test_packing.py",
          ("marks are of the input", "[start + 1 : start + length]", "[start : start + length - 1]"),
          ("a sample's last target is padding", "targets[place + length - 1] = LAST",
           "targets[place + length - 1] = IGNORED"),
          ("a sample of full length is left out", "kept & (self.full_lengths <= self.sequence)",
           "kept & (self.full_lengths < self.sequence)"),
          ("short samples come first", "np.argsort(-lengths,", "np.argsort(lengths,"),
          ("half a pair is kept", ".all(1).repeat(2)", ".any(1).repeat(2)"),
          ("cut targets are counted", "self.full_lengths > self.sequence):\n", "self.full_lengths > 2**40):\n")),
    *edit("trainer/data/loader.py", "trainer/data/test_loader.py",
          ("ranks read blocks", "reshape(micro_batches, ranks, mbs)[:, rank]",
           "reshape(ranks, micro_batches, mbs)[rank]"),
          ("the last window has no target", "tokens - 1 - self.ahead) //", "tokens - self.ahead) //"),
          ("every epoch has one order", 'f"{seed} {epoch}".encode()', 'f"{seed}".encode()')),
    *edit("trainer/data/corpus.py", "trainer/data/test_corpus.py",
          ("the end of document is text", 'text = text.replace("\\0", "")', "pass"),
          ("slices begin within a line", "        return offset + len(line)\n", "        return offset\n"),
          ("hidden files are read", 'for name in names if not name.startswith(".")', "for name in names")),
]  # fmt: skip
NEMO = "interop/test_bridge.py::"
NEW_READERS = [
    *edit("interop/megatron_bridge/parse.py", NEMO + "test_a_named_recipe_of_precision_sets_its_fields",
          ("fp16 is bf16", '"fp16": not is_bf16', '"fp16": False'),
          ("gradients are reduced in 16 bits", '"grad_reduce_in_fp32": is_bf16', '"grad_reduce_in_fp32": False'),
          ("names have no dashes", 'name.replace("-", "_")', "name"),
          ("an unknown recipe is ignored", 'return {"mixed_precision": name}', "return {}")),
    *edit("interop/megatron_bridge/keys.py", NEMO + "test_a_named_recipe_of_precision_sets_its_fields",
          ("weights of blocks are gathered in fp8",
           '"blockwise", "fp8_param_gather": False', '"blockwise", "fp8_param_gather": True'),
          ("nvfp4 is bf16", '"nvfp4": {"fp4": "e2m1", ', '"nvfp4": {')),
    *edit("interop/megatron_bridge/parse.py", NEMO + "test_fields_of_a_class_of_nemo_and_their_changes",
          ("changes of a class are ignored", "is_changed = any(", "is_changed = 0 * any("),
          ("an unknown class is known", "if name and key in keys:", "if not name and key in keys:"),
          ("the vocabulary is missing", 'defaults["vocab_size"] = model.vocab', "pass"),
          ("the name of a class is lost", 'targets.append(str(element.get("_target_", "")))',
           'targets.append("torch.x")')),
    *edit("interop/megatron_bridge/nemo.py", NEMO + "test_fields_of_a_class_of_nemo_and_their_changes",
          ("a class has no base", "fields = own | fields", "fields = fields or dict(own)"),
          ("no bias is a bias", '"add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,\n',
           '"hidden_dropout": 0.0, "attention_dropout": 0.0,\n')),
    *edit("interop/megatron_bridge/nemo.py", NEMO + "test_defaults_of_the_data_of_nemo",
          ("a micro-batch has one sequence", '"micro_batch_size": 4', '"micro_batch_size": 1'),
          ("the data has no defaults", "if target.startswith(DATA) else {}", 'if target == "" else {}')),
    *edit("interop/megatron_bridge/parse.py", NEMO + "test_the_callback_of_overlaps_turns_on_those_of_data_parallelism",
          ("the callback overlaps nothing", "fields |= dict.fromkeys(DDP_OVERLAPS, True)", "pass")),
    *edit("interop/megatron_bridge/parse.py", NEMO + "test_comm_overlap_turns_on_what_megatron_bridge_can_overlap",
          ("gradients overlap without the distributed optimizer", 'if not gathered.get("use_distributed_optimizer"):',
           "if False:"),
          ("1F1B overlaps messages between stages", 'fields["overlap_p2p_comm"] = is_interleaved and (',
           'fields["overlap_p2p_comm"] = (')),
    *edit("interop/megatron_bridge/keys.py", NEMO + "test_comm_overlap_turns_on_what_megatron_bridge_can_overlap",
          ("core overlaps messages between stages", '    "no_overlap_p2p_communication": True,  #', "    #")),
    *edit("interop/megatron/to_job.py", NEMO + "test_comm_overlap_turns_on_what_megatron_bridge_can_overlap",
          ("all-reduces of tensor parallelism overlap", 'return bool(values["sequence_parallel"])\n\n\ndef read_stack',
           "return True\n\n\ndef read_stack")),
    *edit("interop/megatron_bridge/nemo.py", NEMO + "test_another_plugin_of_nemo_is_an_error",
          ("any plugin is that of precision", 'get_target_name(plugin) == "MegatronMixedPrecision"',
           'hasattr(plugin, "get")')),
    *edit("interop/megatron_bridge/nemo.py",
          "interop/test_own_keys.py::test_a_key_with_an_effect_is_an_error_unless_it_is_ignored",
          ("autocast is a precision", 'trainer.get("precision") not in (None, 32, "32", "32-true")', "False"),
          ("PyTorch's FSDP is Megatron's", 'strategy.get("fsdp") == "megatron"', 'strategy.get("fsdp")')),
]  # fmt: skip
QUESTIONS = [
    *edit("planner/questions/fewest_gpus.py",
          "planner/questions/test_fewest_gpus.py::test_all_ranks_are_tried_if_they_are_no_power_of_two",
          ("all ranks are not tried", "most.bit_length())), most}", "most.bit_length()))}")),
    *edit("planner/questions/least_states.py",
          "planner/questions/test_fewest_gpus.py::test_bytes_of_states_are_those_of_trained_weights",
          ("frozen weights have states", "if job.freezes_text:", "if False:"),
          ("a base in 4 bits has 32", "job.base_format.bits / 8", "job.base_format.bits")),
    *edit("planner/questions/fewest_gpus.py",
          "planner/questions/test_fewest_gpus.py::test_a_number_of_gpus_left_undecided_by_the_work_limit_is_reported",
          ("undecided numbers are decided", "undecided.append(ranks)", "pass")),
    *edit("planner/batch.py", "planner/test_playbook.py",
          ("a law has half its batch", "0.58 * tokens**0.571", "0.29 * tokens**0.571"),
          ("published runs of any length count", "abs(log2(law.run / tokens)) <= 2", "True")),
    *edit("planner/counts/memory/pipelined_passes.py", "planner/counts/memory/test_in_flight.py",
          ("reduced gradients exceed their sums", "counts[:, 4 * n_stages : 6 * n_stages] *= -1", "pass"),
          ("a tied table is gathered twice", "gathered_by_others[forward & (stage == 0)] = False", "pass")),
    *edit("layout/remarks.py",
          "layout/test_remarks.py::test_a_warning_counts_idle_ranks_unless_the_search_left_them_out",
          ("idle ranks are not said", "if used < have:", "if used > have:"),
          ("a layout of more ranks is not advised", 'larger = "" if have % used else', 'larger = "" if True else')),
    *edit("trainer/data/packing.py", "trainer/data/test_packing.py::test_best_fit_packing_puts_every_sample_in_one_bin",
          ("short items come first", "np.argsort(-lengths", "np.argsort(lengths"),
          ("rooms that are taken are offered", "del by_room[room], rooms[place]", "pass")),
    *edit("trainer/data/loader.py", "trainer/data/test_loader.py",
          ("the second half is not mixed", "left << half | right", "right << half | left")),
    *edit("planner/time/compute.py",
          "planner/time/test_compute.py::test_attention_in_fp8_shortens_the_steps_of_jobs_in_fp8_alone",
          ("attention in fp8 takes as long", 'dtype="fp8" if in_fp8 else self.', "dtype=self."),
          ("attention is in fp8 in bf16 too", "in_fp8 = self.job.stack.fp8_attention and self",
           "in_fp8 = self.job.stack.fp8_attention or self")),
    *edit("planner/counts/operations/narrow.py", "planner/counts/operations/test_recompute.py",
          ("attention in fp8 saves 16 bits", "sizes[name] // local.width for name, cast in (names",
           "sizes[name] for name, cast in (names")),
    *edit("layout/batch.py", "layout/test_batch.py",
          ("a deadline tries one node", "machine in machines) else DEADLINE_COUNTS", "machine in machines) else None")),
    *edit("layout/text.py", "layout/test_spec.py",
          ("joined words are one", 'r"\\1 ",', 'r"\\g<0>",'),
          ("TP 8 is two words", 'r"\\1"),  # TP 8', 'r"\\g<0>"),  # TP 8')),
    *edit("layout/spec.py", "cli/test_first_questions.py",
          ("cp takes no ranks of the machine", 'for axis in ("tp", "cp", "pp") if isinstance(degree := fields',
           'for axis in ("tp", "pp") if isinstance(degree := fields')),
    *edit("machine/catalog.py", "machine/test_catalog.py",
          ("2x8 of an instance are eight nodes", "and not nodes and len(", "and len("),
          ("nodes are not counted", "* int(nodes or 1)", "")),
    *edit("web/question.py", "web/test_mistakes.py::test_a_question_that_is_not_valid_keeps_its_controls",
          ("constraints are checked by the process", "        Where.parse(self.where)\n", ""),
          ("no control is to be corrected", "Mistake(message, fields[0], entry)", "Mistake(message)")),
    *edit("web/files.py", "web/test_files.py::test_folders_within_a_named_folder_are_no_files",
          ("folders below are files", "if file.is_file()]", "]")),
]  # fmt: skip
MUTATIONS = [*WRITERS, *READERS, *RUNS, *MEMORY, *TIME, *WEB, *DATA, *NEW_READERS, *QUESTIONS, *OLD_FAULTS]


def read_text(file: Path) -> str:
    """Return the text of a file, "" if there is none."""
    return file.read_text(encoding="utf-8") if file.exists() else ""


def find_stale() -> Iterator[str]:
    """Yield the mistakes whose text is not in its file once, or whose test is not there."""
    for number, mutation in enumerate(MUTATIONS):
        count = read_text(ROOT / "fivefold" / mutation.file).count(mutation.old)
        if count != 1:
            yield f"{number} {mutation.name}: {mutation.file} holds {count} times {mutation.old!r}"
        path, _, name = mutation.test.partition("::")
        text = read_text(ROOT / "tests" / path)
        if not text or (name and not re.search(rf"^def {name}\(", text, re.MULTILINE)):
            yield f"{number} {mutation.name}: {path} has no {name}"


def make_copy(folder: Path) -> None:
    """Copy what the tests read into ``folder``."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored, symlinks=True)
        else:
            shutil.copy(source, folder / name)


def read_numbers(text: str) -> range:
    """Return the numbers of ``17`` or ``40-59``, both ends included."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    """Plant the mistakes one by one, and print which tests do not see theirs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", default=[], help="numbers of mistakes, such as 3 40-59; default: all")
    parser.add_argument("--clean", action="store_true", help="run the tests without a mistake first; all must pass")
    options = parser.parse_args()
    numbers = chain.from_iterable(map(read_numbers, options.only)) if options.only else range(len(MUTATIONS))
    chosen = {number: MUTATIONS[number] for number in numbers}
    wrong, planted = list(find_stale()), 0
    with tempfile.TemporaryDirectory() as name, ExitStack() as exits:
        copy = Path(name)
        make_copy(copy)
        run_test = exits.enter_context(start_warm_tests(copy))
        exits.enter_context(end_at_stop_signal())
        if options.clean:
            verdicts = {test: run_test(test) for test in {mutation.test for mutation in chosen.values()}}
            wrong += [
                f"without a mistake {test} {verdict}" for test, verdict in verdicts.items() if verdict != "passes"
            ]
        for number, mutation in chosen.items():
            path = copy / "fivefold" / mutation.file
            original = path.read_text(encoding="utf-8")
            path.write_text(original.replace(mutation.old, mutation.new), encoding="utf-8")
            verdict = run_test(mutation.test)
            path.write_text(original, encoding="utf-8")
            print(f"{number} {mutation.file}, {mutation.name}: {mutation.test} {verdict}")
            planted += 1
            if verdict != "fails":
                wrong.append(f"{number} {mutation.name}: {mutation.test} {verdict}")
    print(f"{planted} mistakes, {len(wrong)} not seen", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
