"""A real Slurm on this machine: munged, slurmctld and two slurmd on loopback. Each node has one GPU that is not used.

All files are in one folder, and the context manager ends all processes. On Debian: `apt-get install slurm-wlm`.
"""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
SEARCH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
NODES = ("0x7f000001", "0x7f000002")
"""127.0.0.1 and 127.0.0.2: torchrun connects to the first node by name, which must resolve without /etc/hosts."""
SETTINGS = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SchedulerParameters=batch_sched_delay=1,sched_interval=5
ReturnToService=2
KillWait=10
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 Gres=gpu:1
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 Gres=gpu:1
PartitionName=all Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=INFINITE
"""
"""`cred_expire` is also the delay before a requeued job starts."""


def lacks() -> str:
    """Return why Slurm cannot run on this machine; empty if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if missing:
        return f"{missing[0]} is not installed; apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmctld and slurmd run jobs of users; be root"


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Cluster:
    """The running Slurm, and commands that use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SEARCH}

    def command(self, *words: str, cwd: Path | None = None, check: bool = True, **environ: str) -> str:
        """Run a command and return its output."""
        environ = {**os.environ, **self.environ, **environ}
        done = subprocess.run(words, env=environ, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or not check, (words, done.stdout, done.stderr)
        return done.stdout

    def states(self) -> list[str]:
        """Return the state of each node; empty while the controller starts."""
        return self.command("sinfo", "--noheader", "--Node", "--format=%T", check=False).split()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job by their names in `scontrol show job`."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.command("scontrol", "show", "job", number)))

    def processes(self) -> list[psutil.Process]:
        """Return all processes of this Slurm: daemons and steps (by working directory) and jobs (by environment)."""
        processes = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_daemon = process.cwd() == str(self.folder)
                if is_daemon or process.environ().get("SLURM_CONF") == self.environ["SLURM_CONF"]:
                    processes.append(process)
        return processes

    def wait_for(self, moment: Callable[[], bool], timeout_s: float = 300.0) -> None:
        """Wait until `moment` returns true.

        Raises:
            TimeoutError: `moment` stays false; the message has the end of every log.
        """
        deadline = time.monotonic() + timeout_s
        while not moment():
            if time.monotonic() > deadline:
                logs = {path.name: path.read_text()[-2000:] for path in self.folder.glob("*.log")}
                raise TimeoutError("\n".join(f"--- {name}\n{text}" for name, text in logs.items()))
            time.sleep(0.2)


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Start the daemons and wait until both nodes are idle; at the end stop them and all jobs."""
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(SETTINGS.format(host=host, folder=folder, nodes=NODES, ports=free_ports(3)))
    (folder / "gres.conf").write_text(f"NodeName={','.join(NODES)} Name=gpu File=/dev/null\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    folder.chmod(0o755)  # munged rejects a folder that others can write
    for name in ("state", *NODES):
        (folder / name).mkdir()
    cluster = Cluster(folder)
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"]
    munged += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    daemons: list[psutil.Popen] = []
    try:
        for words in (munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)):
            with open(folder / f"daemon{len(daemons)}.log", "w") as log:
                environ = {**os.environ, **cluster.environ}
                daemons.append(psutil.Popen(words, env=environ, cwd=folder, stdout=log, stderr=subprocess.STDOUT))
            if len(daemons) == 1:
                cluster.wait_for((folder / "munge.socket").exists, timeout_s=30)
        cluster.wait_for(lambda: cluster.states() == ["idle"] * len(NODES), timeout_s=60)
        yield cluster
    finally:
        with suppress(TimeoutError, subprocess.TimeoutExpired):
            cluster.command("scancel", "--user=root", check=False)
            cluster.wait_for(lambda: not cluster.command("squeue", "--noheader", check=False), timeout_s=30)
        for daemon in reversed(daemons):
            daemon.terminate()
        psutil.wait_procs(cluster.processes(), timeout=15)
        for process in (stuck := cluster.processes()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([*daemons, *stuck], timeout=15)
        assert not cluster.processes()
