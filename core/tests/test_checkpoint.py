"""Checkpoint folders: atomic publication, retention, the latest by number."""

import pytest

from rlrun.checkpoint import Checkpoints, export, find


def write(folder):
    (folder / "actor").mkdir()
    (folder / "actor" / "x").write_text("weights")


def save(checkpoints, step, state, write, needed=()):
    """As a run saves."""
    with checkpoints.writing(step):
        write(checkpoints.begin(step, state))
        return checkpoints.publish(step, needed)


def steps(checkpoints):
    return [c.step for c in checkpoints.list()]


def test_a_failed_save_loses_nothing(tmp_path):
    """Case 37: keep=1, the second save fails half-way: the first is still there, and nothing half-written."""
    checkpoints = Checkpoints(tmp_path, 1)
    save(checkpoints, 1, {"step": 1}, write)

    def fail(folder):
        write(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        save(checkpoints, 2, {"step": 2}, fail)
    assert steps(checkpoints) == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert checkpoints.latest().state == {"step": 1}


@pytest.mark.parametrize("keep, left", [(2, [3, 4]), (None, [1, 2, 3, 4]), (1, [4])])
def test_retention(tmp_path, keep, left):
    """Case 37: keep=2 and 4 saves leave the last two; null keeps all."""
    checkpoints = Checkpoints(tmp_path, keep)
    for step in range(1, 5):
        save(checkpoints, step, {}, write)
    assert steps(checkpoints) == left


def test_numbers_not_letters_and_never_the_users_own(tmp_path):
    """Case 39: 8, 9, 10, 11 with keep 2 leave 10 and 11; the user's folders stay."""
    for name in ("step_best", "step_000007_backup", "global_step_7"):
        (tmp_path / name).mkdir()
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (8, 9, 10, 11):
        save(checkpoints, step, {}, write)
    assert steps(checkpoints) == [10, 11]
    assert checkpoints.latest().step == 11
    assert {p.name for p in tmp_path.iterdir()} >= {"step_best", "step_000007_backup", "global_step_7"}
    save(checkpoints, 1_000_000, {}, write)
    assert checkpoints.latest().step == 1_000_000


def test_retention_after_a_restart(tmp_path):
    """Case 40: resume from 3 of {1, 2, 3} with keep=2, save 4: 3 and 4 remain."""
    before = Checkpoints(tmp_path, None)
    for step in (1, 2, 3):
        save(before, step, {}, write)
    after = Checkpoints(tmp_path, 2)
    save(after, 4, {}, write)
    assert steps(after) == [3, 4]


def test_what_the_stage_began_with_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, 1)
    save(checkpoints, 1, {}, write)
    save(checkpoints, 2, {}, write, needed={"step_000001"})
    save(checkpoints, 3, {}, write, needed={"step_000001"})
    assert steps(checkpoints) == [1, 3]


def test_half_written_folders_are_no_checkpoints(tmp_path):
    (tmp_path / ".partial-step_000009").mkdir()
    checkpoints = Checkpoints(tmp_path, 2)
    assert checkpoints.latest() is None
    checkpoints.remove_partial()
    assert list(tmp_path.iterdir()) == []


def test_find_and_export_say_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="not a checkpoint"):
        find(str(tmp_path))
    saved = save(Checkpoints(tmp_path, None), 3, {"step": 3}, write)
    assert find(str(saved.path)).step == 3
    with pytest.raises(ValueError, match="hf_model"):
        export(saved.path, tmp_path / "out")
