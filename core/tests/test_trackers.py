import json
import math
import os
import pty
import resource
import subprocess
import sys

import pytest

from rlrun.trackers.console import Console, summary
from rlrun.trackers.jsonl import Jsonl, cut_back

METRICS = {"actor/pg_loss": 0.01234, "critic/score/mean": 0.5, "actor/kl_loss": 0.001, "response_length/mean": 12.3,
           "perf/throughput": 12345.6, "val-core/gsm/acc/mean@1": 0.25}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_has_a_line_a_call_at_once(tmp_path):
    tracker = Jsonl(tmp_path / "run", 10, 0)
    tracker.log({"a": 1, "b": math.nan, "c": -math.inf}, 1)
    assert lines(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "a": 1.0, "b": None, "c": None}]
    tracker.close()
    again = Jsonl(tmp_path / "run", 10, 1)
    again.log({"a": 0.1 + 0.2}, 2)
    assert lines(tmp_path / "run" / "metrics.jsonl")[1] == {"step": 2, "a": 0.1 + 0.2}


def test_a_full_disk_tears_no_line(tmp_path):
    """What could not be written whole is not there, and the next line is a line of its own."""
    tracker = Jsonl(tmp_path)
    tracker.log({"a": 1.0}, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            tracker.log({"a": 2.0, "b": 3.0}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tracker.log({"a": 4.0}, 3)
    tracker.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1.0}, {"step": 3, "a": 4.0}]


def test_cut_back_to_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert cut_back(path, 3) == 0
    text = "".join(json.dumps({"step": step, "a": step}) + "\n" for step in (0, 1, 2, 2, 3, 4))
    path.write_text(text + '{"step": 5, "a"')
    assert cut_back(path, 2) == 4
    assert [line["step"] for line in lines(path)] == [0, 1, 2, 2]
    path.write_text('{"step": 1}\n{"step": 2}')
    assert cut_back(path, 2) == 1, "a line without its end may be torn"
    path.write_text('{"step": 1}\n{"step": \n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        cut_back(path, 2)
    path.write_text('{"step": 0}\n')
    assert cut_back(path, -1) == 0
    assert path.read_text() == ""


def test_console_prints_a_line_a_step_on_stderr(tmp_path, capsys):
    console = Console(tmp_path, 200, 0)
    console.phase("gen")
    console.log(METRICS, 12)
    console.log({"val-core/gsm/acc/mean@1": 0.25}, 13)
    console.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "step 12  validation  gsm/acc/mean@1 0.250",
        "step 12/200  loss 0.0123  reward 0.500  kl 0.0010  tokens 12  tok/s 12,346",
        "step 13  validation  gsm/acc/mean@1 0.250",
    ]
    Console(tmp_path, 0, 0).log({"actor/loss": 2.0}, 1)
    assert capsys.readouterr().err == "step 1  loss 2.0000\n"
    assert summary({}) == ""


def test_console_is_live_on_a_terminal(tmp_path):
    code = ("from pathlib import Path\nfrom rlrun.trackers.console import Console\n"
            f"c = Console(Path({str(tmp_path)!r}), 20, 3)\nc.phase('gen')\nc.log({METRICS!r}, 12)\nc.close()\n")
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True, timeout=240,
                   env={**os.environ, "TERM": "xterm", "COLUMNS": "200"})
    os.close(theirs)
    text = b""
    try:
        while chunk := os.read(ours, 65536):
            text += chunk
    except OSError:
        pass
    os.close(ours)
    assert b"12/20" in text
    assert b"reward 0.500" in text
    assert b"validation" in text
