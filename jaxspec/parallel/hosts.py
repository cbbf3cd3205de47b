"""Several machines as one: a process on each, which JAX makes one of. Process 0 takes requests and decides; the others
run the same programs on their devices."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

from jaxspec.common.errors import UserError
from jaxspec.common.values import number, options, whole
from jaxspec.parallel.meeting import MOST_PROCESSES, address, gather, visit
from jaxspec.parallel.peers import Peers

logger = logging.getLogger(__name__)

FOUND_OUT = ("gcetpu", "gketpu", "slurm", "ompi")  # JAX's names; others write lines of their own while they look


@options
class Hosts:
    """Which process of a job this one is.

    Args:
      coordinator: HOST:PORT at which process 0 can be reached. On Cloud TPU and Slurm none of these options is needed.
      num_processes: How many processes there are, one a host.
      process_id: This one's number, from 0.
      join_timeout: Seconds that the others may take to come.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    join_timeout: float = 300.0

    def __post_init__(self) -> None:
        which = {name: getattr(self, name) for name in ("coordinator", "num_processes", "process_id")}
        if missing := [name for name, value in which.items() if value is None]:
            if len(missing) < len(which):
                raise UserError(f"{missing[0]} is missing: give all of {', '.join(which)}, or none")
        else:
            address(self.coordinator)
            count = whole("num_processes", self.num_processes, 1, MOST_PROCESSES)
            whole("process_id", self.process_id, 0, count - 1, hint=f": there are num_processes={count}, from 0")
        if not 0 < number("join_timeout", self.join_timeout) <= 1e6:
            raise UserError(f"join_timeout={self.join_timeout} must lie in (0, 1e6], in seconds")


_peers: Peers | None = None  # this process's; JAX, too, can be told only once


def peers() -> Peers | None:
    """The other processes of this one's job; None where it is alone.

    Raises: UserError where JAX was told of others and jaxspec was not.
    """
    import jax

    if _peers is None and jax.distributed.is_initialized() and jax.process_count() > 1:
        raise UserError(
            f"jax.distributed was initialised for {jax.process_count()} processes: call jaxspec.join_hosts() in its "
            "place, which does so too"
        )
    return _peers


def leave(status: int) -> None:
    """Before a process that may have others ends at once: they are told, and it ends here."""
    if _peers is not None:
        _peers.end(f"process {_peers.rank} ended with status {status}", status, said=True)


@contextlib.contextmanager
def together(values: Callable[[], Mapping[str, Any]]) -> Iterator[Peers | None]:
    """What all processes of the job do, each with these values, and nobody goes on alone; yields the others. values:
    asked for where there are others.

    Raises: UserError, in a process that has others, where they run a model already.
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
    """Makes this process one of a job's, in place of `jax.distributed.initialize`: call it before anything uses a
    device. Then `LLM(...)`, the same in each, gives a model over the devices of all to process 0; in the others it does
    what that one decides, until that one ends, and ends the process.

    coordinator ("HOST:PORT" at process 0), num_processes, process_id: on Cloud TPU and Slurm they are found out, and
    where there are no others nothing is done. join_timeout: seconds that the others may take to come.

    Raises: UserError where the others do not come or are of another version, or what is missing was not found out.
    """
    wanted = Hosts(
        coordinator=coordinator, num_processes=num_processes, process_id=process_id, join_timeout=join_timeout
    )
    if not join(wanted):
        raise UserError("nothing here tells of other processes: give coordinator, num_processes and process_id")


def join(hosts: Hosts) -> bool:
    """Whether this process was told, or found out, which it is of how many."""
    global _peers
    local_ids = None
    if hosts.coordinator is None:
        if (found := surroundings(hosts.join_timeout)) is None:
            return False
        where, count, rank, local_ids = found
    else:
        assert hosts.num_processes is not None
        assert hosts.process_id is not None
        where, count, rank = hosts.coordinator, hosts.num_processes, hosts.process_id
    if _peers is not None:
        raise UserError("this process has joined its job already: join once")
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
    import jax

    # It would take SIGTERM for itself, and tell of a preemption that nobody waits for.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        where, count, rank, local_device_ids=local_ids, cluster_detection_method="deactivate", initialization_timeout=60
    )


def surroundings(timeout: float) -> tuple[str, int, int, Any] | None:
    """(HOST:PORT of process 0, how many, which, ids of its devices or None), as Cloud TPU, Slurm or Open MPI tell; None
    where nothing does, or this process is alone."""
    from jax._src.clusters import ClusterEnv

    try:
        known = (kind for kind in ClusterEnv._cluster_types if kind.name in FOUND_OUT and kind.is_env_present())
        if (kind := next(known, None)) is None:
            return None
        found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, kind.name, int(timeout))
    except Exception as error:  # a machine that looks like one of several, and has nobody who could tell
        logger.info("who else is here could not be found out: %r", error)
        return None
    where, count, rank, local_ids = found
    if where is None or count is None or rank is None or count == 1:
        return None
    return where, count, rank, local_ids


def versions() -> dict[str, str]:
    """What all processes must have the same of."""
    return {name: version(name) for name in ("jaxspec", "jax", "jaxlib")}


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a source tree on the path
        return "not installed"
