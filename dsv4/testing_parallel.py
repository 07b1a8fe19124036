"""Running checks in a group of processes: gloo on the CPU, one process per rank, each with the same script.

    group = run_group(file, 2, ["tp2:check_values", ...], folder)       # group.results: {check: [None or a traceback, by rank]}

`python -m dsv4.testing_parallel FILE FOLDER CHECK...` is one process of it: it loads FILE and calls its run(CHECK) for each in turn.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Seconds that a collective waits for the other processes, and that a whole group may take.
PATIENCE = 60
GROUP_LIMIT = 600


@dataclass(frozen=True)
class Group:
    """What a group of processes came to, by rank.

    Attributes:
        results: check -> None where it passed, else the traceback. codes: exit codes. printed: the end of what each printed.
    """

    results: dict[str, list[str | None]]
    codes: list[int]
    printed: list[str]


def run_group(
    file: Path, world: int, checks: Sequence[str], folder: Path, *, patience: float = PATIENCE, limit: float = GROUP_LIMIT
) -> Group:
    """Every check in every process, in `folder`. A check that fails ends the group.

    Args:
        patience: seconds that a collective waits for the others. limit: TimeoutError, with every process ended, after so many seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    codes = _wait_for(_start(file, world, checks, folder, patience), limit)
    done = []
    for rank in range(world):
        path = folder / f"result{rank}.json"
        done.append(json.loads(path.read_text()) if path.exists() else {})
    printed = [(folder / f"output{rank}.txt").read_text()[-4000:] for rank in range(world)]
    results = {check: [done[rank].get(check, f"not run: {printed[rank]}") for rank in range(world)] for check in checks}
    return Group(results, codes, printed)


def _start(file: Path, world: int, checks: Sequence[str], folder: Path, patience: float) -> list[subprocess.Popen]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world), "DSV4_MEETING": uuid.uuid4().hex, "DSV4_PATIENCE": str(patience)}
    command = [sys.executable, "-W", "error", "-m", "dsv4.testing_parallel", str(file), str(folder), *checks]
    started = []
    for rank in range(world):
        with (folder / f"output{rank}.txt").open("w") as output:
            # In a folder without packages of ours beside it, so that nothing is imported by its folder's name.
            process = subprocess.Popen(command, env=env | {"RANK": str(rank)}, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        started.append(process)
    return started


def _wait_for(processes: Sequence[subprocess.Popen], limit: float) -> list[int]:
    end = time.monotonic() + limit
    try:
        return [process.wait(max(end - time.monotonic(), 0.01)) for process in processes]
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"a process of the group still ran after {limit} s") from error
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def main(file: str, folder: str, *checks: str) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    meeting = Path(folder) / f"meeting-{os.environ['DSV4_MEETING']}"
    patience = timedelta(seconds=float(os.environ["DSV4_PATIENCE"]))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]), timeout=patience)
    spec = importlib.util.spec_from_file_location("checks", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["checks"] = module
    spec.loader.exec_module(module)
    results: dict[str, str | None] = {}
    for check in checks:
        begun = time.monotonic()
        results[check] = _outcome(module.run, check)
        print(f"{check}: {time.monotonic() - begun:.2f} s", flush=True)
        (Path(folder) / f"result{rank}.json").write_text(json.dumps(results))
        if results[check] is not None:
            print(results[check], flush=True)
            os._exit(1)
    dist.destroy_process_group()


def _outcome(run, check: str) -> str | None:
    """None, or the traceback: the other processes are waiting and have to be told by this one's end."""
    try:
        run(check)
    except BaseException:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
