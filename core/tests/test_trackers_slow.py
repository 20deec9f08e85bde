"""Trackers of services, offline, read back with the services' own libraries, whose import takes seconds."""

from __future__ import annotations

import json
import struct
import time

import pytest

from rlrun.testing.contracts.tracker import TrackerContract


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ("WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


def records(data):
    """What a .wandb file holds: LevelDB's log format, after a header of 7 bytes."""
    place, record = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no header fits into the rest of the block
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7:place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
class TestWandb(TrackerContract):
    plugins = []
    tracker = "wandb"

    @staticmethod
    def read(run_dir):
        from wandb.proto import wandb_internal_pb2 as messages

        [file] = (run_dir / "wandb").glob("offline-run-*/*.wandb")
        kept, ended, deadline = {}, False, time.monotonic() + 20
        while not ended:  # the service beside the process writes the last records
            assert time.monotonic() < deadline
            found = [messages.Record.FromString(data) for data in records(file.read_bytes())]
            ended = any(record.WhichOneof("record_type") == "exit" for record in found)
        for record in found:
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name in (name for name in row if not name.startswith("_")):
                kept.setdefault(name, []).append((int(row["_step"]), row[name]))
        return kept


@pytest.mark.slow
class TestMlflow(TrackerContract):
    plugins = []
    tracker = "mlflow"

    @staticmethod
    def read(run_dir):
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{run_dir}/mlflow.db")
        [run] = client.search_runs([client.get_experiment_by_name("rlrun").experiment_id])
        assert run.info.status == "FINISHED"
        assert run.info.run_name == run_dir.name
        return {name.replace("_at_", "@"): [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
                for name in run.data.metrics}
