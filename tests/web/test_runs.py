from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import fivefold
from fivefold.errors import UserError
from fivefold.units import show_seconds
from fivefold.web import runs
from fivefold.web.app import create
from fivefold.web.folder import FILE_BYTES, ServedFolder
from fivefold.web.pages.runs import smooth


def write_run(folder: Path, *, steps: int, ended: bool = True, begun: bool = False) -> None:
    """A run's folder as ``train`` leaves it."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"step": 0, "heldout_loss": 5.5}]
    lines += [
        {"step": step, "loss": 5.5 - step / steps, "tokens": 512 * step, "seconds": 0.5, "resident_bytes": 2**28}
        for step in range(1, steps + 1)
    ]
    lines += [{"step": steps, "event": "sample: def <b>main</b>"}, {"step": steps, "heldout_loss": 4.75}]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    predicted = fivefold.predict("nano", "h100:2", "dp2", gbs=4) if ended or begun else None
    if begun and predicted:
        (folder / "predicted.json").write_text(json.dumps({"predicted": predicted.model_dump(mode="json")}))
    if ended and predicted:
        time_ = predicted.time.replace(step_seconds=predicted.time.step_seconds * 1.25)
        measured = predicted.replace(kind="measured", time=time_, operations=())
        pair = {step.kind: step.model_dump(mode="json") for step in (predicted, measured)}
        (folder / "step.json").write_text(json.dumps(pair))


@pytest.mark.slow
def test_too_large_piped_or_outside_files_are_errors_at_once(tmp_path: Path) -> None:
    for name in ("large", "pipe", "zero"):
        (tmp_path / "root" / name).mkdir(parents=True)
    with (tmp_path / "root" / "large" / "step.json").open("wb") as file:
        file.truncate(3 * 2**29)  # of holes
    os.mkfifo(tmp_path / "root" / "pipe" / "step.json")
    (tmp_path / "root" / "zero" / "step.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "root" / "model.toml")
    lines = {
        "/api/show?folder=large": "'large/step.json' has 1,610,612,736 bytes; the page reads files of up to 67,108,864",
        "/api/show?folder=pipe": "'pipe/step.json' is neither a file nor a folder; the page reads neither pipes",
        "/api/show?folder=zero": "'zero/step.json' is outside of the folder",
        "/api/predict?model=model.toml&machine=h100:8&layout=dp8": "'model.toml' is neither a file nor a folder",
    }
    app = create(tmp_path / "root", local=tmp_path / "no-local.toml")
    with TestClient(app, base_url="http://127.0.0.1:8765", raise_server_exceptions=False) as client:
        for address, line in lines.items():
            begin = time.monotonic()
            answer = client.get(address)
            assert (answer.status_code // 100, line in answer.text) == (4, True), answer.text
            assert time.monotonic() - begin < 20


def test_the_largest_file_that_is_read_has_the_limit_in_bytes(tmp_path: Path) -> None:
    for size in (FILE_BYTES, FILE_BYTES + 1):
        with (tmp_path / str(size)).open("wb") as file:
            file.truncate(size)  # of holes
    assert ServedFolder(tmp_path).path(str(FILE_BYTES)).name == str(FILE_BYTES)
    with pytest.raises(UserError, match="the page reads files of up to"):
        ServedFolder(tmp_path).path(str(FILE_BYTES + 1))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("runs")
    write_run(result / "runs" / "done", steps=20)
    write_run(result / "runs" / "going", steps=3, ended=False)
    (result / "runs" / "broken").mkdir()
    (result / "runs" / "broken" / "log.jsonl").write_text('{"step": 1, "loss": NaN}\n[3]\n{"step": "x"}\n{"st')
    (result / "runs" / "broken" / "step.json").write_text("{")
    (result / "elsewhere").symlink_to(result / "runs")
    for hidden in (".cache", "__pycache__"):
        write_run(result / hidden / "run", steps=1, ended=False)
    return result


def test_runs_are_listed_with_their_state(root: Path) -> None:
    result = {item.folder: item for item in runs.find(ServedFolder(root))}
    assert sorted(result) == ["runs/broken", "runs/done", "runs/going"]
    done, going = result["runs/done"], result["runs/going"]
    assert (done.state, done.step, done.loss, done.heldout_loss) == ("finished", 20, 4.5, 4.75)
    assert done.tokens_per_second == pytest.approx(512 / 0.5)
    assert done.measured_seconds == pytest.approx(1.25 * (done.predicted_seconds or 0))
    assert (going.state, going.step, going.measured_seconds) == ("running", 3, None)
    assert result["runs/broken"].state == "stopped"


def test_a_run_that_logs_nothing_more_has_stopped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = time.time() + 60
    monkeypatch.setattr(runs.time, "time", lambda: late)
    assert {item.folder: item.state for item in runs.find(ServedFolder(root))}["runs/going"] == "stopped"


@pytest.mark.slow
def test_the_runs_pages_list_and_show_runs(root: Path) -> None:
    with TestClient(create(root, local=root / "none"), base_url="http://127.0.0.1:1") as client:
        listed = client.get("/runs").text
        assert listed.count("<tr>") == 4
        assert "data-poll" in listed
        done = client.get("/runs", params={"folder": "runs/done"}).text
        assert "-20.0%" in done
        assert "sample: def &lt;b&gt;main" in done
        assert "data-poll" not in done
        assert "data-poll" in client.get("/runs", params={"folder": "runs/going"}).text
        assert client.get("/runs", params={"folder": "runs/broken"}).status_code == 200
        for outside in ("../x", "/etc", "runs", "nothing"):
            assert 'role="alert"' in client.get("/runs", params={"folder": outside}).text
        assert {item["folder"] for item in client.get("/api/runs").json()} >= {"runs/done", "runs/going"}
        compared = client.get("/api/show", params={"folder": "runs/done"}).json()
        assert {row["quantity"]: row["error"] for row in compared}["step time"] == pytest.approx(-0.2)


@pytest.mark.slow
def test_a_run_is_shown_with_its_prediction_from_its_first_step(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps=1, ended=False, begun=True)
    (summary,) = runs.find(ServedFolder(tmp_path))
    assert (summary.layout, summary.model, summary.measured_seconds) == ("dp2 zero0 mbs1", "nano", 0.5)
    with TestClient(create(tmp_path, local=tmp_path / "none"), base_url="http://127.0.0.1:1") as client:
        page = client.get("/runs", params={"folder": "a"}).text
    assert "Predicted and measured" in page
    assert show_seconds(summary.predicted_seconds or 0) in page
    assert "What the error consists of" not in page


def test_a_run_that_goes_on_after_its_end_is_running(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps=3, begun=True)
    assert runs.find(ServedFolder(tmp_path))[0].state == "finished"
    os.utime(tmp_path / "a" / "step.json", (1, 1))
    assert runs.find(ServedFolder(tmp_path))[0].state == "running"


def test_the_run_that_was_written_last_is_first(tmp_path: Path) -> None:
    for name, seconds in (("b", 3000), ("a", 1000), ("c", 2000)):
        write_run(tmp_path / name, steps=1, ended=False)
        os.utime(tmp_path / name / "log.jsonl", (seconds, seconds))
    assert [summary.folder for summary in runs.find(ServedFolder(tmp_path))] == ["b", "c", "a"]


def test_runs_are_compared(client: TestClient, folder: Path) -> None:
    for name, steps in (("first", 30), ("second", 20)):
        write_run(folder / "compared" / name, steps=steps)
    names = ["compared/first", "compared/second"]
    page = client.get("/runs", params={"compare": names, "smooth": 10}).text
    assert page.count('<svg class="chart') == 3 + page.count("Gradient norm</h2>")
    assert page.count('class="curve s-F expected"') == page.count('class="curve s-BW expected"') == 1  # tokens/s
    assert "compared/first, predicted  " in page
    assert all(f">{name}</a>" in page for name in names)
    assert "mean of the last" in page
    assert "compare 2 to 6" in client.get("/runs", params={"compare": names[:1]}).text
    assert "holds no log.jsonl" in client.get("/runs", params={"compare": ["compared", *names]}).text


def test_smoothing_is_the_mean_of_the_last_steps() -> None:
    points = [(1, 4.0), (2, 2.0), (3, 0.0), (4, 6.0)]
    assert smooth(points, 1) == points
    assert smooth(points, 3) == [(1, 4.0), (2, 3.0), (3, 2.0), (4, pytest.approx(8 / 3))]
