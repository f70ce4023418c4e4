from __future__ import annotations

import builtins
import collections
import operator
import os
import pickle
import pickletools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, UnsafePickleError
from ckpt_core.inert_pickle import Global, Record, allow_records, load_pickle
from hypothesis import given
from hypothesis import strategies as st

ALLOWED = {**allow_records("fractions.Fraction", "datetime.date"), "collections.OrderedDict": lambda _args: {}}

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=5)
    ),
)


def load(data: bytes) -> object:
    return load_pickle(data, ALLOWED, source="some/.metadata")


@given(value=PLAIN, protocol=st.integers(3, 5))  # protocol 2 has no bytes
def test_plain_data_reads_as_pickle_reads_it(value: object, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol)) == value


@given(value=st.lists(st.text(max_size=3)), protocol=st.integers(2, 5))
def test_shared_objects_stay_shared(value: list[str], protocol: int) -> None:
    found = load(pickle.dumps([value, value], protocol))
    assert isinstance(found, list)
    assert found[0] is found[1]


def test_an_allowed_class_becomes_an_inert_record() -> None:
    data = b"cdatetime\ndate\n(K\x01K\x02K\x03tR}X\x01\x00\x00\x00aK\x05sb."
    record = load(data)
    assert isinstance(record, Record)
    assert (record.name, record.args, record.state) == ("datetime.date", (1, 2, 3), {"a": 5})


def test_an_allowed_name_that_is_not_called_is_a_global() -> None:
    found = load(b"cdatetime\ndate\n.")
    assert isinstance(found, Global)
    assert found.name == "datetime.date"


class Call:
    """Pickles as a call of `function`, as an attacker's object does."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.function = function
        self.arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (Call(os.system, "exit 1"), "system"),
        (Call(builtins.eval, "1"), "eval"),
        (Call(builtins.exec, "x"), "exec"),
        (os.system, "system"),
        (Call(operator.attrgetter, "system"), "operator.attrgetter"),
        (Call(__import__, "os"), "__import__"),
        (Call(subprocess.call, "true"), "call"),
        (Call(pickle.loads, b"."), "pickle.loads"),
        (collections.Counter(), "collections.Counter"),
    ],
)
def test_a_name_outside_the_allow_list_is_refused_by_name(payload: object, named: str, protocol: int) -> None:
    with pytest.raises(UnsafePickleError, match=named) as caught:
        load(pickle.dumps(payload, protocol))
    assert "some/.metadata" in str(caught.value)
    assert "nothing was executed" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"cdatetime\ndate.fromtimestamp\n(K\x01tR.",  # a dotted attribute walks through objects
        b"\x80\x04\x8c\x08datetime\x8c\x0cdate.__class\x93.",
        b"(K\x01idatetime\ndate\n.",  # INST
        b"(cdatetime\ndate\nK\x01o.",  # OBJ
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x04cdatetime\ndate\n)}\x92.",  # NEWOBJ_EX
    ],
)
def test_other_ways_to_classes_are_refused(data: bytes) -> None:
    with pytest.raises(UnsafePickleError, match="nothing was executed"):
        load(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04",
        b".",
        b"N",
        b"K\x01K\x02R.",  # a number is called
        b"K\x01}b.",  # state for a number
        b"X\xff\xff\xff\xffabc.",  # 4 GiB announced
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.",  # 8 EiB announced
        b"B\xff\xff\xff\x7fabc.",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\xffabc.",
        b"\x96\xff\xff\xff\xff\xff\xff\xff\x7fabc.",  # BYTEARRAY8
        b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",  # a frame and nothing in it
        b"Nr\xff\xff\xff\x7f.",  # a memo of 2 billion entries
        b"Nr\xff\xff\xff\xff.",
        b"h\x05.",
        b"j\xff\xff\xff\xff.",
        b"t.",
        b"(u.",
        b"}(K\x01u.",  # a key without value
        b"]}s.",
        b"}]K\x01s.",  # a list as key
        b"X\x02\x00\x00\x00\xff\xfe.",  # no UTF-8
        b"\x93.",
        b"K\x01K\x02\x93.",
        b"X\x01\x00\x00\x00aQ.",  # a persistent id
        b"\x97.",  # NEXT_BUFFER
        b"I1\n.",  # protocol 0
    ],
)
def test_damage_is_one_error_that_names_the_file(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"some/\.metadata"):
        load(data)


@pytest.mark.parametrize("key", [b"(K\x01t", b")" + b"\x85" * 500_000, b")" + b"\x94h\x00\x86\x94" * 3])
def test_a_tuple_is_no_key_however_deep_it_is(key: bytes) -> None:
    """Python's own unpickler overflows the stack when it hashes a tuple nested this deep."""
    with pytest.raises(CorruptCheckpointError, match="key"):
        load(b"}" + key + b"Ns.")


@pytest.mark.parametrize("opcode", [b"\x85", b"]a"])
def test_deep_nesting_is_read_in_linear_time(opcode: bytes) -> None:
    data = (b")" if opcode == b"\x85" else b"") + opcode * 300_000
    if opcode == b"]a":
        data = b"]" * 300_000 + b"a" * 299_999
    assert load(data + b".") is not None


def test_a_list_that_contains_itself_is_read() -> None:
    endless: list[object] = []
    endless.append(endless)
    found = load(pickle.dumps(endless, 2))
    assert isinstance(found, list)
    assert found[0] is found


def test_a_memo_bomb_costs_neither_memory_nor_time() -> None:
    """Thirty levels of a pair that holds the level before twice: a billion leaves if copied or hashed."""
    started = time.perf_counter()
    found = load(b")\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(30)) + b".")
    assert isinstance(found, tuple)
    assert time.perf_counter() - started < 1


@given(data=st.binary(max_size=200))
def test_no_bytes_lead_to_another_exception(data: bytes) -> None:
    try:
        load(data)
    except CheckpointError:
        return
    assert b"." in data


@given(body=st.lists(st.sampled_from([op.code.encode("latin-1") for op in pickletools.opcodes]), max_size=60))
def test_no_sequence_of_opcodes_leads_to_another_exception(body: list[bytes]) -> None:
    try:
        load(b"".join(body) + b"\n\x00\x00\x00\x00\x00\x00\x00\x00.")
    except CheckpointError as err:
        assert "some/.metadata" in str(err)  # noqa: PT017  not raising is as good


def test_nothing_is_imported_for_a_name_that_is_refused(tmp_path: Path) -> None:
    (tmp_path / "booby.py").write_text("raise SystemExit('imported')")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(UnsafePickleError, match=r"booby\.trap"):
            load(b"cbooby\ntrap\n.")
    finally:
        sys.path.remove(str(tmp_path))
    assert "booby" not in sys.modules
