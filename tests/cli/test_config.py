"""``fivefold config``: settings stand in for what is not given, and every answer names those that took effect."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.requests.settings import KEYS, change_setting, find_settings_file, load_settings
from tests.cli.commands import run

JOB = ("--gbs", "16", "--seq", "512")
LAYOUT = "dp8 zero3 mbs1"
NARROW = ("--top", "1", "--where", "tp=1 pp=1 cp=1")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put the settings into a folder of the test; call it with ``KEY VALUE …`` to set some."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def put(**values: str) -> None:
        for key, value in values.items():
            assert run(monkeypatch, "config", "set", key.replace("__", "."), value) == 0

    return put


def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert run(monkeypatch, *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_the_tests_run_without_settings_of_the_user() -> None:
    assert os.environ["XDG_CONFIG_HOME"] == os.devnull
    assert not find_settings_file().exists()
    assert load_settings().model_dump(exclude_defaults=True) == {}


SAYS_DEFAULT = "software fivefold, the default: figures are of Fivefold's own trainer"


def test_an_answer_for_the_default_software_says_how_to_choose_another(
    settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("predict", "nano", "h100:8", LAYOUT, *JOB)
    assert run(monkeypatch, *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count(SAYS_DEFAULT) == 1
    assert said.endswith("add --stack torchtitan, or for all answers: fivefold config set stack torchtitan")
    named = tmp_path / "job.toml"
    named.write_text('stack = "fivefold"\n')
    for more in (("--stack", "fivefold"), ("--set", "stack=fivefold"), ("--job", str(named)), ("--json",)):
        assert run(monkeypatch, *words, *more) == 0
        assert "the default" not in capsys.readouterr().out
    settings(stack="torchtitan")
    assert run(monkeypatch, *words) == 0
    assert "the default" not in capsys.readouterr().out


def test_settings_are_set_read_listed_and_unset(
    settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings(stack="torchtitan", machine="h100:8", prices__h100="2.5/h", output__width="120")
    wanted = {"stack": "torchtitan", "machine": "h100:8", "prices.h100": 2.5, "output.width": 120}
    assert answer(monkeypatch, capsys, "config", "list") == wanted
    for key, value in wanted.items():
        assert answer(monkeypatch, capsys, "config", "get", key) == {key: value}
    assert run(monkeypatch, "config", "unset", "prices.h100") == 0
    assert "prices.h100" not in answer(monkeypatch, capsys, "config", "list")
    assert run(monkeypatch, "config", "get", "prices.h100") == 2
    assert "is not set; set it with: fivefold config set prices.h100 VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("stac", "torchtitan", "unknown setting 'stac'; did you mean stack?"),
        ("stack", "torchtian", "did you mean torchtitan"),
        ("machine", "h10:8", "unknown machine"),
        ("prices.h100", "cheap", "write dollars per GPU hour"),
        ("prices.h100", "-1", "must be more than 0"),
        ("prices.H100:8", "2", "write prices.h100"),
        ("output.color", "red", "must be 'auto', 'always' or 'never'"),
        ("output.width", "3", "must be 40 or more"),
    ],
)
def test_an_invalid_setting_is_a_one_line_error_and_nothing_is_written(
    settings: Any, key: str, value: str, line: str
) -> None:
    with pytest.raises(UserError, match=line):
        change_setting(load_settings(), key, value)
    assert not find_settings_file().exists()


def test_the_error_of_an_invalid_file_contains_its_path(
    settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings(stack="torchtitan")
    find_settings_file().write_text("stak = 'torchtitan'\n", encoding="utf-8")
    assert run(monkeypatch, "predict", "nano", "h100:8", LAYOUT, *JOB) == 2
    assert f"{find_settings_file()}: unknown key 'stak'; did you mean 'stack'?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "by_hand"),
    [
        (("predict", "nano", LAYOUT), ("predict", "nano", "h100:8", LAYOUT)),
        (("search", "nano", *NARROW), ("search", "nano", "h100:8", *NARROW)),
        (("ratios", "nano"), ("ratios", "nano", "h100:8")),
        (("ratios", "nano", LAYOUT), ("ratios", "nano", "h100:8", LAYOUT)),
        (("ask", "micro-batch", "nano", LAYOUT), ("ask", "micro-batch", "nano", "h100:8", LAYOUT)),
        (("compare", "nano", LAYOUT, "dp8 zero2 mbs1"), ("compare", "nano", "h100:8", LAYOUT, "dp8 zero2 mbs1")),
    ],
    ids=lambda words: words[0],
)
def test_settings_act_like_options_and_are_listed_in_the_answer(
    words: tuple[str, ...],
    by_hand: tuple[str, ...],
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = answer(monkeypatch, capsys, *by_hand, *JOB, "--stack", "torchtitan")
    settings(stack="torchtitan", machine="h100:8")
    got = answer(monkeypatch, capsys, *words, *JOB)
    for entry in got if isinstance(got, list) else [got]:
        named = entry.pop("settings")
        assert (named["stack"], named["machine"], named["file"]) == ("torchtitan", "h100:8", str(find_settings_file()))
    for entry in (got, wanted):
        if isinstance(entry, dict):
            entry.pop("seconds", None)  # of the search itself
    assert got == wanted
    assert run(monkeypatch, *words, *JOB) == 0
    assert "user settings: stack=torchtitan, machine=h100:8 (" in capsys.readouterr().out


def test_a_given_option_overrides_a_setting_silently(
    settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("predict", "nano", "a100:8", LAYOUT, *JOB)
    wanted = answer(monkeypatch, capsys, *words, "--stack", "fivefold")
    settings(stack="torchtitan", machine="h100:8")
    assert answer(monkeypatch, capsys, *words, "--stack", "fivefold") == wanted
    assert answer(monkeypatch, capsys, *words, "--set", "stack=fivefold") == wanted
    (tmp_path / "job.toml").write_text("stack = 'fivefold'\n", encoding="utf-8")
    assert answer(monkeypatch, capsys, *words, "--job", str(tmp_path / "job.toml")) == wanted


@pytest.mark.slow
def test_prices_in_settings_apply_to_machines_without_a_price_option(
    settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings(prices__h100="2.5", prices__a100="1.25")
    words = ("search", "nano", "h100:2", "a100:2", "--tokens", "1B", "--by", "cost", "--where", "tp=1 pp=1 cp=1", *JOB)
    assert answer(monkeypatch, capsys, *words)["settings"]["prices"] == {"h100": 2.5, "a100": 1.25}
    got = answer(monkeypatch, capsys, *words, "--price", "h100=4/h")
    assert got.pop("settings")["prices"] == {"a100": 1.25}
    assert run(monkeypatch, "config", "unset", "prices.a100") == 0
    by_hand = answer(monkeypatch, capsys, *words, "--price", "h100=4/h", "--price", "a100=1.25/h")
    assert got == by_hand
    assert "settings" not in answer(monkeypatch, capsys, *words, "--price", "3")
    by_word = answer(monkeypatch, capsys, "ask", "run", "llama3-8b", "h100:8 price=3", "dp8 zero3")
    assert "settings" not in by_word  # a price within the machine's words


def test_a_comparison_takes_the_prices_of_the_settings(
    settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings(prices__h100="2.5", prices__a100="1.25")
    words = ("compare", "nano", "h100:8", "dp8 zero1 mbs1", "dp8 zero3 mbs1", *JOB)
    compared = answer(monkeypatch, capsys, *words)
    assert compared["settings"]["prices"] == {"h100": 2.5}
    assert "cost of 1 T tokens" in {row["name"] for row in compared["rows"]}
    files = [tmp_path / f"zero{stage}.toml" for stage in (1, 3)]
    for file in files:
        file.write_text(f'model = "nano"\nmachine = "a100:8"\nlayout = "dp8 {file.stem} mbs1"\n', encoding="utf-8")
    assert answer(monkeypatch, capsys, "compare", *map(str, files))["settings"]["prices"] == {"a100": 1.25}
    files[0].write_text("layout = 'dp8 dp8'\n", encoding="utf-8")
    assert run(monkeypatch, "compare", *map(str, files)) == 2


def test_a_config_of_other_software_is_predicted_with_that_software_despite_settings(
    settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.sh"
    assert run(monkeypatch, "write", "dp8 zero1 mbs1", "--to", "megatron", "--model", "nano", *JOB, "-o", file) == 0
    settings(stack="torchtitan", machine="h100:8")
    got = answer(monkeypatch, capsys, "predict", "--from", str(file))
    assert got["job"]["stack"]["name"] == "megatron-core"
    assert "stack" not in got["settings"]
    assert got["settings"]["machine"] == "h100:8"


def test_width_and_color_are_those_of_the_settings(
    settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings(output__width="60", output__color="always")
    assert run(monkeypatch, "predict", "nano", "h100:8", LAYOUT, *JOB) == 0
    colored = capsys.readouterr().out
    assert "\x1b[" in colored
    settings(output__color="never", output__width="100")
    assert run(monkeypatch, "predict", "nano", "h100:8", LAYOUT, *JOB) == 0
    plain = capsys.readouterr().out
    assert "\x1b[" not in plain
    assert 60 < max(map(len, plain.splitlines())) <= 100


def test_config_list_explains_every_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "config", "list") == 0
    printed = capsys.readouterr().out
    assert [key for key, meaning in KEYS.items() if f"  {key}: {meaning}" not in printed] == []


def test_write_takes_the_software_of_the_settings(
    settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("write", LAYOUT, "--model", "llama3-8b", "--seq", "8192", "--gbs", "64")
    settings(stack="torchtitan")
    capsys.readouterr()
    for more in ((), ("--to", "torchtitan"), ("--stack", "torchtitan")):
        assert run(monkeypatch, *words, *more) == 0
    written = capsys.readouterr().out
    assert written == 3 * written[: len(written) // 3]
    assert run(monkeypatch, *words, "--stack", "deepspeed") == 0
    assert "torchtitan" not in capsys.readouterr().out


def test_config_without_an_action_lists_the_settings(
    settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings(stack="torchtitan")
    capsys.readouterr()
    assert run(monkeypatch, "config") == 0
    assert "stack = torchtitan" in capsys.readouterr().out
