"""Ten planning questions that teams have answered, asked anew: docs/explanation/planning-questions.md.

    python -m tests.docs.questions            all of them (two minutes)      python -m tests.docs.questions 2 5     some
    python -m tests.docs.questions 0          no search: comparisons alone, when prices have moved

A test holds the page to what ``compare`` prints of each pair of layouts; the searches are made by this script alone.
"""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from fivefold.job import Job
from fivefold.machine.catalog import resolve as machine_named
from fivefold.machine.spec import Machine
from fivefold.model.catalog import resolve
from fivefold.planner.compare import compare
from fivefold.planner.predict import Planner
from fivefold.rendering import comparison as side_by_side
from fivefold.rendering import search as pages
from fivefold.requests.cases import list_cases
from fivefold.requests.commands import UNRANKABLE_DIFFERENCE
from fivefold.requests.job import load_job
from fivefold.requests.search import build_request, search_with_progress
from fivefold.results.comparison import Comparison
from fivefold.results.search_result import SearchResult
from fivefold.units import show_risk
from tests.printed import to_text

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "planning-questions.md"
WIDTH = 120
ROWS = ("step time", "MFU", "peak memory", "free memory", "hardware FLOPs")  # and what a step's seconds are


class Asked(NamedTuple):
    """A question: what a team trained on what, the layout it chose, its words for it, and why it is not ours.

    ``between``: a layout between the proposal and the published one, so that the comparison tells their changes apart.
    """

    title: str
    model: str
    machine: str
    options: str
    where: str
    published: str
    source: str
    why: str
    between: str = ""


TITAN = "memory=94GiB watts=500 hbm=2.4TB"  # the H100 of torchtitan's measurements
PLAIN = "ac=none,selective,full order=default"  # what other software runs without a patch
QUESTIONS = (
    Asked(
        "Llama 3 8B on 64 H100 with Megatron", "llama3-8b", "h100:64", "--seq 8192 --gbs 1024 --stack megatron-core",
        PLAIN, "dp32 cp2 zero1 mbs1",
        "Megatron-Bridge's recipe `llama3_8b_pretrain_64gpu_h100_bf16_config`: cp2, micro-batch 1.",
        "Both have the same peak, but the allocator reserves 1.5 GiB more for cp2, so that more than one in twenty "
        "comparable runs would run out of memory. Data parallelism alone does not fit.",
    ),
    Asked(
        "Llama 3 8B on 128 H100 with torchtitan", "llama3-8b", f"h100:128 {TITAN}",
        "--seq 8192 --gbs 256 --stack torchtitan", PLAIN, "dp128 zero3 mbs2 ac=norm+act+core",
        "torchtitan (arXiv:2410.06511, table 3), on H100 of 96 GB and 500 W: FSDP over all ranks, micro-batch 2, "
        "recomputation by operation, for which `ac=norm+act+core` is the nearest word here.",
        "One sequence at a time fits without recomputation, and then nothing is computed twice. That costs more than "
        "the full difference (C); two sequences at once, in larger kernels, win some of it back. The recipe's default "
        "has to fit 80 GB too.",
        "dp128 zero3 mbs1 ac=norm+act+core",
    ),
    Asked(
        "Llama 3 70B on 64 H100 with Megatron", "llama3-70b", "h100:64", "--seq 8192 --gbs 256 --stack megatron-core",
        PLAIN, "dp2 tp4 cp2 pp4 v5 zero1 mbs1",
        "Megatron-Bridge's recipe `llama3_70b_pretrain_64gpu_h100_bf16_config`: tp4 pp4 cp2; five virtual stages as in "
        "its other recipes of tp4.",
        "The search proposes what Megatron's authors chose for their own measurements, but for the virtual stages.",
    ),
    Asked(
        "Llama 3 70B on 256 H100 with torchtitan, in fp8", "llama3-70b", f"h100:256 {TITAN}",
        "--seq 8192 --gbs 512 --stack torchtitan --precision fp8-wire --set compile=true", PLAIN,
        "dp32 tp8 zero3 mbs16 ac=full",
        "torchtitan (arXiv:2410.06511, table 4), on H100 of 96 GB and 500 W: FSDP and tp8, 16 sequences per "
        "data-parallel rank, full recomputation, to show two dimensions together; it measured 829 tokens/s a GPU, "
        "which is a step of 19.76 s (column B below).",
        "Most of it are the messages of tp8, which are not hidden (asynchronous tp measured 16 % more tokens). Data "
        "parallelism alone recomputes as much.",
    ),
    Asked(
        "OLMo 2 32B on 1,024 H100 with FSDP2", "olmo2-32b", "h100:1024",
        "--seq 4096 --gbs 2048 --stack fsdp2 --set compile=true", "ac=none,selective,full,mlp order=default",
        "dp1024 zero3/256 mbs2 ac=mlp",
        "OLMo-core's `OLMo2-0325-32B-train.py` for 1,024 GPUs and more: hybrid sharding with four replicas, "
        "micro-batch 2, the MLPs recomputed, blocks compiled.",
        "The script recomputes the MLPs alone, for which the stack has no word, so that the search has no or full "
        "recomputation. Without any, one sequence at a time fits if 512 ranks share the states (A), and is "
        "faster and tight if 128 do (C).",
        "dp1024 zero3/128 mbs1",
    ),
    Asked(
        "GPT-3 175B on 64 A100 with Megatron-LM", "gpt3-175b", "a100:64",
        "--seq 2048 --gbs 64 --stack megatron-lm --precision fp16", PLAIN, "tp8 pp8 v3 mbs1 ac=selective",
        "Korthikanti et al. (arXiv:2205.05198, table 5): tp8 pp8, three virtual stages, selective recomputation, as in "
        "the table's other rows; measured 13.75 s.",
        "The table compares recomputations at one layout. Half the tp sends less than half as much; twice "
        "the stages would double the bubble, but twice as many virtual ones keep it as small. It just fits. With tp8 "
        "six virtual stages would gain little (C).",
        "dp1 tp8 pp8 v6 zero0 interleaved mbs1 ac=selective",
    ),
    Asked(
        "Nemotron-4 340B on 6,144 H100 with Megatron", "nemotron4-340b", "h100:6144",
        "--seq 4096 --gbs 2304 --stack megatron-core", PLAIN, "dp64 tp8 pp12 v8 zero1 mbs1",
        "Nemotron-4 (arXiv:2406.11704 §2.3): tp8, pp12 interleaved, dp64, distributed optimizer; 8.0 s a step, 41.0 % "
        "MFU. The number of virtual stages is not printed; here each of the eight layers of a rank is a stage.",
        "Most of it is the head with its vocabulary of 256,000, on a rank that has eight layers like the others, "
        "which wait for it; the proposal makes it a stage of its own. The authors kept tp8 pp12 while they went from "
        "1,536 to 6,144 GPUs, with dp16 to dp64. Its 41.0 % MFU is nearly what is predicted.",
    ),
    Asked(
        "Llama 3 405B on 16,384 H100", "llama3-405b", "h100:16384", "--seq 8192 --gbs 2048",
        f"{PLAIN} v<=8 tp<=8",
        "dp128 tp8 pp16 v8 zero1 mbs1",
        "Llama 3 (arXiv:2407.21783, table 4): tp8 cp1 pp16 dp128, sharded optimizer and gradients that are reduced "
        "once a step (`zero1` here), interleaved, no recomputation; 41 % MFU. The first and the last stage hold only "
        "the embedding and only the head (§3.3.2), so that 126 layers are 128 stages, eight per rank.",
        "The proposal is the same pipeline, with the embedding and the head as stages of their own, but for cp2, which "
        "halves the activations of a rank: without it the layout is tight. The authors used cp for longer sequences "
        "only.",
    ),
    Asked(
        "Llama 3 405B with 131,072 tokens on 16,384 H100", "llama3-405b", "h100:16384", "--seq 131072 --gbs 128",
        f"{PLAIN} v<=8 tp<=8",
        "dp8 tp8 cp16 pp16 v8 zero1 mbs1",
        "Llama 3 (ibid.): tp8 cp16 pp16 dp8, eight stages per rank as in question 8; 38 % MFU.",
        "The proposal is the same pipeline with twice the cp. The fastest layouts have pp4 and ZeRO-3, whose gathers "
        "overlap with so much compute, and are tight.",
    ),
    Asked(
        "DeepSeek-V3 on 2,048 H800", "deepseek-v3", "h800:2048",
        "--seq 4096 --gbs 15360 --precision fp8-deepseek --stack deepseek", "order=default",
        "dp128 pp16 ep64 zero1 dualpipe mbs1 ac=norm+up+rope+act",
        "DeepSeek-V3 (arXiv:2412.19437 §3.2): pp16, ep64 over eight nodes, ZeRO-1, DualPipe, no tp; norms, "
        "up-projections and SwiGLU recomputed (§3.2.3), inputs of SwiGLU in fp8 and outputs of attention in 12 bits "
        "(§3.3.3). The stack `deepseek` has these facts; its kernels are assumed as quick as Megatron's.",
        "With ep32 each rank holds twice as many experts, which is hardly faster, and tight; hidden in pairs, the "
        "messages cost nearly the same. Our own engine keeps 16 bits, and would not fit it.",
    ),
)  # fmt: skip


def _find_machine(machine: str) -> Machine:
    return machine_named(machine, local=Path("none"))


def job(asked: Asked, text: str = "") -> Job:
    """The job that the options say, with gradients reduced as what was printed of a proposal says."""
    words = shlex.split(asked.options + find_reduce_option(text))
    given = dict(zip(words[::2], words[1::2], strict=True))
    settings = [value for name, value in zip(words[::2], words[1::2], strict=True) if name == "--set"]
    plain: dict[str, object] = {name[2:]: value for name, value in given.items() if name != "--set"}
    for name in ("seq", "gbs"):
        plain[name] = int(str(plain[name]))
    return load_job(settings=settings, **plain)


def find_reduce_option(text: str) -> str:
    """The option of a proposal that reduces gradients otherwise than the software usually does."""
    result = re.search(r" \(--set (reduce=\w+)\)", text.splitlines()[0] if text else "")
    return f" --set {result[1]}" if result else ""


def planner_of(asked: Asked, text: str) -> Planner:
    """The planner of the question, with gradients reduced as ``text`` says of a proposal."""
    return Planner(model=resolve(asked.model), machine=_find_machine(asked.machine), job=job(asked, text))


def search(asked: Asked) -> SearchResult:
    """What ``fivefold search`` finds."""
    machine = _find_machine(asked.machine)
    request = build_request(top=1, where=asked.where)
    return search_with_progress(request, resolve(asked.model), machine, job(asked))


def compare_proposal(asked: Asked, proposal: str, text: str) -> Comparison:
    """What ``fivefold compare`` finds of the proposal, of which ``text`` was printed, and the published layout."""
    words = [asked.model, asked.machine, proposal, asked.published, *([asked.between] if asked.between else [])]
    cases = list_cases(
        words, job(asked, text), stacks="", precisions="", machine=_find_machine, stated={"global_batch"}
    )
    return compare(cases)


def proposal_text(found: SearchResult) -> str:
    """The part of the page of a search that proposes."""
    text = to_text(pages.render_page(found), width=WIDTH)
    return text[text.index("Proposal") :].partition("\n\n")[0].rstrip()


def comparison_text(found: Comparison) -> str:
    """The main rows of the page of a comparison."""
    short = found.replace(rows=tuple(row for row in found.rows if row.name in ROWS or row.unit == "seconds"))
    text = to_text(side_by_side.render_page(short), width=WIDTH)
    return text.partition("\nEqual")[0].rstrip()


def verdict(asked: Asked, found: Comparison) -> str:
    """Whether the published layout is inside the margin, by how much it is not, and why."""
    steps = [variant.step for variant in found.variants]
    if len(steps) == 1 or steps[1] is None:
        return f"**Not run here**: {found.variants[-1].error}. {asked.why}".rstrip()
    ours, theirs = steps[0], steps[1]
    assert ours is not None
    slower = theirs.time.step_seconds / ours.time.step_seconds - 1
    place = "Inside the margin" if abs(slower) <= UNRANKABLE_DIFFERENCE else "Outside the margin"
    if slower < -UNRANKABLE_DIFFERENCE:
        place = "Faster than the proposal"
    if theirs.memory.verdict == "tight":
        place = f"Predicted to be tight ({show_risk(theirs.memory.risk or 0.0)} risk of running out of memory)"
    elif not theirs.memory.fits:
        place = "Predicted not to fit"
    difference = f"{abs(slower):.1%} {'longer' if slower >= 0 else 'less time'}"
    return f"**{place}**: a step of the published layout takes {difference}. {asked.why}".rstrip()


def wrap(paragraph: str) -> str:
    """Return a paragraph in lines of the page's width, code spans unbroken."""
    joined = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), paragraph)
    lines = textwrap.wrap(joined, 116, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def section(number: int, asked: Asked, proposal: str, text: str) -> str:
    """A section of the page; ``text``: what the search printed of its ``proposal``."""
    machine, between = shlex.quote(asked.machine), f"'{asked.between}' " if asked.between else ""
    result = compare_proposal(asked, proposal, text) if proposal != str(parse_layout(asked.published)) else None
    shown = (
        f"\n```text\n$ fivefold compare {asked.model} {machine} '{proposal}' '{asked.published}' {between}\\\n    "
        f"{asked.options}{find_reduce_option(text)}\n{comparison_text(result)}\n```\n\n{wrap(verdict(asked, result))}\n"
        if result
        else f"\n{wrap(f'**The published layout is the proposal.** {asked.why}')}\n"
    )
    command = f"fivefold search {asked.model} {machine} {asked.options} \\\n    --where {asked.where!r}"
    return (
        f"## {number}. {asked.title}\n\n```text\n$ {command}\n{text}\n```\n\n"
        f"{wrap(f'**Published**: `{asked.published}`. {asked.source}')}\n{shown}"
    )


def parse_layout(text: str) -> object:
    """A layout in its canonical words."""
    from fivefold.layout.spec import Layout

    return Layout.parse(text)


def read_proposal(section_text: str) -> tuple[str, str]:
    """The proposal of a section that is there, and what the search printed of it."""
    block = section_text.partition("```text\n")[2].partition("\n```")[0]
    text = block.replace("\\\n", "").partition("\n")[2]
    # a reduce= of the search is no word of a layout
    return re.sub(r" \(--set reduce=\w+\)", "", text.splitlines()[0].removeprefix("Proposal").strip()), text


def sections(page: str) -> list[str]:
    """The sections of the page, in order."""
    return [f"## {part}" for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]]


def table(parts: list[str]) -> str:
    """The page's summary: a row for each question."""
    rows = ["| question | proposal | published | verdict |", "| --- | --- | --- | --- |"]
    for number, (asked, part) in enumerate(zip(QUESTIONS, parts, strict=False), start=1):
        paragraphs = [" ".join(paragraph.split()) for paragraph in part.split("\n\n")]
        said = next((text for text in paragraphs if text.startswith("**") and "Published" not in text), "")
        short = said.split("**")[1] if "**" in said else ""
        by = re.search(r"layout takes ([0-9.]+% (?:longer|less time))", said)
        rows.append(
            f"| {number}. {asked.title} | `{read_proposal(part)[0]}` | `{asked.published}` | {short}"
            f"{', ' + by[1] if by else ''} |"
        )
    return "\n".join(rows)


HEAD = """# Ten planning questions

Would `fivefold search` have chosen what experienced teams chose? This page puts the question ten times. Each section
shows what the search proposes, as it prints it, and then compares the proposal with the layout that the team published.
Both times are predictions for the named software; the [table of published runs](how-a-step-costs/published.md) says how
good such predictions are.

- A **proposal** is the *simplest* layout found within 2 % of the best ([search](how-a-step-costs/search.md)).
- A published layout is **inside the margin** if its predicted step is at most 2 % longer than the proposal's.
- A layout is **tight** if it probably fits, but its risk of running out of memory is above the search's limit of 5 %.

`python -m tests.docs.questions` runs all searches again. A test compares the comparisons with what the commands print.

"""


def write(parts: list[str]) -> None:
    """The page of these sections."""
    PAGE.write_text(HEAD + table(parts) + "\n\n" + "\n".join(part.rstrip() + "\n" for part in parts), encoding="utf-8")


def main(only: list[int]) -> None:
    """Ask the questions of these numbers again; the others keep what the search printed."""
    before = sections(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else []
    parts = []
    for number, asked in enumerate(QUESTIONS, start=1):
        if number <= len(before) and number not in only and only:
            parts.append(section(number, asked, *read_proposal(before[number - 1])))
            continue
        result = search(asked)
        assert result.proposal is not None, asked.title
        text = proposal_text(result)
        parts.append(section(number, asked, result.proposal.layout, text))
        print(f"{number}. {result.proposal.layout}  {result.seconds:.1f} s")
        write(parts + before[number:])
    write(parts)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
