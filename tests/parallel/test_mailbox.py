"""Mailboxes are made only for two GPUs that can write to each other's memory, and travel with a model's parameters."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspec.engine import runner
from jaxspec.models.mlps import gated
from jaxspec.parallel import mailbox
from jaxspec.parallel.placement import make_placement
from pallas_kernels._peer_sum import EMPTY, MAX_ROWS, mailbox_size
from pallas_kernels.device import Device
from tests.support.lively_models import PROMPTS, new_engine, params, plain, serve, texts

H100 = Device("gpu", (9, 0))
GREEDY = tuple(params((20,) * len(PROMPTS)))
WIDTH, VOCAB = 64, 128


class Driver:
    """CUDA's driver, of which each function returns 0 but those in `codes`; peers are able but those in `unable`."""

    def __init__(self, unable: tuple[int, ...] = (), missing: str = "", **codes: int) -> None:
        self.unable, self.missing, self.codes = unable, missing, codes
        self.calls: list[tuple[str, ...]] = []
        self.current: list[int] = []

    def __getattr__(self, name: str):
        if not name.startswith("cu") or name == self.missing:
            raise AttributeError(name)
        return lambda *arguments: self.call(name, *arguments)

    def call(self, name: str, *arguments) -> int:
        self.calls.append((name, *(getattr(a, "value", a) for a in arguments if not hasattr(a, "_obj"))))
        if code := self.codes.get(name, 0):
            return code
        match name, arguments:
            case "cuDeviceGet", (handle, ordinal):
                handle._obj.value = 10 + ordinal
            case "cuDevicePrimaryCtxRetain", (context, device):
                context._obj.value = 1000 + device.value
            case "cuDeviceCanAccessPeer", (able, device, _):
                able._obj.value = device.value not in self.unable
            case "cuCtxPushCurrent_v2", (context,):
                self.current.append(context.value)
            case "cuCtxPopCurrent_v2", _:
                self.current.pop()
            case "cuCtxEnablePeerAccess", (other, _):
                assert self.current[-1] != other.value
        return 0

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)


def test_access_is_enabled_in_both_directions():
    driver = Driver()
    assert mailbox.enabled(driver, [2, 3])
    assert [call for call in driver.calls if call[0] == "cuDeviceCanAccessPeer"] == [
        ("cuDeviceCanAccessPeer", 12, 13),
        ("cuDeviceCanAccessPeer", 13, 12),
    ]
    enabled = [call[1] for call in driver.calls if call[0] == "cuCtxEnablePeerAccess"]
    assert enabled == [1013, 1012]
    assert driver.count("cuDevicePrimaryCtxRelease_v2") == 2
    assert driver.current == []


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (Driver(cuCtxEnablePeerAccess=704), True),  # enabled already
        (Driver(cuCtxEnablePeerAccess=217), False),
        (Driver(unable=(13,)), False),
        (Driver(unable=(12,)), False),
        (Driver(cuDeviceGet=101), False),
        (Driver(cuDeviceCanAccessPeer=101), False),
        (Driver(cuDevicePrimaryCtxRetain=2), False),
        (Driver(cuCtxPushCurrent_v2=201), False),
    ],
)
def test_a_call_that_fails_leaves_the_sums_to_the_compiler(driver, expected):
    """Whatever fails, contexts are given back."""
    assert mailbox.enabled(driver, [2, 3]) is expected
    retained = driver.count("cuDevicePrimaryCtxRetain") - ("cuDevicePrimaryCtxRetain" in driver.codes)
    assert driver.count("cuDevicePrimaryCtxRelease_v2") == retained
    assert driver.current == []


GOOD = {
    "client_options": None,
    "devices": 2,
    "draft_size": None,
    "device": H100,
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
}


@pytest.mark.parametrize(
    ("changed", "environment", "driver", "expected"),
    [
        ({}, {}, Driver(), True),
        ({}, {"JAXSPEC_PEER_SUMS": "1", "XLA_PYTHON_CLIENT_ALLOCATOR": "bfc"}, Driver(), True),
        ({"device": Device("gpu", (10, 0))}, {}, Driver(), True),
        ({}, {"JAXSPEC_PEER_SUMS": "0"}, Driver(), False),
        ({}, {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}, Driver(), False),
        ({}, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, Driver(), False),
        ({"client_options": "allocator:vmm"}, {}, Driver(), False),
        ({"devices": 1}, {}, Driver(), False),
        ({"devices": 4}, {}, Driver(), False),
        ({"devices": 4, "draft_size": 2}, {}, Driver(), False),
        ({"draft_size": 1}, {}, Driver(), False),
        ({"device": Device("gpu", (8, 0))}, {}, Driver(), False),
        ({"device": Device("tpu")}, {}, Driver(), False),
        ({"dtype": "float32"}, {}, Driver(), False),
        ({"vocab_size": VOCAB + 1}, {}, Driver(), False),
        ({}, {}, Driver(missing="cuCtxEnablePeerAccess"), False),
        ({}, {}, Driver(cuCtxEnablePeerAccess=217), False),
        ({}, {}, None, False),
    ],
)
def test_where_there_are_mailboxes(monkeypatch, changed, environment, driver, expected):
    def library(name):
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(mailbox, "ctypes", types.SimpleNamespace(**vars(mailbox.ctypes) | {"CDLL": library}))
    for name in ("JAXSPEC_PEER_SUMS", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    facts = GOOD | changed
    settings = types.SimpleNamespace(jax_pjrt_client_create_options=facts["client_options"])
    monkeypatch.setattr(mailbox, "jax", types.SimpleNamespace(**vars(jax) | {"config": settings}))
    placement = make_placement(facts["devices"], draft_size=facts["draft_size"])
    if facts["draft_size"] is not None:
        placement = placement.draft
    sizes = {"width": WIDTH, "vocab_size": facts["vocab_size"]}
    found = mailbox.mailboxes(placement, facts["device"], facts["dtype"], **sizes)
    assert tuple(found) == (mailbox.NAMES if expected else ())
    if expected:
        check(found, placement)


@pytest.mark.parametrize("options", ["preallocate:false;allocator:vmm", {"allocator": "cuda_async"}])
def test_an_allocator_in_a_setting_of_jax(options):
    assert mailbox.allowed({}, None)
    assert mailbox.allowed({}, "preallocate:false")
    assert mailbox.allowed({}, {"preallocate": False})
    assert not mailbox.allowed({}, options)


def check(found, placement):
    """Each device has a mailbox that is empty, and the address of the other's."""
    places, address = (found[name] for name in mailbox.NAMES)
    shards = {shard.device: shard.data for shard in places.addressable_shards}
    assert len(shards) == 2
    first, second = placement.mesh.devices.flat
    for device, other in ((first, second), (second, first)):
        own = np.asarray(shards[device])
        assert own.shape == (mailbox_size(WIDTH),)
        assert (own[:MAX_ROWS] == 0).all()
        assert (own[MAX_ROWS:] == EMPTY).all()
        (words,) = (np.asarray(shard.data) for shard in address.addressable_shards if shard.device == device)
        assert words.view(np.int64) == [shards[other].unsafe_buffer_pointer()]


def test_other_processes_have_no_mailboxes(monkeypatch):
    monkeypatch.setattr(mailbox, "ctypes", types.SimpleNamespace(**vars(mailbox.ctypes) | {"CDLL": lambda _: Driver()}))
    devices = [types.SimpleNamespace(process_index=i, local_hardware_id=0) for i in range(2)]
    assert not mailbox.connected(devices)


def mailboxes(placement, *_, width, vocab_size, lost=False):
    """Mailboxes on CPUs. lost: whether the second device has waited in vain in row 3."""
    places = np.zeros((2, mailbox_size(width)), np.int32)
    places[1, 3] = -lost
    arrays = jax.device_put((places.reshape(-1), np.zeros(4, np.int32)), placement.sharding(P(placement.axes)))
    return dict(zip(mailbox.NAMES, arrays, strict=True))


def test_mailboxes_reach_the_layers(monkeypatch):
    """Each layer of an engine's programs gets this device's mailbox. The plain form gives the tokens as without."""
    seen = []

    def op(*arrays, mailbox=None, **options):
        seen.append(mailbox and tuple((x.shape, x.dtype) for x in mailbox))
        return real(*arrays, mailbox=mailbox, **options)

    real, expected = gated.op, plain(PROMPTS, GREEDY)
    monkeypatch.setattr(gated, "op", op)
    monkeypatch.setattr(runner, "mailboxes", mailboxes)
    engines = [new_engine("first_layer", 3, tensor_parallel_size=2) for _ in range(2)]
    two = engines[0]
    assert texts(serve(two, PROMPTS, GREEDY, rounds=4)) == expected
    width = two.runner.configs["target"].width
    assert set(seen) == {(((mailbox_size(width),), jnp.dtype(jnp.int32)), ((2,), jnp.dtype(jnp.int32)))}

    def places(engine):
        return [engine.runner.params[model][name] for model in ("target", "draft") for name in mailbox.NAMES]

    before = places(two)
    assert not any(array.is_deleted() for array in before), "donated"
    assert not {*map(id, before)} & {*map(id, places(engines[1]))}, "two engines have the same"
    two.runner.renew()
    assert not {*map(id, before)} & {*map(id, places(two))}, "a renewed runner must not go on in the middle"
    monkeypatch.setattr(runner, "mailboxes", lambda *_, **__: {})
    two.runner.renew()
    assert not {*mailbox.NAMES} & two.runner.params["target"].keys(), "mailboxes of before"


def test_lost_sums_are_computed_again(monkeypatch, caplog):
    """Mailboxes are renewed once in vain, then the requests end. An engine works again with mailboxes that work."""

    def op(*arrays, mailbox, **options):
        lost = lax.psum((mailbox[0][:MAX_ROWS] < 0).any().astype(jnp.int32), options["sum_over"]) > 0
        return jax.tree.map(lambda x: jnp.where(lost, jnp.nan, x).astype(x.dtype), real(*arrays, **options))

    def next_mailboxes(*arguments, **sizes):
        made.append(bool(lost) and lost.pop(0))
        return mailboxes(*arguments, **sizes, lost=made[-1])

    real, expected = gated.op, plain(PROMPTS, GREEDY)
    made, lost = [], [True]
    monkeypatch.setattr(gated, "op", op)
    monkeypatch.setattr(runner, "mailboxes", next_mailboxes)
    engine = new_engine(tensor_parallel_size=2)
    first = serve(engine, PROMPTS, GREEDY, rounds=4)
    assert (texts(first), {request.error for request in first}) == (expected, {None})
    assert made == [True, False]
    assert caplog.messages == ["partial sums of two GPUs were lost: the requests of this launch are computed again"]
    lost[:] = True, True
    engine.runner.renew()
    for request in serve(engine, PROMPTS, GREEDY, rounds=4):
        assert (request.finish_reason, request.error) == ("error", f"RuntimeError: {mailbox.LOST}")
    assert "JAXSPEC_PEER_SUMS=0" in mailbox.LOST
    assert texts(serve(engine, PROMPTS, GREEDY, rounds=4)) == expected
    assert made == [True, False, True, True, False]
