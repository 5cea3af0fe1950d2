"""A trainer's config that is pasted on the page Plan fills in the question with what ``read`` says of its file."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from fivefold.errors import UserError
from fivefold.interop.format import Overrides
from fivefold.interop.read import read
from fivefold.interop.registry import FORMATS
from fivefold.interop.write import write
from fivefold.requests.job import list_job_options, load_job
from fivefold.results.reading import Reading
from fivefold.web.folder import ServedFolder
from fivefold.web.pages.plan import PlanQuestion
from fivefold.web.run_config import ReadConfig, read_run_config
from tests.interop.draws import Range, list_written_plans, plans
from tests.interop.test_published import CONFIGS, HERE
from tests.selection import mark_share
from tests.web.browser import NEEDS_CHROMIUM, PLAN, is_within_window, list_violations
from tests.web.conftest import OWN, SECRET

playwright = pytest.importorskip("playwright.sync_api", reason="the pages are driven by playwright")

FILES = [
    config
    for config in CONFIGS
    if len(config["words"].split()) == 1 and ".py:" not in config["words"] and not config.keys() & {"vocab", "mistake"}
]
STACKS = {  # a stack of the plans that are drawn for each format that is read and written
    form.name: form.stack or form.fine_tuning_stacks[0] for form in FORMATS if form.emit and form.parse
}
RANGES = (Range(), Range(models=("llama3.2-1b", "qwen3-8b", "tiny"), fine_tuning=True))
AXOLOTL = "base_model: NousResearch/Meta-Llama-3-8B\nsequence_len: 8192\nmicro_batch_size: 2\nflash_attention: true\n"
DEEPSPEED = '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'


def paste(text: str, folder: Path, **question: Any) -> ReadConfig:
    return read_run_config(PlanQuestion(**question), text, folder=ServedFolder(folder), local=folder / "no-local.toml")


def check_filled(config: ReadConfig, expected: Reading, folder: Path) -> None:
    """The question that the config fills in has the model, layout and job of the reading, and its ranks."""
    assert expected.model is not None
    if expected.model.name == Path(expected.origin).stem:  # of software whose files name no model
        expected = expected.replace(model=expected.model.replace(name=config.reading.origin))
    source = {"source": config.reading.model.source} if config.reading.model else {}
    expected = expected.replace(origin=config.reading.origin, model=expected.model.replace(**source))
    assert config.reading == expected
    filled = config.filled
    resolved = filled.resolve(folder=ServedFolder(folder), local=folder / "no-local.toml")
    assert expected.model is not None
    assert expected.layout is not None
    assert expected.job is not None
    assert resolved.model.replace(source=expected.model.source) == expected.model
    assert filled.parse_layout(resolved.machine) == expected.layout
    assert resolved.machine.ranks == expected.layout.world
    named = resolved.job.precision.replace(name=expected.job.precision.name)
    assert resolved.job.replace(precision=named) == expected.job


@pytest.mark.parametrize("config", mark_share(3, FILES), ids=lambda config: config["words"])
def test_a_published_config_fills_in_what_read_says(config: dict[str, Any]) -> None:
    path = HERE / config["words"]
    given = {"model": config["model"]} if "model" in config else {}
    pasted = path.read_text(encoding="utf-8")
    machine = f"h100:{config.get('gpus', 8)}"
    if "job" not in config:  # it states too little, unless the page states the rest
        with suppress(UserError):
            paste(pasted, path.parent, machine=machine, **given)
        return
    result = paste(pasted, path.parent, machine=machine, **given)
    ranks = config.get("gpus", 8 if "number of GPUs" in result.given else None)
    expected = read([str(path)], Overrides(ranks=ranks))
    if expected.model is None:
        assert result.given[0] == "model"
        expected = read([str(path)], Overrides(ranks=ranks, model=result.reading.model))
    check_filled(result, expected, path.parent)


@pytest.mark.parametrize(("to", "stack"), mark_share(6, STACKS.items()))
def test_a_written_plan_is_filled_in(tmp_path: Path, to: str, stack: str) -> None:
    drawn = [plan for among in RANGES for plan in list_written_plans(stack, to=to, count=3, among=among)]
    if to == "fivefold":  # a run file names its machine too
        drawn = [plan for among in RANGES for plan in plans(stack, count=3, among=among)]
    assert drawn
    for plan in drawn:
        written = write(plan._replace(machine="h100:8"), to=to)
        for name, text in written.files.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        name = next(iter(written.files))
        expected = read([str(tmp_path / name)], Overrides(ranks=plan.layout.world))
        result = paste(written.files[name], tmp_path, machine=f"h100:{plan.layout.world}")
        check_filled(result, expected, tmp_path)


def test_options_state_a_job_in_full() -> None:
    """A precision without a name, sft with joined documents, and a ramp were not reproduced."""
    for settings in (
        ["precision.moments_bytes=2,2"],
        ["objective=sft", "documents=joined"],
        ["ramp.first=4", "ramp.step=4", "ramp.samples=640"],
        ["stack=fsdp2", "precision.accumulated_bytes=4"],
    ):
        job = load_job(settings=settings)
        options = list_job_options(job)
        named = {name.removeprefix("--"): value for name, value in options if name != "--set"}
        assert load_job(settings=[value for name, value in options if name == "--set"], **named) == job


def test_what_a_config_leaves_open_is_that_of_the_page(tmp_path: Path) -> None:
    result = paste(DEEPSPEED, tmp_path, model="llama3.2-1b", machine="h100:16", seq=2048)
    assert result.given == ("model", "tokens per sequence", "number of GPUs")
    assert (result.filled.model, result.filled.machine, result.filled.layout) == (
        "llama3.2-1b",
        "h100:16",
        "dp16 zero3 mbs2",
    )
    with pytest.raises(UserError, match="does not say the length of a sequence"):
        paste(DEEPSPEED, tmp_path)


def test_a_model_that_the_config_names_is_not_replaced_by_the_default(tmp_path: Path) -> None:
    text = AXOLOTL.replace("NousResearch/Meta-Llama-3-8B", "someone/unheard-of")
    with pytest.raises(UserError, match="does not say the model 'someone/unheard-of'"):
        paste(text, tmp_path)
    assert paste(text, tmp_path, model="qwen3-8b").given[0] == "model"


def test_the_page_says_how_it_was_read(client: TestClient) -> None:
    answer = client.get("/plan/read", params={"run_config": f"{AXOLOTL}unheard_of: 1\n", "tokens": "2T", "layers": "4"})
    assert answer.url.path == "/plan"
    asked = dict(answer.url.params)
    assert (asked["layout"], asked["tokens"], asked["stack"], asked["seq"]) == ("dp8 zero0 mbs2", "2T", "ddp", "8192")
    assert "layers" not in asked
    assert re.findall(r"<summary>(Not modelled|Approximated|Understood) \((\d+)\)", answer.text)[0] == (
        "Not modelled",
        "1",
    )
    assert ">unheard_of</td>" in answer.text
    assert "differs from the config" not in answer.text
    changed = client.get(answer.url.copy_set_param("layout", "dp8 zero3 mbs2"))
    assert "differs from the config in: layout." in changed.text
    links = re.findall(r'href="(/plan\?[^"]*)"', changed.text)
    assert links
    assert not any("run_config" in link for link in links)  # a hundred of them would each hold the text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "the pasted config holds text, not a table of keys by name"),
        ("{", "the pasted config: not valid JSON"),
        ("[training]\nsteps = ", "the pasted config: not valid TOML"),
        ("a: [1", "the pasted config: not valid YAML: line 1"),
        ("a: 1", "the pasted config: unknown kind of config"),
        ('{"model_type": "llama", "hidden_size": 64}', "paste it under “Paste a config.json”"),
        ("import os\nos.system('touch executed')\n", "the pasted config"),
        ("$(touch executed)", "the pasted config"),
        ("&a [" + "*a," * 9, "the pasted config"),
        ("[" * 600, "the pasted config"),
        (
            f"{AXOLOTL}deepspeed: zero9.json\n",
            "names zero9.json, which is not in the folder of this page; put it there",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line_next_to_its_control(
    client: TestClient, folder: Path, text: str, reason: str
) -> None:
    answer = client.get("/plan/read", params={"run_config": text})
    (line,) = re.findall(
        r'<p class="mistake" role="alert" data-field="run_config" data-entry="0">(.*?)</p>', answer.text
    )
    assert reason in line
    assert dict(answer.url.params) == {"run_config": text}
    assert not (folder / "executed").exists()


@pytest.mark.parametrize("name", ["../outside.toml", "link.toml", "/etc/passwd", "../outside.json", "\\u0000"])
def test_a_config_names_no_file_outside_the_served_folder(client: TestClient, folder: Path, name: str) -> None:
    (folder.parent / "outside.json").write_text('{"zero_optimization": {"stage": 3}}')
    run_file = f'model = "{name}"\nmachine = "h100:8"\nlayout = "dp8"\n'
    outside = folder.parent.resolve()
    texts = [run_file, f'{AXOLOTL}deepspeed: "{name}"\n', f"swift sft --model '{name}' --deepspeed '{name}'"]
    texts += [f"tune run full_finetune_single_device --config '{name}'", f'{AXOLOTL}tokenizer_config: "{name}"\n']
    texts += [f"torchrun train.py --module '{name}' --config '{name}'", f"trl sft --config '{name}'"]
    for text in texts:
        answer = client.get("/plan/read", params={"run_config": text})
        assert answer.status_code == 200
        assert SECRET not in answer.text
        assert "root:" not in answer.text
        assert str(outside) not in answer.text
        assert "zero3" not in re.findall(r'name="layout" value="([^"]*)"', answer.text)[0].replace("dp8 zero3 mbs1", "")


def test_a_text_has_a_limit(client: TestClient) -> None:
    answer = client.get("/plan", params={"run_config": "x" * 60_001})
    assert answer.status_code == 422
    assert "“config of a trainer” must have 60,000 bytes or fewer, not 60,001" in answer.text


def test_a_file_of_the_served_folder_may_be_named(client: TestClient) -> None:
    answer = client.get("/plan/read", params={"run_config": 'model = "own.toml"\nlayout = "dp4"\n'})
    assert "4 layers of width 256" in answer.text
    assert OWN.startswith("layers = 4")


@NEEDS_CHROMIUM
def test_a_pasted_config_fills_in_the_controls(page: Any) -> None:
    page.goto(PLAN)
    page.get_by_text("Paste or choose a config").click()
    box = page.locator("textarea[name=run_config]")
    box.fill(AXOLOTL)
    config = page.locator("#read-config")
    playwright.expect(config).to_contain_text("Config of axolotl")
    page.wait_for_url(re.compile(r"run_config=base_model"))
    layout = page.locator("input[name=layout]")
    playwright.expect(layout).to_have_value("dp8 zero0 mbs2")
    assert page.locator("select[name=stack]").input_value() == "ddp"
    assert box.input_value() == AXOLOTL
    config.get_by_text("Understood (").click()
    assert is_within_window(page)
    assert list_violations(page) == []
    filled = page.url
    page.get_by_role("group", name="micro-batch").get_by_role("link", name="1", exact=True).dblclick()
    playwright.expect(config).to_contain_text("differs from the config in: layout")
    assert box.input_value() == AXOLOTL  # which the link left out
    page.reload()
    playwright.expect(config).to_contain_text("differs from the config in: layout")
    page.get_by_role("link", name="Fill in the config again").click()
    page.wait_for_url(filled)
    page.get_by_text("Paste or choose a config").click(trial=True)
    box.fill("rubbish")
    playwright.expect(page.locator("#mistake-of-control")).to_contain_text("holds text")
    playwright.expect(layout).to_have_value("dp8 zero0 mbs2")
    page.go_back()
    playwright.expect(config).to_contain_text("Config of axolotl")
    assert box.input_value() == AXOLOTL
    box.fill("")
    playwright.expect(config).to_have_text("")
    assert "run_config" not in page.url
    page.locator("[data-text] input[type=file]").set_input_files(HERE / "swift" / "lora_sft.sh")
    playwright.expect(config).to_contain_text("Config of ms-swift")
    box.fill("# " + "漢" * 19_999)  # as long as it may be, of characters that an address triples
    playwright.expect(page.locator("#mistake-of-control")).to_contain_text("the pasted config")
