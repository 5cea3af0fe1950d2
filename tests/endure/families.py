"""Every change of one key of every family that we read, and pairs of changes by a seed, against transformers.

    python -m tests.endure.families --pairs 2000

    python -m tests.endure.families --all

counts what is read of the causal and image-text models of the installed transformers, and compares parameters on 20
random configs of every family that is read.

Each config is judged as in ``tests/model/judged.py`` (as many parameters, and read exactly where the reference reads
it, or refused by name), and in families that we train its logits are compared to 1e-5. Prints what is wrong, then how
many of each verdict; exits 1 if anything is. Half an hour of one core.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT

from fivefold.model.huggingface.families import FAMILIES as REGISTRY
from fivefold.model.huggingface.model_types import OTHER_NAMES
from fivefold.model.huggingface.read import from_config
from fivefold.requests.catalogs import list_families
from tests.endure.stop_signals import end_at_stop_signal
from tests.model.judged import build_reference, count_mtp_parameters, judge, silence_transformers
from tests.model.mutations import FAMILIES, mutations
from tests.trainer.test_families import compare_family


def cases(kinds: list[str], *, singles: int | None, pairs: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all single changes of each family, or as many as ``singles`` at random, then ``pairs`` draws of two."""
    draw = random.Random(seed)
    every = {kind: list(mutations(kind)) for kind in kinds}
    for kind, changes in every.items():
        for key, value in changes if singles is None else draw.sample(changes, min(singles, len(changes))):
            yield kind, {key: value}
    for _ in range(pairs):
        kind = draw.choice(kinds)
        (first, one), (second, other) = draw.sample(every[kind], 2)
        yield kind, {first: one, second: other}


def verdicts(kind: str, changed: dict[str, Any], *, folder: Path) -> Iterator[str]:
    """What became of one config: a word each of the record and of the logits; what is wrong in capitals."""
    wrong, why = judge(kind, FAMILIES[kind] | changed, keys=tuple(changed))
    yield f"WRONG: {wrong}" if wrong else why.partition(":")[0].partition("=")[0].partition(" instead")[0]
    said = compare_family(kind, folder, **changed)
    yield "logits equal" if not said else f"WRONG: {said}" if said.startswith("logits") else f"logits: {said}"


COMPARED, MAX_DRAWS = 20, 400  # random configs of a family


def differ_at_random(kind: str) -> tuple[int, list[str]]:
    """Return how many random configs of a family were compared, and those with other parameters than the reference.

    One to four keys are changed; configs that one side refuses are drawn again.
    """
    draw, compared, wrong = random.Random(f"{kind} all"), 0, []
    read = {key.partition(".")[0] for key in REGISTRY[kind].keys}
    changes = [change for change in mutations(kind) if change[0] in read]
    for _ in range(MAX_DRAWS):
        changed = dict(draw.sample(changes, draw.randint(1, 4)))
        config = FAMILIES[kind] | changed
        try:
            model = from_config({"model_type": kind, **config}, name="x")
            with torch.device("meta"):
                theirs = build_reference(kind, config)
        except Exception:  # refused by one side: there is nothing to compare
            continue
        numel = sum(weight.numel() for weight in theirs.parameters() if weight.requires_grad)
        if model.parameters != numel + (count_mtp_parameters(theirs) if model.mtp else 0):
            wrong.append(f"{kind} {changed}: {model.parameters} parameters instead of {numel}")
        compared += 1
        if compared == COMPARED:
            break
    return compared, wrong


def count_all() -> bool:
    """Print how many models of transformers are trained, planned or not read; whether all random configs agree."""
    status = {entry.name: entry.status for entry in list_families()}
    for what, names in (("causal", CAUSAL), ("image-text", IMAGE_TEXT)):
        result = Counter(status.get(OTHER_NAMES.get(name, name), "unsupported") for name in names)
        print(f"{what}: " + ", ".join(f"{number} {word}" for word, number in sorted(result.items())))
    with silence_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = {kind: differ_at_random(kind) for kind in FAMILIES}
    wrong = [line for _, lines in results.values() for line in lines]
    few = [f"{kind}: only {compared} compared" for kind, (compared, _) in results.items() if compared < COMPARED]
    print("\n".join(wrong + few) or f"parameters of {len(FAMILIES)} families equal on {COMPARED} random configs each")
    return not wrong and not few


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--singles", type=int, help="single changes of each family, drawn by the seed; default: all")
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("kinds", nargs="*", default=list(FAMILIES))
    parser.add_argument("--all", action="store_true")
    asked = parser.parse_args()
    if asked.all:
        sys.exit(not count_all())
    counts: Counter[str] = Counter()
    with silence_transformers(), warnings.catch_warnings(), end_at_stop_signal():
        warnings.simplefilter("ignore")
        for kind, changed in cases(asked.kinds, singles=asked.singles, pairs=asked.pairs, seed=asked.seed):
            with tempfile.TemporaryDirectory() as folder:
                for verdict in verdicts(kind, changed, folder=Path(folder)):
                    if verdict.startswith("WRONG"):
                        print(f"{kind} {changed}: {verdict}", flush=True)
                    word = "refused" if "refused" in verdict else verdict
                    known = ("refused", "the reference fails", "ignored", "logits equal")
                    word = word.removeprefix("logits: ")
                    counts[word if word in known or word.startswith("WRONG") else "read"] += 1
    for verdict, number in sorted(counts.items()):
        print(f"{number:6} {verdict}")
    sys.exit(any(verdict.startswith("WRONG") for verdict in counts))


if __name__ == "__main__":
    main()
