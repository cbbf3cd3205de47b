"""Joining of a job of several processes, one on each host, which JAX connects.

Process 0 takes the requests. For each run of a device program it sends a plan (the program's name and arguments). The
other processes run the same programs on their devices.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxspec.common.errors import UserError
from jaxspec.common.package import VERSION
from jaxspec.common.values import number, option, options, whole
from jaxspec.parallel.meeting import MOST_PROCESSES, address, gather, visit
from jaxspec.parallel.peers import Peers

logger = logging.getLogger(__name__)

# Names of JAX's cluster detectors that are used. The others are not used, because they print lines of their own.
FOUND_OUT = ("gcetpu", "gketpu", "slurm", "ompi")


@options
class Hosts:
    """Options that describe a job of several processes and this process's number in it."""

    coordinator: str | None = option(
        "HOST:PORT of process 0. On Cloud TPU and Slurm none of these options is needed.",
        default=None,
    )
    num_processes: int | None = option("Number of processes, one per host.", default=None)
    process_id: int | None = option("Number of this process, from 0.", default=None)
    join_timeout: float = option("Seconds to wait for the other processes.", default=300.0)

    def __post_init__(self) -> None:
        which = {
            "coordinator": self.coordinator,
            "num_processes": self.num_processes,
            "process_id": self.process_id,
        }
        missing = [name for name, value in which.items() if value is None]
        if missing:
            if len(missing) < len(which):
                raise UserError(f"{missing[0]} is missing: give all of {', '.join(which)}, or none")
        else:
            address(self.coordinator)
            count = whole("num_processes", self.num_processes, 1, MOST_PROCESSES)
            whole("process_id", self.process_id, 0, count - 1, hint=f": there are num_processes={count}, from 0")
        if not 0 < number("join_timeout", self.join_timeout) <= 1e6:
            raise UserError(f"join_timeout={self.join_timeout} must lie in (0, 1e6], in seconds")


# The connections of this process to the others of the job. They are set once, because JAX is initialised only once.
_peers: Peers | None = None


def peers() -> Peers | None:
    """Return the connections to the other processes of the job, or None for a single process.

    Raises: UserError if JAX was initialised for several processes without `join_hosts`.
    """
    import jax

    if _peers is None and jax.distributed.is_initialized() and jax.process_count() > 1:
        raise UserError(
            f"jax.distributed was initialised for {jax.process_count()} processes: call jaxspec.join_hosts() "
            "instead, which also initialises it"
        )
    return _peers


def leave(status: int) -> None:
    """End all processes of the job at once. Do nothing in a job of one process. status: exit status."""
    if _peers is not None:
        _peers.end(f"process {_peers.rank} ended with status {status}", status, reported=True)


@contextlib.contextmanager
def together(values: Callable[[], Mapping[str, Any]]) -> Iterator[Peers | None]:
    """Return a context for code that all processes of the job run. An error in one process ends all of them.

    The context yields the connections to the other processes, or None for a single process.

    values: function that returns the values that must be equal in all processes. It is not called for a single process.

    If the values of a process differ from those of process 0, all processes end.

    Raises: UserError if the processes of the job run a model already, or as `peers` does.
    """
    found = peers()
    if found is None:
        yield None
        return
    found.take()
    found.agree(values())
    with found.together():
        yield found


def join_hosts(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    join_timeout: float = 300.0,
) -> None:
    """Join this process to a job of several, in place of `jax.distributed.initialize`.

    Call this function before anything uses a device. Afterwards call `LLM(...)` with the same arguments in every
    process. In process 0 that call returns a model on the devices of all processes. In any other process it runs the
    programs that process 0 asks for until process 0 is done, and then ends the process.

    On Cloud TPU, Slurm and Open MPI the first three arguments are detected. With num_processes=1 nothing is done.

    Args:
      coordinator: "HOST:PORT" of process 0.
      num_processes: number of processes, one per host.
      process_id: number of this process, from 0.
      join_timeout: seconds to wait for the other processes.

    Raises: UserError for a wrong argument, if a process does not connect, if the processes have different versions or
      num_processes, if no job of several processes is detected, or if this process has joined already.
    """
    wanted = Hosts(
        coordinator=coordinator, num_processes=num_processes, process_id=process_id, join_timeout=join_timeout
    )
    if not join(wanted):
        raise UserError("the environment names no other processes: give coordinator, num_processes and process_id")


def join(hosts: Hosts) -> bool:
    """Join the job that `hosts` describes, or that is detected in the environment. Return False if none is detected.

    Raises: UserError as `join_hosts` does.
    """
    global _peers
    if hosts.coordinator is None:
        found = surroundings(hosts.join_timeout)
        if found is None:
            return False
        where, count, rank, local_ids = found
    else:
        assert hosts.num_processes is not None
        assert hosts.process_id is not None
        where, count, rank, local_ids = hosts.coordinator, hosts.num_processes, hosts.process_id, None
    if _peers is not None:
        raise UserError("this process has joined its job already: call join_hosts once")
    if count == 1:
        return True
    meet = gather if rank == 0 else visit
    port, connections = meet(where, count, rank, hosts.join_timeout, versions())
    found_peers = Peers(rank, connections)
    with found_peers.together():
        start(f"{where.rpartition(':')[0]}:{port}", count, rank, local_ids)
    _peers = found_peers
    return True


def start(where: str, count: int, rank: int, local_ids: Any) -> None:
    """Initialise JAX for a job of several processes.

    where: HOST:PORT at which JAX's coordination service listens in process 0.
    count: number of processes.
    rank: number of this process.
    local_ids: ids of this process's devices; None for all devices of the host.
    """
    import jax

    # JAX's preemption service would handle SIGTERM and announce a preemption that nobody waits for.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        where, count, rank, local_device_ids=local_ids, cluster_detection_method="deactivate", initialization_timeout=60
    )


def surroundings(timeout: float) -> tuple[str, int, int, Any] | None:
    """Detect the job from Cloud TPU, Slurm or Open MPI.

    timeout: seconds to wait for the cluster's service.

    Returns: (HOST:PORT of process 0, number of processes, number of this process, ids of this process's devices or
      None); None instead if nothing is detected, the detection fails or the job has one process.
    """
    from jax._src.clusters import ClusterEnv

    try:
        known = (kind for kind in ClusterEnv._cluster_types if kind.name in FOUND_OUT and kind.is_env_present())
        kind = next(known, None)
        if kind is None:
            return None
        found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, kind.name, int(timeout))
    except Exception as error:  # the machine looks like part of a cluster, but the cluster's service does not answer
        logger.info("the other processes of this machine could not be listed: %r", error)
        return None
    where, count, rank, local_ids = found
    if where is None or count is None or rank is None or count == 1:
        return None
    return where, count, rank, local_ids


def versions() -> dict[str, str]:
    """Return the versions of the packages that must be equal in all processes, by package name."""
    import jax
    from jaxlib.version import __version__ as jaxlib_version

    return {"jaxspec": VERSION, "jax": jax.__version__, "jaxlib": jaxlib_version}
