"""What a team does on the Plan page every day, in one visit: choose, copy, export, write a config, keep a plan."""

from __future__ import annotations

import csv
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.web.browser import NEEDS_CHROMIUM, PLAN, is_within_window, list_violations

playwright = pytest.importorskip("playwright.sync_api", reason="the pages are driven by playwright")


def save(page: Any, button: Any, folder: Path) -> Path:
    """Click and return the file that the browser saves."""
    with page.expect_download() as waiting:
        button.click()
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path


@NEEDS_CHROMIUM
def test_the_plan_page_is_used_from_model_to_copied_command(page: Any, tmp_path: Path) -> None:
    expect = playwright.expect
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(PLAN)

    def copy(name: str) -> str:
        page.evaluate("navigator.clipboard.writeText('')")  # what was copied before is not taken for this
        page.get_by_role("button", name=name, exact=True).click()
        page.wait_for_function("() => navigator.clipboard.readText()")
        expect(page.locator("#tip")).to_have_text("copied")
        return str(page.evaluate("navigator.clipboard.readText()"))

    # the software comes first; a choice that the layout does not have says so, and the answer why
    software = page.get_by_label("which software runs it")
    assert page.locator("form#asking select, form#asking input[name]").first.get_attribute("name") == "stack"
    assert "does not support zero3" in software.locator("option[value=megatron-core]").inner_text()
    software.select_option("megatron-core")
    expect(page.get_by_role("alert")).to_contain_text("megatron-core does not support zero3")
    page.go_back()
    expect(software).to_have_value("")
    software.select_option("torchtitan")
    expect(page.locator("#answer .about")).to_contain_text("software torchtitan")

    # fields of the job are lists, with help on hover and focus
    page.locator("select[name=optimizer]").focus()
    expect(page.locator("#tip")).to_contain_text("muon orthogonalizes")
    before = page.locator(".figures").inner_text()
    page.locator("select[name=optimizer]").select_option("adamw8bit")
    page.wait_for_url(re.compile("optimizer=adamw8bit"))
    assert page.locator(".figures").inner_text() != before
    page.locator("summary", has_text="Precision by part").click()
    page.locator("select[name=moments_bytes]").focus()
    expect(page.locator("#tip")).to_contain_text("two moments of AdamW")
    assert "no scales" in page.locator("select[name=scaling]").locator("option[value=tiles]").inner_text()
    page.locator("select[name=moments_bytes]").select_option("2,2")
    expect(page.locator("#answer .about")).to_contain_text("precision.moments_bytes=2,2")
    page.locator("select[name=moments_bytes]").select_option("")
    expect(page.locator("#answer .about")).not_to_contain_text("moments_bytes")
    group = page.get_by_role("group", name="sharding group")
    group.get_by_role("link", name="4", exact=True).focus()
    expect(page.locator("#tip")).to_contain_text("data parallel ranks over which ZeRO shards")
    group.get_by_role("link", name="4", exact=True).click()
    expect(page.locator("input[name=layout]")).to_have_value("dp8 zero3/4 mbs1")
    group.get_by_role("link", name="all", exact=True).click()
    expect(page.locator("input[name=layout]")).to_have_value("dp8 zero3 mbs1")

    # the cost of a run, with a price
    page.get_by_label("$ per GPU and hour").fill("2")
    expect(page.locator(".figures")).to_contain_text("GPU hours at $2")
    page.get_by_label("tokens of the run").fill("2T")
    expect(page.locator(".figures")).to_contain_text("for 2 T tokens")
    assert page.locator("svg.interval").count() == 2
    assert page.locator(".figure.good").count() == 1

    # copy
    assert copy("Copy as command") == (
        "fivefold predict llama3-8b h100:8 'dp8 zero3 mbs1' --stack torchtitan --seq 8192 --gbs 64 "
        "--optimizer adamw8bit"
    )
    assert 'optimizer="adamw8bit"' in copy("Copy as Python")
    assert copy("Copy link") == page.url

    # the config of the software: shown, copied and saved; what another one cannot run is said
    page.locator("summary", has_text="Config for torchtitan").click()
    expect(page.locator("details .mistake")).to_contain_text("optimizer.kind='adamw' instead of 'adamw8bit'")
    page.locator("select[name=optimizer]").select_option("")
    config = page.locator(".file pre").first
    expect(config).to_contain_text("data_parallel_shard_degree=8")
    assert save(page, page.locator("[data-save]").first, tmp_path).suffix == ".py"
    page.locator("summary", has_text=re.compile("^megatron$")).click()
    expect(page.locator("details .mistake")).to_contain_text("megatron-core does not support zero3")
    assert list_violations(page) == []

    # tables as data, with numbers in full; pictures as files
    table = save(page, page.get_by_label("save communication as CSV", exact=True), tmp_path)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["collective"] for row in rows][:2] == ["all_gather", "reduce_scatter"]
    assert float(rows[0]["sent"]) > 1e11
    parts = json.loads(save(page, page.get_by_label("save Memory as JSON"), tmp_path).read_text())
    assert [part["name"] for part in parts][:2] == ["parameters", "gradients"]
    picture = save(page, page.get_by_role("button", name=re.compile("as SVG")).first, tmp_path).read_text()
    assert picture.startswith("<svg")
    assert "var(--" not in picture
    image = save(page, page.get_by_role("button", name=re.compile("as PNG")).first, tmp_path).read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 10_000

    # plans are kept by the browser, across a new visit
    page.locator("summary", has_text="Saved and recent plans").click()
    page.get_by_label("name of this plan").fill("baseline")
    page.locator("#saving button").click()
    saved_url = page.url
    page.get_by_role("link", name="Reset").click()
    page.wait_for_url(lambda url: url != saved_url)
    expect(page.locator("select[name=optimizer]")).to_have_value("")
    page.locator("summary", has_text="Saved and recent plans").click()
    expect(page.locator("#recent a").nth(2)).to_be_visible()
    page.locator("#saved").get_by_role("link", name="baseline").click()
    page.wait_for_url(saved_url)
    page.locator("summary", has_text="Saved and recent plans").click()
    page.get_by_role("button", name="forget baseline").click()
    expect(page.locator("#saved a")).to_have_count(0)
    page.set_viewport_size({"width": 390, "height": 800})
    assert is_within_window(page)


@pytest.mark.long  # controls as those of the first test
@NEEDS_CHROMIUM
def test_layers_of_an_adapter_are_chosen(page: Any) -> None:
    expect = playwright.expect
    page.goto(PLAN.replace("h100:8", "h100:2").replace("dp8", "dp2"))
    page.locator("summary", has_text="Layers of the adapter").click()
    targets = page.get_by_label("layers with an adapter")
    assert "no adapter is chosen" in targets.locator("option[value='q_proj,v_proj']").inner_text()
    page.locator("select[name=adapter]").select_option("lora:16")
    expect(page.locator("#answer .about")).to_contain_text("lora:16")
    expect(targets.locator("option[value='q_proj,v_proj']")).to_have_text("q_proj,v_proj")
    assert "experts" in targets.locator("option", has_text="all-linear,experts.gate_up_proj").inner_text()
    targets.focus()
    expect(page.locator("#tip")).to_contain_text("routed experts, which all-linear leaves frozen")
    targets.select_option("q_proj,v_proj")
    page.get_by_label("trained in full").select_option("lm_head")
    page.get_by_label("other ranks").fill("q_proj:4")
    page.get_by_label("other alphas").fill("v_proj:8")
    page.get_by_label("other alphas").press("Enter")
    command = page.get_by_role("button", name="Copy as command")
    expect(command).to_have_attribute(
        "data-copy",
        "fivefold predict llama3-8b h100:2 'dp2 zero3 mbs1' --seq 8192 --gbs 64 --adapter lora:16 "
        "--set adapter.targets=q_proj,v_proj --set adapter.modules_to_save=lm_head "
        "--set adapter.rank_pattern=q_proj:4 --set adapter.alpha_pattern=v_proj:8",
    )
    python = page.get_by_role("button", name="Copy as Python").get_attribute("data-copy")
    assert '"targets": ["q_proj", "v_proj"]' in python
    assert '"rank_pattern": ["q_proj:4"]' in python
    expect(page.locator("#answer .figures")).to_be_visible()
    assert list_violations(page) == []


@pytest.mark.long  # controls as those of the first test
@pytest.mark.long  # choices as in the test above; test_controls.py has which ones are offered
@NEEDS_CHROMIUM
def test_parameters_are_offloaded_and_scans_fused(page: Any) -> None:
    expect = playwright.expect
    page.goto(PLAN)
    scans = page.get_by_label("fused scans")
    assert "fused_scans=true changes nothing" in scans.locator("option[value=true]").inner_text()
    offload = page.get_by_role("group", name="offload")
    offload.get_by_role("link", name="parameters", exact=True).click()
    expect(page.locator("input[name=layout]")).to_have_value("dp8 zero3 mbs1 offload=parameters")
    page.locator("[data-key='zero 1']").focus()
    expect(page.locator("#tip")).to_contain_text("offload=parameters is not modelled with")
    page.go_back()
    expect(page.locator("input[name=layout]")).to_have_value("dp8 zero3 mbs1")
    page.get_by_label("catalog name or file").fill("qwen3-next-80b-a3b")
    page.get_by_label("catalog name or file").press("Enter")
    expect(scans.locator("option[value=true]")).to_have_text("fused")
    scans.select_option("true")
    expect(page.get_by_role("button", name="Copy as command")).to_have_attribute(
        "data-copy", re.compile("--set fused_scans=true$")
    )
    assert "fused_scans=True" in page.get_by_role("button", name="Copy as Python").get_attribute("data-copy")


def test_a_choice_that_no_config_can_express_is_marked(client: TestClient) -> None:
    asked = {"layout": "dp8 zero3 mbs1", "stack": "torchtitan"}
    reason = "no config of torchtitan is written with optimizer muon"
    assert f"{reason} – " not in (text := client.get("/plan", params=asked).text)
    assert f'title="{reason}; use adamw, or another stack">muon – {reason}<' in text
    assert (
        f'<b class="warn">{reason}; use adamw, or another'
        in client.get("/plan", params=asked | {"optimizer": "muon"}).text
    )


@pytest.mark.parametrize(
    ("stack", "asked", "heading"),
    [
        ("torchtitan", {}, "Config for torchtitan"),
        ("fsdp2", {}, "Config for fsdp2 (accelerate)"),
        ("fsdp2", {"adapter": "lora:16"}, "Config for fsdp2 (trl)"),
        ("ddp", {"layout": "dp8"}, "Config for ddp (trl)"),
        ("nemo", {"layout": "dp8"}, "Configs of other software"),
    ],
)
def test_the_config_is_that_of_the_software(
    client: TestClient, stack: str, asked: dict[str, str], heading: str
) -> None:
    text = client.get("/plan", params={"layout": "dp8 zero3 mbs1", "stack": stack} | asked).text
    assert f"<summary>{heading}</summary>" in text
    assert ("No config is written for nemo." in text) == (stack == "nemo")


def test_the_risk_of_running_out_of_memory_has_three_colours(client: TestClient) -> None:
    asked = {"machine": "h100:8", "layout": "dp8 zero3 mbs1", "seq": 8192, "gbs": 64}
    for memory, tone in (("79GiB", "good"), ("64GiB", "warn"), ("40GiB", "bad")):
        text = client.get("/plan", params=asked | {"machine": f"h100:8 memory={memory}"}).text
        assert f'<div class="figure {tone}"><dt>peak memory' in text
        assert re.search(r"(fits|tight|does not fit): (&lt; |&gt; )?[\d.]+ % risk", text)


def test_config_of_a_plan_is_what_write_prints(client: TestClient) -> None:
    asked = {"layout": "dp8 zero3 mbs1", "seq": 8192, "gbs": 64, "stack": "torchtitan"}
    assert "data_parallel_shard_degree" in client.get("/plan/config", params=asked).text
    other = client.get("/plan/config", params=asked | {"to": "megatron"})
    assert "megatron-core does not support zero3" in other.text
    assert "did you mean" in client.get("/plan/config", params=asked | {"to": "megatro"}).text


def test_pairs_of_changes_link_to_their_plans(client: TestClient) -> None:
    asked = {"model": "llama3-70b", "machine": "h100:64", "layout": "dp2 tp8 pp4 zero1 mbs1", "seq": 8192, "gbs": 512}
    text = client.get("/plan/changes", params=asked).text
    singles, pairs = text.split("<h3>Two changes together")
    assert "mbs1%20ac=norm%2Bact" in pairs
    assert re.search(r'<a href="[^"]*">dp4 tp4 and zero3</a>', pairs)
    assert re.search(r'<a href="[^"]*">mbs2</a>', singles)
    assert re.search(r"<t[dh][^>]*>fp8</t[dh]>", singles)  # a change of the job is no other layout


UNFIT = "/plan?model=llama3-70b&machine=h100:64&layout=dp64+zero3+mbs1&seq=8192&gbs=64"


def test_a_plan_that_does_not_fit_says_first_what_makes_it_fit(client: TestClient) -> None:
    page, advice = client.get(UNFIT).text, client.get(UNFIT.replace("/plan", "/plan/fit")).text
    assert page.index("peak memory") < page.index("/plan/fit?") < page.index("Expected")
    plan = re.search(r'it would fit with ac=full: <a class="code" href="([^"]*)">dp64 zero3 mbs1 ac=full</a>', advice)
    assert plan is not None
    assert "/plan/fit?" not in client.get(html.unescape(plan[1])).text  # that fits
    without = client.get(UNFIT.replace("/plan", "/plan/fit").replace("h100:64", "h100:8").replace("dp64", "dp8")).text
    assert "no single change makes it fit: try Search for another layout" in without


MANY_STAGES = "/plan?model=gpt3-175b&machine=a100:96&layout=pp48+tp2+mbs1&seq=2048&gbs=96"


def test_figures_of_a_deep_pipeline_come_before_its_pictures(client: TestClient) -> None:
    first, both = client.get(MANY_STAGES).text, client.get(f"{MANY_STAGES}&over_time=1").text
    pictures = client.get(MANY_STAGES.replace("/plan", "/plan/over-time")).text
    assert "peak memory" in first
    assert '<svg class="chart pipeline' not in first
    for look in ("chart pipeline", "chart titled"):
        picture = re.search(rf'<svg class="{look}".*?</svg>.*?</svg>', pictures, re.DOTALL)
        assert picture is not None
        assert picture[0] in both


def test_the_first_stages_of_a_deep_pipeline_come_before_the_others(client: TestClient) -> None:
    first, every = client.get(MANY_STAGES).text, client.get(f"{MANY_STAGES}&over_time=1").text
    others = client.get(MANY_STAGES.replace("/plan", "/plan/stages")).text
    parts = [re.findall(r'<div class="stage">.*?</div>', text, re.DOTALL) for text in (first, others, every)]
    assert [*map(len, parts)] == [32, 16, 48]
    assert [re.findall(r"<svg.*?</svg>", bar)[0] for bar in parts[0] + parts[1]] == [
        re.findall(r"<svg.*?</svg>", bar)[0] for bar in parts[2]
    ]


def test_a_change_is_answered_without_what_the_page_has_already(client: TestClient) -> None:
    page, change = (client.get(PLAN, headers={"sec-fetch-dest": kind}).text for kind in ("document", "empty"))
    assert "<datalist" in page
    assert "<datalist" not in change
    assert len(change) < len(page) - 40_000


@pytest.mark.long  # one picture
@NEEDS_CHROMIUM
def test_a_stage_of_a_deep_pipeline_is_chosen_with_the_keyboard(page: Any) -> None:
    page.goto(MANY_STAGES)
    link = page.get_by_role("link", name="stage 40", exact=True)
    assert link.count() == 0
    page.locator("[data-later*='/plan/stages']").scroll_into_view_if_needed()
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("rank=40"))
    playwright.expect(link).to_have_attribute("aria-current", "true")
    playwright.expect(link).to_be_focused()
    playwright.expect(page.locator("[aria-busy]")).to_have_count(0)
    assert list_violations(page) == []


@pytest.mark.long  # one picture
@pytest.mark.long  # parts that are loaded later, as stages are in the test above
@NEEDS_CHROMIUM
def test_pictures_are_loaded_when_they_come_near_the_window(page: Any) -> None:
    page.goto(MANY_STAGES)
    assert page.locator("#over-time svg.pipeline").count() == 0
    _scroll_to_pictures(page, "96 micro-batches")
    playwright.expect(page.locator("#over-time svg.pipeline")).to_be_visible()
    page.get_by_role("group", name="micro-batch").get_by_role("link", name="2", exact=True).click()
    page.wait_for_url(re.compile("mbs2"))
    _scroll_to_pictures(page, "48 micro-batches")
    page.go_back()
    _scroll_to_pictures(page, "96 micro-batches")
    playwright.expect(page.locator("[aria-busy]")).to_have_count(0)
    assert list_violations(page) == []


@pytest.mark.long  # only speed
@NEEDS_CHROMIUM
def test_a_change_keeps_the_elements_that_it_does_not_change(page: Any) -> None:
    page.goto(PLAN)
    page.evaluate("""() => {
      const parts = "#controls .options, #answer h2:not(#over-time h2), #answer details";
      window.kept = [...document.querySelectorAll(parts)];
      window.former = document.querySelector("#answer .figures").textContent;
    }""")
    page.locator("#answer summary", has_text="Longest operations").click()
    page.get_by_role("group", name="micro-batch").get_by_role("link", name="2", exact=True).click()
    page.wait_for_url(re.compile("mbs2"))
    page.wait_for_function("document.querySelector('#answer .figures').textContent !== window.former")
    assert page.evaluate("window.kept.filter((old) => !old.isConnected).map((old) => old.outerHTML)") == []
    assert page.locator("#answer details[open] summary").all_inner_texts() == ["Longest operations"]
    chosen = page.get_by_role("group", name="micro-batch").locator("[aria-current]")
    playwright.expect(chosen).to_have_text("2")
    playwright.expect(chosen).to_be_focused()
    table = page.get_by_role("button", name="save longest operations as CSV")
    assert table.count() == 1  # not one more with each change


def _scroll_to_pictures(page: Any, heading: str) -> None:
    """Scroll to the pictures until they are those of a heading; going back, the browser scrolls once more by itself."""
    page.wait_for_function(
        """heading => {
          const section = document.getElementById("over-time");
          section.scrollIntoView();
          return section.querySelector("h2")?.textContent.includes(heading);
        }""",
        arg=heading,
        polling=200,
    )


def test_the_page_explains_parts_of_memory_that_add_up_to_more_than_the_peak(client: TestClient) -> None:
    remark = "The parts add up to more than the peak"
    address = "/plan?model=llama3-8b&machine=h100:8&layout=dp8+zero1"
    assert remark in client.get(f"{address}&gbs=8").text
    assert remark not in client.get(f"{address}&gbs=64").text  # gradients stay from the first micro-batch on


def test_lists_of_models_and_machines_are_found_by_what_people_know(client: TestClient) -> None:
    text = client.get("/plan").text
    models = re.search(r'<datalist id="models">(.*?)</datalist>', text)
    machines = re.search(r'<datalist id="machines">(.*?)</datalist>', text)
    assert models is not None
    assert machines is not None
    names = re.findall(r'value="([^"]+)"', models[1])
    assert [name for name in names if name.startswith("qwen2.5-math")] == ["qwen2.5-math-1.5b", "qwen2.5-math-7b"]
    assert names.index("llama3-8b") + 1 == names.index("llama3-70b")  # by size, not by letters
    assert 'value="llama3-8b" label="meta-llama/Meta-Llama-3-8B"' in models[1]
    assert re.search(r'value="h100:8" label="79 GiB · 8 GPUs per node · p5.48xlarge · [^"]+"', machines[1])


def test_a_default_is_listed_once_among_its_choices(client: TestClient) -> None:
    page = client.get("/plan?model=llama3-8b&machine=h100:8&gbs=64&layout=dp8+zero3").text
    for name, default in (("precision", "bf16"), ("optimizer", "adamw"), ("documents", "joined")):
        (options,) = re.findall(rf'<select name="{name}".*?</select>', page, flags=re.DOTALL)
        assert len(re.findall(rf">{default}<", options)) == 1


def test_what_no_published_run_covers_is_said_once(client: TestClient) -> None:
    assert client.get(PLAN).text.count("not covered by any published run: software fivefold") == 1


def test_the_error_of_an_invalid_number_names_its_control(client: TestClient) -> None:
    assert "tokens=-5: a run has 1,000 to 1e+18" in client.get("/plan?tokens=-5").text
    assert "“dollars per GPU and hour” must be a number" in client.get("/plan?price=abc").text
    assert client.get("/api/search?front=x").json()["detail"] == "front must be a whole number"


def test_software_that_others_run_on_says_so(client: TestClient) -> None:
    (software,) = re.findall(r'<select name="stack".*?</select>', client.get(PLAN).text, flags=re.DOTALL)
    assert len(re.findall(r">(ddp|fsdp2|deepspeed) \(Accelerate, Axolotl, LLaMA-Factory, TRL\)", software)) == 3


def test_a_comparison_of_which_one_runs_shows_its_figures_only(client: TestClient) -> None:
    text = client.get("/compare?model=llama3-8b&gbs=64&layout=dp8+zero3&layout=tp3").text
    assert "Only A can run" in text
    assert "The one that runs" in text
    assert "What differs" not in text
