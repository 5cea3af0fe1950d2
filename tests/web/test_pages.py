"""The pages, used as a person would, in the system's own Chromium. An error on the console is a failure."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fivefold
from fivefold.cli import app as cli
from fivefold.sweeps.rows_file import write
from fivefold.units import show_bytes
from tests.selection import mark_share
from tests.web.browser import (
    COMPARE,
    NEEDS_CHROMIUM,
    PLAN,
    Server,
    is_whole,
    is_within_window,
    list_violations,
    read_tip,
)
from tests.web.test_runs import write_run
from tests.web.test_sweep import row

playwright = pytest.importorskip("playwright.sync_api", reason="the pages are driven by playwright")
pytestmark = NEEDS_CHROMIUM


def test_plan_answers_within_a_second_and_as_the_command_does(page: Any) -> None:
    page.goto("/")  # what was loaded once is not loaded again
    seconds = [math.inf]
    while min(seconds) > 1.0 and len(seconds) <= 20:  # other work on this machine slows the page too
        start = time.perf_counter()
        page.goto(PLAN)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    printed = CliRunner().invoke(cli, ["predict", "llama3-8b", "h100:8", "dp8 zero3", "--seq", "8192", "--gbs", "64"])
    figures = re.search(r"step time ([\d.]+ m?s) .* ([\d.]+ k) tokens/s per GPU .* MFU ([\d.]+)%", printed.stdout)
    assert figures
    shown = page.locator(".figures").inner_text()
    assert [figure in shown for figure in figures.groups()] == [True] * 3
    for name, size in re.findall(
        r"^(parameters|gradients|optimizer|activations|temporary) +([\d.]+ GiB)", printed.stdout, re.M
    ):
        assert page.get_by_role("row", name=re.compile(name)).first.inner_text().split("\t")[1] == size


def test_a_choice_redraws_and_is_the_address(page: Any) -> None:
    page.goto(PLAN)
    before = page.locator(".figures").inner_text()
    page.get_by_role("group", name="tensor").get_by_role("link", name="2", exact=True).click()
    page.wait_for_url(re.compile(r"layout=dp4%20tp2"))
    assert page.locator("input[name=layout]").input_value() == "dp4 tp2 zero3 mbs1"
    assert page.locator(".figures").inner_text() != before
    assert page.locator(":focus").get_attribute("data-key") == "tp 2"  # a keyboard goes on from there
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"layout=dp2%20tp4"))
    page.go_back()
    page.wait_for_url(re.compile(r"layout=dp4%20tp2"))
    playwright.expect(page.locator("input[name=layout]")).to_have_value("dp4 tp2 zero3 mbs1")
    page.locator("input[name=layout]").fill("dp8 zero2 ac=full")
    page.wait_for_url(re.compile("ac(=|%3D)full"))
    playwright.expect(page.get_by_role("group", name="recompute").get_by_role("link", name="full")).to_have_attribute(
        "aria-current", "true"
    )


@pytest.mark.long  # one control
def test_a_field_with_a_list_is_replaced_by_what_is_typed(page: Any) -> None:
    """Otherwise its list would be cut to what it holds."""
    page.goto(PLAN)
    for name, typed in (("model", "nano"), ("machine", "a100:16"), ("seq", "512")):
        page.locator(f"input[name={name}]").click()
        page.keyboard.type(typed)
        playwright.expect(page.locator(f"input[name={name}]")).to_have_value(typed)
    page.wait_for_url(re.compile(r"seq=512"))


@pytest.mark.long  # one control
def test_disabled_control_says_why(page: Any) -> None:
    page.goto("/plan?model=gpt2&machine=h100:8&layout=dp8&seq=1024&gbs=64")
    tip = read_tip(page, page.get_by_role("group", name="tensor").get_by_text("8", exact=True))
    assert tip.startswith("heads=12 is not divisible by tp=8; try tp")


@pytest.mark.long  # one control
def test_tooltip_describes_the_hovered_element(page: Any) -> None:
    page.goto("/plan?model=llama3-8b&machine=h100:8&layout=pp4+dp2&gbs=16")
    page.locator("#over-time").scroll_into_view_if_needed()
    tip = read_tip(page, page.locator("svg.pipeline rect.k-F").first)
    assert re.match(r"F0.0  [\d.]+ m?s\nstage 0, micro-batch 0", tip)
    tip = read_tip(page, page.locator("svg.chart:not(.pipeline) .hit").nth(60))
    assert re.search(r"activations +[\d.]+ GiB", tip)


@pytest.mark.long  # test_mistakes.py has this
def test_a_user_error_is_shown_and_can_be_fixed(page: Any) -> None:
    page.goto(PLAN)
    page.locator("input[name=model]").fill("lama3-8b")
    playwright.expect(page.get_by_role("alert")).to_contain_text("did you mean llama3-8b")
    page.locator("input[name=model]").fill("llama3-70b")
    playwright.expect(page.locator(".figures")).to_contain_text("does not fit")


def test_a_pasted_config_is_a_model(page: Any) -> None:
    page.goto(PLAN)
    page.get_by_text("Paste a config.json").click()
    page.locator("textarea[name=config]").fill('{"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16}')
    playwright.expect(page.locator("#answer .about")).to_contain_text("16 layers of width 2,048")
    page.reload()
    playwright.expect(page.locator("#answer .about")).to_contain_text("16 layers of width 2,048")
    playwright.expect(page.locator("#asked-of")).to_have_text("pasted on h100:8")


def list_children(process: int) -> list[int]:
    """Return the processes that a process has started."""
    results = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == process:
                results.append(int(path.parent.name))
        except OSError:
            continue  # it has ended meanwhile
    return results


def test_search_proposes_and_leads_to_a_plan(page: Any) -> None:
    page.goto("/search?model=nano&machine=h100:4&gbs=16")
    page.get_by_label("only layouts with").fill("cp=1 pp=1 ac=none,full")
    page.get_by_role("button", name="Search", exact=True).click()
    playwright.expect(page.get_by_role("heading", name=re.compile("^Proposal"))).to_be_visible()
    words = ["search", "nano", "h100:4", "--gbs", "16", "--where", "cp=1 pp=1 ac=none,full"]
    printed = CliRunner().invoke(cli, words, catch_exceptions=False).stdout
    proposed = page.locator(".proposal .big").inner_text()
    assert f"Proposal  {proposed}" in printed
    rows = page.locator("#layouts tbody tr")
    exact = CliRunner().invoke(cli, [*words, "--exact", "--json"], catch_exceptions=False).stdout
    layouts = [item["step"]["layout"] for item in json.loads(exact)["best"]]
    assert [row.locator("a").inner_text() for row in rows.all()] == layouts
    page.locator("#layouts th", has_text="peak").first.click(position={"x": 3, "y": 3})  # next to the word
    sizes = [float(item.get_attribute("data-value")) for item in page.locator("#layouts tbody td:nth-child(5)").all()]
    assert sizes == sorted(sizes)
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("peak")
    page.get_by_placeholder("filter").fill("dp4")
    shown = [row.inner_text() for row in rows.all() if row.is_visible()]
    assert 0 < len(shown) <= 10
    assert all("dp4" in row for row in shown)
    page.get_by_placeholder("filter").fill("")
    page.set_viewport_size({"width": 390, "height": 800})
    assert is_whole(page, "layouts")
    assert is_whole(page, "why the other layouts lost")
    page.set_viewport_size({"width": 1280, "height": 900})
    for box in page.get_by_role("checkbox").all()[:2]:
        box.check()
    selected = page.locator("svg.chart .dot.selected")
    before = selected.count()  # points of the two rows
    other = page.locator("svg.chart a:has(.dot:not(.selected))").last.element_handle()
    other.dispatch_event("click", {"shiftKey": True})  # another point may lie on it
    playwright.expect(selected).to_have_count(before + 1)
    other.focus()
    page.keyboard.press("Space")  # and off again
    playwright.expect(selected).to_have_count(before)
    page.get_by_role("button", name="Select in the plots").click()
    assert list_violations(page) == []
    line = page.locator("svg.parallel a:not([href*='set=']) .crossing:not(.selected)").last
    tip = line.get_attribute("data-tip").split("\n")[0]
    line.dispatch_event("click")
    playwright.expect(page.locator("svg.parallel .crossing.selected")).to_have_count(3)
    assert page.get_by_role("checkbox", name=f"compare {tip}", exact=True).is_checked()
    page.get_by_role("button", name="Compare 3").click()
    page.wait_for_url("**/compare?*")
    playwright.expect(page.locator(".variants li")).to_have_count(3)
    page.go_back()
    playwright.expect(page.get_by_role("button", name="Compare 3")).to_be_enabled()  # as it was left
    playwright.expect(page.locator("th[aria-sort=ascending]")).to_contain_text("peak")
    link = page.locator("#layouts tbody a").first  # the result is kept: it is there at once
    layout = link.inner_text()
    link.click()
    page.wait_for_url("**/plan?*")
    playwright.expect(page.locator("#asking input[name=layout], input[name=layout][form=asking]")).to_have_value(layout)


@pytest.mark.long  # the test above leads from a search to a plan
@pytest.mark.long  # test_api.py has its answer
def test_a_run_on_several_machines_leads_to_their_plans(page: Any) -> None:
    page.goto("/search?model=nano&machine=h100:2&gbs=8&where=pp%3D1+cp%3D1+mbs%3D1")
    page.get_by_label("minimize").select_option("energy")
    page.locator("summary", has_text="A full training run").click()
    page.get_by_label("other machines").fill("b200:1 nic=1Gbit")
    page.get_by_label("other machines").nth(1).fill("h100:1")
    page.get_by_role("button", name="Search", exact=True).click()
    rows = page.get_by_role("region", name="the run on each machine").locator("tbody tr")
    playwright.expect(rows).to_have_count(3)
    assert list_violations(page) == []
    page.set_viewport_size({"width": 390, "height": 800})
    assert is_within_window(page)
    page.get_by_role("row", name=re.compile("b200:1 nic=1Gbit")).get_by_role("link").click()
    page.wait_for_url("**/plan?*")
    playwright.expect(page.locator("input[name=machine]")).to_have_value("b200:1 nic=1Gbit")


def test_a_search_can_be_stopped(page: Any, server: Server) -> None:
    page.goto("/search?model=llama3-70b&machine=h100:512&gbs=512&seq=8192&run=1")
    playwright.expect(page.locator("#going p")).to_contain_text(re.compile("^[1-9].* of .* layouts"))
    assert list_children(server.process)
    some = re.compile(r"of ([2-9]\d|[1-9]\d\d|[1-9],\d{3}) layouts that fit")  # more than the 10 that are shown
    playwright.expect(page.locator("#answer")).to_contain_text(some)
    page.get_by_role("button", name="Stop").click()
    playwright.expect(page.locator("#answer .remark").first).to_contain_text("Stopped")
    playwright.expect(page.locator("#layouts tbody tr")).to_have_count(10)  # what was found is kept
    assert page.get_by_role("alert").count() == 0
    deadline = time.monotonic() + 30
    while list_children(server.process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list_children(server.process) == []


def test_compare_shows_layouts_next_to_each_other(page: Any) -> None:
    page.goto("/compare?model=llama3-8b&gbs=64&layout=dp8+zero3")
    page.get_by_label("layouts, another").fill("dp4 tp2 zero1")
    playwright.expect(page.locator("#answer h2").first).to_contain_text("A trains most tokens per second")
    words = ["compare", "llama3-8b", "h100:8", "dp8 zero3", "dp4 tp2 zero1", "--gbs", "64"]
    printed = CliRunner().invoke(cli, words, catch_exceptions=False).stdout
    assert page.locator("#answer h2").first.inner_text() in " ".join(printed.split())  # the terminal wraps
    for cell in page.get_by_role("row", name=re.compile("^step")).locator("td").all():
        assert cell.inner_text().split("\n")[0] in printed
    page.get_by_label("software, another").fill("Megatron Core, torchtitan")
    playwright.expect(page.locator(".variants li")).to_have_count(4)
    playwright.expect(page.locator(".variants li").nth(1)).to_contain_text("megatron-core")
    page.locator(".variants a").nth(1).click()
    page.wait_for_url("**/plan?*")
    playwright.expect(page.locator("input[name=layout]")).to_have_value("dp4 tp2 zero1")


@pytest.mark.long  # the next test has the page
def test_a_run_is_followed_while_it_trains(page: Any, folder: Path) -> None:
    write_run(folder / "runs" / "going", steps=3, ended=False)
    page.goto("/runs")
    page.get_by_role("link", name="runs/going").click()
    playwright.expect(page.locator(".figures")).to_contain_text("4.500")
    with (folder / "runs" / "going" / "log.jsonl").open("a") as log:
        log.write('{"step": 4, "loss": 4.25, "tokens": 2048, "seconds": 0.5}\n{"step": 4, "event": "rolled back"}\n')
    playwright.expect(page.locator(".figures")).to_contain_text("4.250")
    playwright.expect(page.locator(".events li").first).to_contain_text("rolled back")
    assert "training  4.25" in read_tip(page, page.locator("svg.chart").first.locator(".hit").last)


def test_a_finished_run_is_shown_next_to_its_prediction(page: Any, folder: Path) -> None:
    write_run(folder / "runs" / "done", steps=50)
    page.goto("/runs?folder=runs/done")
    row = page.get_by_role("row", name=re.compile("^step time"))
    assert row.inner_text().split("\t")[3] == "-20.0%"
    assert page.locator("svg.chart").count() == 3
    assert list_violations(page) == []


@pytest.mark.long  # test_sweep.py has the page without a browser
def test_a_sweep_leads_to_a_plan(page: Any, folder: Path) -> None:
    rows = [row("llama3-8b", text) for text in ("dp8 zero3", "dp4 tp2 zero1", "dp2 tp4 zero1", "dp4 pp2 zero1")]
    write(rows, folder / "rows.csv")
    page.goto("/sweep")
    page.get_by_role("link", name="rows.csv").click()
    playwright.expect(page.locator(".heat a")).to_have_count(4)
    assert list_violations(page) == []
    page.locator("select[name=value]").select_option("peak_bytes")
    playwright.expect(page.locator(".heat a").first).to_contain_text("GiB")
    layout = read_tip(page, page.locator("svg.chart a").first).split("\n")[0]
    playwright.expect(page.locator("tr.linked td.code")).to_have_text(layout)  # its row lights up with it
    page.get_by_label("filter the rows").fill("tp2")
    playwright.expect(page.locator("svg.chart a:visible")).to_have_count(1)
    page.get_by_label("filter the rows").fill("")
    page.get_by_role("row", name=re.compile("dp4 tp2")).get_by_role("cell").nth(4).click()  # anywhere in a row
    page.wait_for_url(re.compile("/plan.*dp4%20tp2"))
    page.go_back()
    page.locator("svg.chart a").first.click()
    page.wait_for_url("**/plan?*")
    playwright.expect(page.locator("input[name=layout]")).to_have_value(layout)


def test_a_dry_run_shows_where_memory_is_used(page: Any) -> None:
    page.goto("/dryrun?model=nano&machine=h100:4&gbs=8&layout=dp2+pp2+zero1")
    page.get_by_role("button", name="Dry-run", exact=True).click()
    expected = fivefold.predict("nano", "h100:4", "dp2 pp2 zero1", gbs=8)
    peak = show_bytes(expected.memory.peak_bytes)
    playwright.expect(page.locator(".figures")).to_contain_text(f"{peak} predicted")
    told = read_tip(page, page.locator("svg.chart .hit").nth(120))
    assert re.search(r"^[\d.]+ MiB at [\d.]+ .s\n.*micro-batch", told)
    assert re.search(r"MiB +(\d+ × )?\w+ +blocks\.\*\.\w+.*\(fivefold/trainer/\S+\.py:\d+ ", told)
    tips = page.locator("svg.streams rect.k-F").evaluate_all("all => all.map((each) => each.dataset.tip)")
    assert any(tip.startswith("matmul: ") for tip in tips)
    assert list_violations(page) == []
    assert is_whole(page, "tensors at the peak")
    page.set_viewport_size({"width": 390, "height": 800})
    assert is_whole(page, "tensors at the peak")
    assert is_within_window(page)


@pytest.mark.long  # the test above has the page
@pytest.mark.long  # it starts a process that imports torch
def test_an_invalid_dry_run_says_why(page: Any) -> None:
    page.goto("/dryrun?model=nano&machine=h100:4&layout=dp3&run=1")
    playwright.expect(page.get_by_role("alert")).to_contain_text(
        "global batch 8 (the default) is not divisible by dp·mbs=3·1=3"
    )


@pytest.mark.long  # test_plan_page.py has the page
def test_page_shows_the_effect_of_one_more_change(page: Any) -> None:
    page.goto(PLAN)
    page.get_by_text("What one more change would gain").click()
    words = ["ask", "changes", "llama3-8b", "h100:8", "dp8 zero3", "--seq", "8192", "--gbs", "64"]
    printed = CliRunner().invoke(cli, words, catch_exceptions=False).stdout
    rows = page.locator("#changes tbody tr")
    playwright.expect(rows).not_to_have_count(0)
    shown = [row.inner_text().split("\t") for row in rows.all()]
    assert [cell for row in shown for cell in row[:3] if cell not in printed] == []
    page.locator("#changes a", has_text="ac=full").click()
    playwright.expect(page.locator("input[name=layout]")).to_have_value("dp8 zero3 mbs1 ac=full")


def test_a_chapter_is_read_and_tried(page: Any) -> None:
    page.goto("/learn")
    page.get_by_role("navigation", name="Chapters").get_by_role("link", name=re.compile("^Schedules")).click()
    playwright.expect(page.locator("article h1")).to_have_text(re.compile("^Schedules"))
    page.get_by_label("layout").fill("dp2 pp4 zb1p")
    playwright.expect(page.locator("svg.pipeline rect.k-W").first).to_be_attached()
    assert list_violations(page) == []
    assert is_within_window(page)
    page.goto("/learn/ratios")
    playwright.expect(page.locator("math mfrac").first).to_be_visible()


PAGES = [
    "/learn/memory", PLAN, "/plan?layout=nonsense", "/search", COMPARE, "/runs", "/sweep", "/sweep/start", "/dryrun",
    "/ask", "/trace", "/explain",
]  # fmt: skip


@pytest.mark.parametrize("path", mark_share(6, PAGES))
def test_pages_have_enough_contrast(page: Any, path: str) -> None:
    for width, scheme in ((1280, "light"), (390, "dark")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        page.goto(path)
        assert list_violations(page) == []
        assert is_within_window(page)


@pytest.fixture(scope="module")
def notebook_output() -> str:
    """A cell's output, with a picture."""
    return fivefold.search("nano", "h100:2", gbs=8, where="pp=1 cp=1 zero<=1", front=4)._repr_html_()


THEMES = {  # what each notebook sets, and how it paints its page
    "Jupyter": (
        '<body data-jp-theme-light="{light}" style="{style}" class="jp-RenderedHTMLCommon"><style>'
        ":not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon td {{ text-align: right }}</style>",
        ("#fff", "#000000de"),
        ("#111", "#ffffffde"),
    ),
    "VS Code": ('<body class="vscode-{scheme}" style="{style}">', ("#fff", "#3b3b3b"), ("#1f1f1f", "#ccc")),
}


@pytest.mark.parametrize("scheme", mark_share(2, ["dark", "light"]))
@pytest.mark.parametrize("notebook", mark_share(4, THEMES))
def test_a_notebook_is_readable_in_its_theme(page: Any, notebook_output: str, notebook: str, scheme: str) -> None:
    """Its pictures too, which are files of their own: they follow the notebook, and not the browser."""
    page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
    body, *inks = THEMES[notebook]
    ground, ink = inks[scheme == "dark"]
    head = body.format(
        light=str(scheme == "light").lower(),
        scheme=scheme,
        style=f"background:{ground};color:{ink};color-scheme:{scheme}",
    )
    page.set_content(
        f'<html lang="en"><head><title>cell</title></head>{head}<main>{notebook_output}</main></body></html>'
    )
    assert list_violations(page) == []
    assert page.evaluate("getComputedStyle(document.querySelector('td.w')).textAlign") in ("left", "start")
    shot = page.locator("img").screenshot()
    corner = page.evaluate(
        """async (data) => {
            const bits = await createImageBitmap(await (await fetch("data:image/png;base64," + data)).blob());
            const canvas = Object.assign(document.createElement("canvas"), { width: bits.width, height: bits.height });
            const ink = canvas.getContext("2d");
            ink.drawImage(bits, 0, 0);
            return [...ink.getImageData(20, 4, 1, 1).data.slice(0, 3)];
        }""",
        base64.b64encode(shot).decode(),
    )
    assert (max(corner) < 64) == (scheme == "dark")


def test_a_report_can_be_read(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli, ["report", "nano", "h100:2"]).exit_code == 0
    for width, scheme in ((1280, "light"), (390, "dark")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        page.set_content((tmp_path / "report.html").read_text(encoding="utf-8"))
        assert list_violations(page) == []
        assert is_within_window(page)
