import sys
import time
from pathlib import Path

import pytest

from fivefold.calibration.processes import run_in_parallel
from fivefold.errors import RunFailure

pytestmark = pytest.mark.processes

SLEEP = "import time; time.sleep(60)"


def python(*programs: str) -> list[list[str]]:
    return [[sys.executable, "-S", "-c", program] for program in programs]


def has_ended(path: Path) -> bool:
    """Whether the process that wrote its id to ``path`` is gone (not even a zombie)."""
    return not Path(f"/proc/{path.read_text()}").exists()


def test_output_of_the_first_worker_is_read_to_its_end():
    heard = []
    talk = "print('one'); print('two')"
    run_in_parallel(python(talk, "print('not me')"), silence_seconds=20, on_line=heard.append)
    assert [line.strip() for line in heard] == ["one", "two"]


def test_a_dead_worker_is_a_one_line_error_and_ends_the_others(tmp_path):
    pid = tmp_path / "pid"
    sleeper = f"import os; open({str(pid)!r}, 'w').write(str(os.getpid())); {SLEEP}"
    failing = (
        f"import os, time\nwhile not os.path.exists({str(pid)!r}): time.sleep(0.01)\nraise OSError('disk on fire')"
    )
    with pytest.raises(RunFailure, match=r"^worker 1 of 2 ended with code 1: OSError: disk on fire$"):
        run_in_parallel(python(sleeper, failing), silence_seconds=20, on_line=print)
    assert has_ended(pid)


def test_a_worker_killed_from_outside_is_reported_with_its_signal():
    suicide = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(RunFailure, match=r"^worker 1 of 2 was killed by SIGKILL$"):
        run_in_parallel(python(SLEEP, suicide), silence_seconds=20, on_line=print)


def test_the_error_names_the_worker_that_failed_first(tmp_path):
    said = tmp_path / "said"
    first = f"import sys; print('the cause', file=sys.stderr, flush=True); open({str(said)!r}, 'w'); sys.exit(3)"
    wait = f"import os, time\nwhile not os.path.exists({str(said)!r}): time.sleep(0.05)\ntime.sleep(0.1)\n"
    lost = wait + "raise OSError('lost it')"
    with pytest.raises(RunFailure, match=r"^worker 1 of 2 ended with code 3: the cause$"):
        run_in_parallel(python(lost, first), silence_seconds=20, on_line=print)


def test_the_last_output_of_a_dead_worker_is_reported():
    heard = []
    run_in_parallel(python("print('x\\n' * 100_000)"), silence_seconds=20, on_line=heard.append)
    assert len(heard) == 100_001


def test_silent_workers_are_stopped():
    start = time.monotonic()
    with pytest.raises(RunFailure, match=r"2 workers have reported nothing for 0\.3 s"):
        run_in_parallel(python(SLEEP, SLEEP), silence_seconds=0.3, on_line=print)
    assert time.monotonic() - start < 10


def test_ctrl_c_leaves_no_worker(tmp_path):
    pid = tmp_path / "pid"
    talker = f"import os; open({str(pid)!r}, 'w').write(str(os.getpid())); print('here', flush=True); {SLEEP}"

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_parallel(python(talker), silence_seconds=20, on_line=interrupt)
    assert has_ended(pid)
