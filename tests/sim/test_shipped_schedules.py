"""Swarms of the classes that ship, each with its own faults, end with each microbatch once."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from peers.sim import __main__ as program
from peers.sim.__main__ import main, play, played
from peers.sim.dice import Dice
from peers.sim.disks import Disks
from peers.sim.faults import KINDS, Fault
from peers.sim.lines import Lines
from peers.sim.setting import Setting, setting_of, usual
from peers.sim.world import Outcome, World, run_schedule
from peers.system import private_folder
from tests.seeds import some


@pytest.mark.process
def test_workers_end_with_the_program_that_is_killed() -> None:
    command = [sys.executable, "-m", "peers.sim", "--schedules", "100000", "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as simulation:
        try:
            parent = psutil.Process(simulation.pid)
            while len(workers := parent.children()) < 2:
                assert simulation.poll() is None
                time.sleep(0.05)
        finally:
            simulation.kill()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive


def test_disks_that_are_never_used_vanish_as_well() -> None:
    """Of a program that is stopped when it has made a world, and before it plays that."""
    disks = Disks()
    folder = disks.add().folder.parent
    assert folder.is_dir()
    del disks
    gc.collect()
    assert not folder.exists()


def test_disks_that_are_stopped_while_they_are_made_vanish_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def stopped(parent: Path, prefix: str) -> tuple[Path, int]:
        folder, lock = private_folder(parent, prefix)
        made.append(folder)
        signal.raise_signal(signal.SIGINT)
        return folder, lock

    monkeypatch.setattr("peers.sim.disks.private_folder", stopped)
    with pytest.raises(KeyboardInterrupt):
        Disks()
    gc.collect()
    assert made
    assert not made[0].exists()


@pytest.mark.process
def test_sigterm_leaves_no_disks_in_memory(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import pathlib; from peers.sim import disks; disks.MEMORY = pathlib.Path({str(tmp_path)!r})"
    )
    paths = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
    command = [sys.executable, "-m", "peers.sim", "--seed", str(stored("own", keeper=True).seed)]
    command += ["--schedules", "100000"]
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env) as simulation:
        while not any(tmp_path.glob("swarm-sim-*")):
            assert simulation.poll() is None
            time.sleep(0.01)
        simulation.terminate()
        assert simulation.wait(timeout=60) == 130
    assert not any(tmp_path.glob("swarm-sim-*"))


@pytest.mark.process
def test_sigterm_waits_for_no_worker(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import time; from peers.sim.world import World\n"
        f"def play(world): open(r'{tmp_path}' + f'/{{world.seed}}', 'w'); time.sleep(600)\n"
        "World.play = play"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *filter(None, sys.path)))}
    command = [sys.executable, "-m", "peers.sim", "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env) as simulation:
        try:
            while not (tmp_path / "4").exists():  # the first of the second worker's
                assert simulation.poll() is None
                time.sleep(0.05)
            simulation.terminate()
            assert simulation.wait(timeout=30) == 130
        finally:
            simulation.kill()


def test_some_schedules_for_those_in_a_hurry() -> None:
    """Also that a world that ends leaves nothing that was never awaited: pytest makes that an error."""
    faults: Counter[str] = Counter()
    for outcome, _ in played(range(6), jobs=1):
        assert not outcome.violation, f"seed {outcome.seed}: {outcome.violation}"
        faults += outcome.faults
    assert len(faults) > len(KINDS) / 2


def test_a_peer_whose_device_failed_ends_and_no_trainer_with_it() -> None:
    lines: list[str] = []
    world = World(0, trace=lines.append, schedule=[Fault(0.3, "device dies", 0.0, 1.0)], setting=usual(0))
    outcome = world.play()
    assert outcome.faults["device dies"] == 1 and not outcome.violation
    assert any("ends: the device of stage" in line for line in lines), "\n".join(lines)
    assert not any("is refused again and again" in line for line in lines), "\n".join(lines)


def test_a_finished_run_goes_back_only_with_a_trainer() -> None:
    """All of a stage die when the run is complete and its trainers have gone; one newcomer joins."""
    lines: list[str] = []
    world = World(9, trace=lines.append, schedule=[Fault(3.5, "lose stage", 0.9, 1.0)], setting=usual(9))
    world.play()
    story = "\n".join(lines)
    waits = story.index("going back to 0 waits for a trainer, and the other stages keep theirs")
    assert "t0 goes home" in story[:waits] and "back to the checkpoint" not in story[:waits]
    assert "back to the checkpoint of step 0" in story[waits:], "a trainer that comes later helps"
    assert not world.swarm.violation, story


def first_with(wanted: Callable[[Setting], bool]) -> Setting:
    """The setting of the first seed that has what is wanted."""
    return next(setting for setting in map(setting_of, range(10_000)) if wanted(setting))


def stored(disks: str, *, keeper: bool) -> Setting:
    return first_with(
        lambda s: (s.disks, s.keeper, s.only_last, s.run.checkpoint_every) == (disks, keeper, False, 1)
    )


@pytest.mark.parametrize(("disks", "keeper"), [("own", False), ("shared", False), ("none", True)])
def test_a_run_whose_power_fails_everywhere_goes_on_from_its_disks(disks: str, keeper: bool) -> None:
    """With a keeper and no disks the keeper's folder is the run."""
    lines: list[str] = []
    setting = replace(stored(disks, keeper=keeper), lines=Lines())
    after = Fault(0.0, "blackout", 0.0, 2.0, number=3 if keeper else 2)  # a keeper asks every 3 s
    outcome = World(1, lines.append, [after], setting).play()
    story = "\n".join(lines)
    assert not outcome.violation, story
    dark = story.index("the power fails everywhere")
    assert "resumes from the checkpoint of version" in story[dark:], story


def test_a_process_that_dies_while_it_saves_comes_back_and_what_it_tore_is_told() -> None:
    lines: list[str] = []
    faults = [Fault(0.5, "tear file", 0.0, 2.0, number=number) for number in (2, 2, 2)]
    setting = replace(stored("shared", keeper=False), lines=Lines())
    outcome = World(1, lines.append, faults, setting).play()
    assert not outcome.violation and outcome.faults["tear file"] == 3
    assert any("while p" in line and "writes a file" in line for line in lines)


@pytest.mark.slow
def test_peers_go_where_the_rebalancer_sends_them() -> None:
    lines: list[str] = []
    for seed in [seed for seed in range(600) if setting_of(seed).movable][4:7]:
        assert not World(seed, lines.append, []).play().violation
    assert sum("moves from stage" in line for line in lines) >= 2, "without a fault that says so"


@pytest.mark.parametrize(
    "seed",
    some(
        [17, *(stored(disks, keeper=True).seed for disks in ("own", "none"))],
        quick=[stored("own", keeper=True).seed],
    ),
)
def test_a_seed_replays_exactly(seed: int) -> None:
    first, again = run_schedule(seed), run_schedule(seed)
    assert first == again and first.callbacks > 500


@pytest.mark.slow  # it starts other processes
def test_seeds_replay_exactly_in_another_process() -> None:
    """Python salts the order of sets of texts in each process: nothing may depend on it.

    Seed 20136: the judges of a stage were asked in the order of a set.
    """
    seeds = [stored("own", keeper=True).seed, 20136]
    script = f"from peers.sim.world import run_schedule; print([run_schedule(s).digest for s in {seeds}])"
    told = [
        subprocess.Popen(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": salt}, stdout=subprocess.PIPE
        )
        for salt in ("0", "1")
    ]
    first, again = (process.communicate()[0] for process in told)
    assert first and first == again


# --- the command --------------------------------------------------------------------------------------------


def test_the_summary_ends_with_a_line_of_json() -> None:
    out = io.StringIO()
    assert main(["--schedules", "1", "--seed", "300115"], out) == 0
    row = json.loads(out.getvalue().splitlines()[-1])["rows"][0]
    assert row["schedules"] == 1 and row["violations"] == [] and row["checked"]["I1"] > 1
    assert "each microbatch once in every step that was taken" in out.getvalue()


def test_ctrl_c_tells_what_was_done_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(seed: int) -> tuple[Outcome, float]:
        if seed == 300116:
            raise KeyboardInterrupt
        return play(seed)

    monkeypatch.setattr(program, "play", interrupted)
    out = io.StringIO()
    assert main(["--schedules", "9", "--seed", "300115"], out) == 130
    assert capsys.readouterr().err.endswith("stopped after 1 of 9 schedules\n"), "slow ones are told before"
    assert out.getvalue().startswith("1 schedules, ")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--jobs", "0"], "--jobs: '0' is not a whole number from 1"),
        (["--schedules", "0"], "--schedules: '0' is not a whole number from 1"),
    ],
)
def test_wrong_usage_is_explained(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and error in capsys.readouterr().err


def test_a_call_to_a_process_that_ended_by_itself_ends_as_well() -> None:
    """Seed 851: a trainer waited for ever for a peer that its dead device had ended."""
    faults = [
        Fault(0.378, "pause", 0.825, 0.513),
        Fault(0.847, "device dies", 0.008, 0.252),
        Fault(1.96, "join", 0.716, 0.977),
    ]
    assert World(851, schedule=faults, setting=usual(851)).play().violation == ""


def test_what_waits_to_be_sent_again_does_not_change_with_the_weights() -> None:
    """Seed 792: an output was a view of the weights; sent again after a rollback it was that of others."""
    world = World(792, schedule=[Fault(1.656, "lose stage", 0.651, 4.08)], setting=usual(792))
    assert world.play().violation == ""


@pytest.mark.slow
def test_a_round_that_was_given_up_and_is_begun_again_ends() -> None:
    """Seed 26256: a peer that had slept gave up its round and was told the same one at once, for ever."""
    assert run_schedule(26256).violation == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [9126, 31404])
def test_a_request_that_comes_as_a_peer_pauses_is_answered(seed: int) -> None:
    """It waited for a job of a device that had been stopped, and the run with it."""
    assert run_schedule(seed).violation == ""


@pytest.mark.slow
def test_two_steps_that_begin_again_at_once_are_opened_once_each() -> None:
    """A step was opened twice; the second had an empty ledger, and the sum of the first."""
    assert run_schedule(60).violation == ""


@pytest.mark.slow
def test_a_replica_that_does_not_know_how_far_the_run_was_follows_a_generation() -> None:
    """Seed 91047: at version 0 it took itself for the proof that its stage was never lost."""
    assert run_schedule(91047).violation == ""


@pytest.mark.slow
def test_a_stage_follows_the_run_by_a_stranger_if_all_with_voice_are_behind() -> None:
    """Seed 5159: a newcomer with a voucher had nothing, and the replica that had the weights no voucher."""
    assert run_schedule(5159).violation == ""


@pytest.mark.slow
def test_a_process_whose_device_dies_as_it_joins_announces_nothing_any_more() -> None:
    """Seed 1923: its voice was in its record for ever, and its stage waited for it."""
    assert run_schedule(1923).violation == ""


@pytest.mark.slow
def test_a_stage_of_newcomers_with_voice_learns_from_a_trainer_how_far_the_run_is() -> None:
    """Seed 300475: one stage, whose replica with voice was new, and the one with the weights had none."""
    assert run_schedule(300475).violation == ""


@pytest.mark.slow
def test_stages_that_strangers_led_on_as_the_first_with_voice_came_are_restored() -> None:
    """Seed 1023, with other latencies: a third stage had taken the step, and no trainer was left to tell."""
    world = World(1023)
    world.swarm.network.dice = Dice(1023 * 1000003 + 86)
    assert world.play().violation == ""


@pytest.mark.slow
def test_one_that_was_stopped_while_the_others_ended_gets_the_last_version() -> None:
    """Seed 1318: it tried each second to go where they are, and heard of nothing meanwhile."""
    assert run_schedule(1318).violation == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [300067, 300115])
def test_a_newcomer_with_voice_takes_the_result_of_one_replica(seed: int) -> None:
    """It waited for the word of a second one, which was its own."""
    assert run_schedule(seed).violation == ""


@pytest.mark.slow
def test_a_peer_that_asks_around_does_not_ask_itself() -> None:
    """Its own record is among those of a stage that was lost and is being restored."""
    assert not run_schedule(891).violation


@pytest.mark.slow
def test_replicas_that_each_found_a_result_alone_begin_the_step_again_together() -> None:
    """Both were left out, and neither was told, since nothing was left to decide on."""
    assert run_schedule(1074).violation == ""


@pytest.mark.slow
def test_a_peer_asks_the_only_one_that_is_left_though_it_answered_in_vain() -> None:
    """One that was gone was counted among those that could be asked."""
    assert run_schedule(858).violation == ""


@pytest.mark.slow
def test_a_newcomer_that_sees_another_run_coordinator_than_the_rest_tells_both() -> None:
    """Seed 187: after late steps those that were there before had taken turns."""
    assert run_schedule(187).violation == ""


@pytest.mark.slow
def test_a_result_of_a_meeting_that_one_alone_has_is_not_dropped_again_and_again() -> None:
    """Seed 902257: nothing is taken from it, and the others of its stage had it at other moments."""
    assert run_schedule(902257).violation == ""


@pytest.mark.slow
def test_a_sum_is_open_only_once_its_ledger_is() -> None:
    """Seed 1819: it was promised anew, and given up again, while an order to open it was under way."""
    assert run_schedule(1819).violation == ""


@pytest.mark.slow
def test_a_peer_that_has_moved_ends_no_trainer_by_refusing_what_is_for_its_old_stage() -> None:
    """Seed 9410236: it alone had voice at its old stage, where its old record was still believed."""
    assert run_schedule(9410236).violation == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [9500258, 9500356])
def test_no_step_is_committed_with_a_result_that_its_stage_has_given_up(seed: int) -> None:
    """A newcomer did not believe what one replica alone had, which the run had heard of: all began anew."""
    outcome = run_schedule(seed)
    assert outcome.violation == "" and outcome.generations == 0


@pytest.mark.slow
def test_islands_that_lost_what_one_of_them_changed_go_on_from_what_it_saved_after_the_meeting() -> None:
    """Seed 9501665: of three two had begun anew, and each waited for more than the third to be past it."""
    assert run_schedule(9501665).violation == ""


@pytest.mark.slow
def test_a_newcomer_does_not_have_the_same_round_made_again_and_again() -> None:
    """Seed 9501405: it had no part in that, whose result was not believed, until another coordinated."""
    outcome = run_schedule(9501405)
    assert outcome.violation == "" and outcome.ended_s < 30.0


@pytest.mark.slow
def test_a_state_that_is_loaded_twice_leaves_its_steps_their_sums() -> None:
    """Seed 336: the second load dropped the sum of a step that the first had opened, and no round ended."""
    assert run_schedule(336).violation == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [630, 881306, 12000112])
def test_one_with_voice_that_comes_in_mid_step_stops_no_run(seed: int) -> None:
    """Strangers that had not seen it yet took a step, which it did not believe, and told nobody of."""
    assert run_schedule(seed).violation == ""


@pytest.mark.slow
def test_an_all_reduce_that_is_given_up_leaves_no_error_unheard() -> None:
    assert run_schedule(1262).violation == ""


@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        (
            900336,
            [Fault(0.591, "lose stage at", 0.098, 2.854, "forward", 1), Fault(1.433, "move", 0.261, 25.438)],
        ),
        (900829, [Fault(0.05, "cut off", 0.8, 0.566), Fault(1.929, "cut power", 0.738, 15.102)]),
        (902339, [Fault(0.593, "cut", 0.441, 0.915)]),
    ],
    ids=[
        "a commit is told until it is believed",
        "a meeting is given out by strangers where none with voice has it",
        "a result is proven anew where the commit that some followed is not believed",
    ],
)
def test_a_run_that_names_its_trainers_ends(seed: int, faults: list[Fault]) -> None:
    """Each stood still for ever: a peer with voice had come, or come back, when others had gone on."""
    setting = replace(setting_of(seed, admitting=0.9), with_voucher=0.5)
    assert World(seed, schedule=faults, setting=setting).play().violation == ""


def test_no_run_goes_back_for_a_commit_that_was_found_with_a_word_taken_back() -> None:
    """Without any fault: one with voice came late, and had the other of its stage begin the step again."""
    setting = replace(setting_of(12000067, admitting=1.0), with_voucher=0.5)
    outcome = World(12000067, schedule=[], setting=setting).play()
    assert outcome.violation == "" and outcome.generations == 0
