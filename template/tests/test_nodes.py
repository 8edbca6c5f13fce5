"""Ranks that are killed, cut off or silent: the others end in time, and the run goes on exactly.

Two nodes are two network namespaces with torchrun in each; where those are not allowed, these
tests are skipped with the reason. The silent peers below run everywhere.
"""

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nodes import Nodes, NoNodes
from projects import (
    SMALL,
    exit_code,
    fork_ranks,
    forked,
    import_everything,
    losses,
    rows,
    run_folders,
    wait_for_step,
)
from torch.distributed import distributed_c10d

import curry_train.step
from curry_train import launch
from curry_train.config import ParallelConfig
from curry_train.parallel.mesh import Mesh, build_mesh
from curry_train.testing import run_ranks
from curry_train.tracking import flight_recorder

full = pytest.mark.skipif(not os.environ.get("CURRY_TRAIN_FULL"), reason="CURRY_TRAIN_FULL=1")
STEPS = 100
SETTINGS = (*SMALL, "precision=fp64", f"run.max_steps={STEPS}", "run.save_every=10", "run.keep=2")
LIMIT = 10.0
"""run.comm_timeout of the runs whose cable is cut; ranks are gone after it."""
AGENTS = 3.0
"""Seconds that torchrun's agents, which are not ours, may take beyond the ranks' own bound."""


def patience(seconds: float) -> float:
    """Return how long `seconds` of work may take while other programs share the processor."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.fixture(scope="module", autouse=True)
def everything_imported():
    import_everything()


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def nodes(tmp_path):
    try:
        made = Nodes(tmp_path)
    except NoNodes as error:
        pytest.skip(f"two network namespaces need root or user namespaces: {error}")
    yield made
    made.close()


def settings(name: str, *more: str) -> tuple[str, ...]:
    return (*SETTINGS, f"run.name={name}", f"run.comm_timeout={LIMIT}", *more)


def told(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("rank ")]


def whole_run(nodes: Nodes, per_node: int) -> Path:
    """A run of as many ranks that nobody disturbs; its losses equal those of one process.

    They are forks: every start of torchrun on both nodes costs fifteen CPU seconds of imports.
    """
    pids = fork_ranks(2 * per_node, *settings("whole", "run.dir=whole"), folder=nodes.folder)
    assert {exit_code(pid) for pid in pids} == {0}, output(0)
    (whole,) = Path("whole").iterdir()
    code, text = forked(*settings("one", "run.dir=one", "run.max_steps=10"), log=Path("one.txt"))
    assert code == 0, text
    one = losses(max(Path("one").iterdir()))
    assert len(one) == 10
    for step, loss in one.items():
        assert losses(whole)[step] == pytest.approx(loss, rel=1e-9), step
    return whole


def disturb(nodes: Nodes, per_node: int, attempt: int, how, *, within: float) -> dict[str, float]:
    """Start or resume the run `hurt`, do `how` to it when it has gone on, see everything end."""
    nodes.torchrun(per_node, *settings("hurt", "run.resume=auto"))
    hurt = wait_for_step(nodes.folder, 1)
    end = time.monotonic() + 90
    while sum(row["attempt"] == attempt for row in rows(hurt)) < 15:
        assert time.monotonic() < end, nodes.text()
        time.sleep(0.02)
    how()
    seconds = nodes.ends(within=within)
    print(f"{how.__name__}: last rank {seconds['ranks']:.2f} s, last of all {seconds['all']:.2f} s")
    assert 0 not in nodes.wait(), nodes.text()
    return seconds


def resume_to_the_end(nodes: Nodes, per_node: int, whole: Path) -> None:
    nodes.torchrun(per_node, *settings("hurt", "run.resume=auto"))
    assert nodes.wait() == [0, 0], nodes.text()
    (hurt,) = run_folders(nodes.folder)
    assert losses(hurt) == losses(whole) and len(losses(whole)) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, pytest.param(2, marks=full)])
def test_a_killed_rank_and_a_cut_cable_end_all_and_the_run_resumes_exactly(nodes, per_node):
    whole = whole_run(nodes, per_node)
    victim = 2 * per_node - 1

    def kill_one():
        os.kill(nodes.pid_of(victim), signal.SIGKILL)

    disturb(nodes, per_node, 1, kill_one, within=patience(10.0))
    (hurt,) = run_folders(nodes.folder)
    failure = json.loads((hurt / "failure.json").read_text())
    assert failure["lost_peer"] and f"rank {victim} wrote no record" in failure["message"]
    assert rows(hurt, "journal.jsonl")[-1]["status"] == "crashed"
    assert sum("lost another rank" in line for line in told(nodes.text())) == 1

    seconds = disturb(nodes, per_node, 2, nodes.cut, within=LIMIT + patience(AGENTS))
    assert seconds["ranks"] < LIMIT + patience(1.5)  # who watches an agent bears a rank, too
    failure = json.loads((hurt / "failure.json").read_text())
    assert "got no answer from another rank for 8 s" in failure["message"]
    assert "nothing got through between them" in failure["message"]
    assert rows(hurt, "journal.jsonl")[-1]["status"] == "crashed"
    for rank in range(2 * per_node):
        record = json.loads((hurt / f"flight-recorder/rank-{rank:05d}.json").read_text())
        assert record["trace"]["entries"][-1]["profiling_name"].startswith("gloo:")
    assert (hurt / "flight-recorder.attempt-1").is_dir()

    nodes.heal()
    resume_to_the_end(nodes, per_node, whole)


@full
@pytest.mark.parametrize("what", ["rank 0", "the agent with the store", "a frozen node"])
def test_whatever_goes_the_rest_ends_and_the_run_resumes(nodes, what):
    whole = whole_run(nodes, 2)

    def take_away():
        if what == "rank 0":
            os.kill(nodes.pid_of(0), signal.SIGKILL)
        elif what == "the agent with the store":
            nodes.agents[0].kill()
        else:
            for pid, rank in nodes.processes().items():
                if rank in (2, 3) or pid == nodes.agents[1].pid:
                    os.kill(pid, signal.SIGSTOP)
            nodes_that_run_end(nodes, within=LIMIT + patience(AGENTS))
            for pid in nodes.processes():
                os.kill(pid, signal.SIGKILL)

    disturb(nodes, 2, 1, take_away, within=LIMIT + patience(2 * AGENTS))
    resume_to_the_end(nodes, 2, whole)


def nodes_that_run_end(nodes: Nodes, within: float) -> None:
    end = time.monotonic() + within
    while set(nodes.processes().values()) & {0, 1}:
        assert time.monotonic() < end, nodes.text()
        nodes.agents[0].poll()
        time.sleep(0.05)


def output(rank: int) -> str:
    return Path(f"rank-{rank}.txt").read_text()


def ranks(project: Path, *more: str) -> list[int]:
    return fork_ranks(2, *SMALL, "run.max_steps=100000", *more, folder=project)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_silent_peer_is_named_within_the_timeout(project, stopped):
    pids = ranks(project, "run.comm_timeout=4")
    folder = wait_for_step(project, 2)
    began = time.monotonic()
    os.kill(pids[stopped], signal.SIGSTOP)
    try:
        assert exit_code(pids[1 - stopped]) == 1
        assert 3.0 < time.monotonic() - began < 4.0 + patience(1.5)
    finally:
        os.kill(pids[stopped], signal.SIGKILL)
        exit_code(pids[stopped])
    failure = json.loads((folder / "failure.json").read_text())
    assert failure["lost_peer"] and f"rank {stopped} wrote no record" in failure["message"]
    assert "got no answer from another rank for 3.2 s (run.comm_timeout)" in failure["message"]
    (line,) = told(output(1 - stopped))
    assert "all_reduce no. " in line and "of group world (ranks 0, 1)" in line


def test_a_rank_that_does_not_come_is_told_with_the_place_where_it_was(project, monkeypatch):
    real = curry_train.step.train_step

    def planted(runtime):
        if runtime.step == 2 and runtime.mesh.rank == 1:
            time.sleep(60)
        return real(runtime)

    monkeypatch.setattr(curry_train.step, "train_step", planted)
    began = time.monotonic()
    assert [exit_code(pid) for pid in ranks(project, "run.comm_timeout=3")] == [1, 1]
    assert time.monotonic() - began < patience(20)
    (line,) = told(output(0))
    assert "rank 1 had not come to it but was at" in line and "in planted" in line
    end = rows(run_folders(project)[0], "journal.jsonl")[-1]
    assert end["status"] == "crashed" and "in planted" in end["reason"]


def test_a_timeout_of_half_a_second_trains_or_ends_in_words(project):
    """On a busy machine a rank may well wait for half a second; the start has more time."""
    small = (*SMALL, "run.max_steps=5", "run.comm_timeout=0.5")
    pids = fork_ranks(2, *small, folder=project)
    codes, text = [exit_code(pid) for pid in pids], output(0) + output(1)
    assert codes in ([0, 0], [1, 1]) and len(run_folders(project)) == 1, text
    assert codes == [0, 0] or ("another rank for 0.4 s" in text and "Traceback" not in text), text
    assert launch.wait_limit(0.5) == 0.4 and launch.wait_limit(600) == 598


def test_ranks_that_never_come_together_give_up(project, monkeypatch):
    monkeypatch.setattr(launch, "JOIN_SECONDS", 2.0)
    monkeypatch.setattr("projects.range", lambda world: [0], raising=False)  # rank 1 is missing
    (pid,) = ranks(project, "run.comm_timeout=1")
    began = time.monotonic()
    assert exit_code(pid) == 1 and time.monotonic() - began < patience(8)
    assert "rank 0 of 2 waited 2 s for all ranks to join" in output(0)
    assert not Path("runs").exists()


def group_timeouts(rank, world):
    cpu = torch.device("cpu")
    mesh = build_mesh(ParallelConfig(tp=2), device=cpu, local_rank=rank, comm_timeout=60.0)
    launch.bound_groups(mesh, 7.0)
    groups = [group for group in distributed_c10d._world.pg_map if group.size() > 1]
    found = {group._get_backend(cpu).options._timeout for group in groups}
    return len(groups), found, distributed_c10d._get_default_store().timeout


def test_every_group_and_the_store_have_the_timeout():
    wanted = timedelta(seconds=7)
    for count, found, store in run_ranks(group_timeouts, 4):
        assert count >= 3 and found == {wanted} and store == wanted


def open_collective(rank, world):
    mesh = build_mesh(
        ParallelConfig(), device=torch.device("cpu"), local_rank=rank, comm_timeout=20.0
    )
    group, progress = mesh.group("world"), flight_recorder.Progress(mesh, 0.4)
    seen = []
    for _ in range(12):
        dist.all_reduce(torch.ones(2), group=group)
        seen.append(progress.stuck())
        time.sleep(0.05)
    time.sleep(0.5 if rank == 0 else 2.0)
    seen.append(progress.stuck())  # nothing is open, however long nothing happened
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    opened, found = time.monotonic(), False
    while rank == 0 and not found and time.monotonic() - opened < 1.4:
        found = progress.stuck()
        time.sleep(0.05)
    work.wait()
    return any(seen), found


def test_a_collective_that_stays_open_is_seen_and_an_idle_rank_is_not():
    (healthy, found), _ = run_ranks(open_collective, 2)
    assert not healthy and found


def entry(number: int, op: str, **more):
    base = {"record_id": number, "collective_seq_id": number, "profiling_name": f"gloo:{op}"}
    base |= {"process_group": ["7", "undefined"], "is_p2p": False, "retired": True}
    return {**base, "state": "scheduled", "time_created_ns": 0, "timeout_ms": 1000, **more}


@pytest.mark.parametrize(
    "peer, words",
    [
        ([entry(1, "all_reduce")], "rank 1 had not come to it but was at data.py:3 in wait"),
        (None, "rank 1 wrote no record"),
        (
            [entry(1, "all_reduce"), entry(2, "broadcast")],
            "rank 1 was in broadcast instead, at data.py:3 in wait",
        ),
        ([entry(1, "all_reduce"), entry(2, "all_gather")], "nothing got through between them"),
    ],
)
def test_records_are_compared(tmp_path, peer, words):
    folder = tmp_path / flight_recorder.FOLDER
    folder.mkdir()
    mine = [entry(1, "all_reduce"), entry(2, "all_gather", retired=False)]
    for rank, entries in ((0, mine), (1, peer)):
        record = {"stack": ["data.py:3 in wait"], "trace": {"entries": entries}}
        if entries is not None:
            (folder / f"rank-{rank:05d}.json").write_text(json.dumps(record))
    mesh = Mesh(0, 2, 0, torch.device("cpu"), Mesh.single().dims)
    said = flight_recorder.explain(tmp_path, mesh, wait=0.1, enough=lambda: False)
    assert "the last collective was all_gather no. 2 of group undefined (ranks 0, 1)" in said
    assert words in said
    others = {"had not come", "wrote no record", "instead", "nothing got through"}
    assert sum(part in said for part in others) == 1


def test_torchs_recorder_is_on_and_its_own_pickle_off_unless_the_user_says_otherwise():
    env = {"TORCH_FR_BUFFER_SIZE": "5"}
    flight_recorder.switch_on(env)
    assert env == {"TORCH_FR_BUFFER_SIZE": "5", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
