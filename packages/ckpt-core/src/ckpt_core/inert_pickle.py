"""Read a pickle without running it.

The pickles inside checkpoints describe plain data. This interpreter knows the opcodes that
such data needs and builds inert values from them: no class is imported, no callable of
another module is ever called, and a global that is not on the caller's allow-list ends the
reading. `pickle.Unpickler` with a `find_class` hook is not enough: written in C, it can be
made to allocate gigabytes by one memo index, or to overflow the stack by hashing a deeply
nested tuple. Here work and memory are linear in the bytes read.

Protocols 2 to 5 are covered, as far as torch uses them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckpt_core.errors import CorruptCheckpointError, UnsafePickleError

Construct = Callable[[tuple[object, ...]], object]
"""What stands for calling an allowed global: arguments in, inert value out."""

_UNSET = object()
_STOP = ord(".")
_MEMOIZE = 0x94
_BINGET = ord("h")
_LONG_BINGET = ord("j")
_BININT1 = ord("K")
_MARK = ord("(")
_EMPTY_TUPLE = ord(")")
_TUPLE1 = 0x85
_TUPLE2 = 0x86
_EMPTY_DICT = ord("}")


@dataclass(slots=True, eq=False)
class Record:
    """An instance, or the result of a call, that the pickle asks for: its name, arguments and state."""

    name: str
    args: tuple[object, ...]
    state: object = None


_KEY_TYPES = frozenset({str, int, Record})
"""A record hashes by identity; a tuple would be hashed through and through, however deep it is."""


@dataclass(frozen=True, slots=True)
class Global:
    """An allowed class, function or constant that the pickle names."""

    name: str
    construct: Construct


class ForbiddenCallError(ValueError):
    """Raised by a `Construct` for arguments that only an attacker would give."""


def allow_records(*names: str) -> dict[str, Construct]:
    """Allow `names` (dotted: module and attribute); calling one gives a `Record`."""

    def record(name: str) -> Construct:
        return lambda args: Record(name, args)

    return {name: record(name) for name in names}


def make_empty_dict(args: tuple[object, ...]) -> object:
    """Stand for `dict()` and `OrderedDict()`, which pickles fill afterwards."""
    if args:
        raise ValueError("a dict made from arguments")
    return {}


def refuse_call(_args: tuple[object, ...]) -> object:
    """Stand for what is named but never called, such as a dtype."""
    raise ValueError("a constant is called")


def load_pickle(
    data: bytes,
    allowed: Mapping[str, Construct],
    *,
    source: str,
    resolve_id: Callable[[object], object] | None = None,
) -> object:
    """Build the value that `data` describes, out of builtin values, `Global` and `Record`.

    Args:
        data: The pickle; bytes after its end are ignored.
        allowed: Dotted names the pickle may refer to, and what calling each one gives.
        source: What to call the pickle in errors: a path.
        resolve_id: Gives the value of a persistent id; without it there may be none.

    Raises:
        UnsafePickleError: A global outside `allowed`, or an opcode that gets at classes another way.
        CorruptCheckpointError: The pickle is truncated or malformed.
    """
    machine = _Machine(data, allowed, source, resolve_id)
    try:
        return machine.run()
    except ForbiddenCallError as err:
        raise machine.refuse_unsafe(str(err)) from err
    except (IndexError, TypeError, ValueError, OverflowError, struct.error) as err:
        msg = f"{source}: expected a complete pickle, found damage near byte {machine.pos} of {len(data)}: {err}"
        raise CorruptCheckpointError(msg) from err


class _Machine:
    """The stack, the marks and the memo of one reading."""

    __slots__ = ("allowed", "data", "globals", "marks", "memo", "pos", "resolve_id", "source", "stack")

    def __init__(
        self,
        data: bytes,
        allowed: Mapping[str, Construct],
        source: str,
        resolve_id: Callable[[object], object] | None,
    ) -> None:
        self.data = data
        self.pos = 0
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: list[object] = []
        self.allowed = allowed
        self.globals: dict[str, Global] = {}
        self.source = source
        self.resolve_id = resolve_id

    def run(self) -> object:  # noqa: C901  the frequent opcodes in line are three times as fast as calls
        data, stack, memo, pos = self.data, self.stack, self.memo, 0
        while (opcode := data[pos]) != _STOP:
            pos += 1
            # In order of frequency in a .metadata; these are three quarters of it.
            if opcode == _MEMOIZE:
                memo.append(stack[-1])
            elif opcode == _BINGET:
                stack.append(memo[data[pos]])
                pos += 1
            elif opcode == _LONG_BINGET:
                stack.append(memo[int.from_bytes(data[pos : pos + 4], "little")])
                pos += 4
            elif opcode == _BININT1:
                stack.append(data[pos])
                pos += 1
            elif opcode == _MARK:
                self.marks.append(len(stack))
            elif opcode == _EMPTY_TUPLE:
                stack.append(())
            elif opcode == _TUPLE1:
                stack[-1] = (stack[-1],)
            elif opcode == _EMPTY_DICT:
                stack.append({})
            elif opcode == _TUPLE2:
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            else:
                self.pos = pos
                _HANDLERS.get(opcode, _Machine.refuse_opcode)(self)
                pos = self.pos
        return stack[-1]

    def refuse_unsafe(self, found: str) -> UnsafePickleError:
        return UnsafePickleError(
            f"{self.source}: expected only the data that describe a checkpoint, found {found};"
            " nothing was executed. Do not trust where this file comes from"
        )

    def refuse_opcode(self) -> None:
        opcode = self.data[self.pos - 1]
        if opcode in _FORBIDDEN:
            found = f"the pickle opcode {_FORBIDDEN[opcode]} at byte {self.pos - 1}"
            raise self.refuse_unsafe(found)
        msg = f"{opcode:#04x} is no opcode that a checkpoint needs"
        raise ValueError(msg)

    # Reading bytes

    def _take(self, count: int) -> bytes:
        start = self.pos
        end = start + count
        if end > len(self.data):
            msg = f"{count} bytes announced, {len(self.data) - start} left"
            raise ValueError(msg)
        self.pos = end
        return self.data[start:end]

    def _take_uint(self, count: int) -> int:
        return int.from_bytes(self._take(count), "little")

    def _take_line(self) -> str:
        end = self.data.index(b"\n", self.pos)
        return self._take(end + 1 - self.pos)[:-1].decode()

    # Constants

    def none(self) -> None:
        self.stack.append(None)

    def true(self) -> None:
        self.stack.append(True)

    def false(self) -> None:
        self.stack.append(False)

    def int2(self) -> None:
        self.stack.append(self._take_uint(2))

    def int4(self) -> None:
        self.stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def long1(self) -> None:
        self.stack.append(int.from_bytes(self._take(self._take_uint(1)), "little", signed=True))

    def float8(self) -> None:
        self.stack.append(struct.unpack(">d", self._take(8))[0])

    def str1(self) -> None:
        self.stack.append(self._take(self._take_uint(1)).decode())

    def str4(self) -> None:
        self.stack.append(self._take(self._take_uint(4)).decode())

    def str8(self) -> None:
        self.stack.append(self._take(self._take_uint(8)).decode())

    def bytes1(self) -> None:
        self.stack.append(self._take(self._take_uint(1)))

    def bytes4(self) -> None:
        self.stack.append(self._take(self._take_uint(4)))

    def bytes8(self) -> None:
        self.stack.append(self._take(self._take_uint(8)))

    # Containers

    def _pop_to_mark(self) -> list[object]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def tuple3(self) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def tuple_from_mark(self) -> None:
        self.stack.append(tuple(self._pop_to_mark()))

    def empty_list(self) -> None:
        self.stack.append([])

    def append(self) -> None:
        item = self.stack.pop()
        self._top_list().append(item)

    def appends(self) -> None:
        items = self._pop_to_mark()
        self._top_list().extend(items)

    def _top_list(self) -> list[object]:
        target = self.stack[-1]
        if not isinstance(target, list):
            msg = f"items appended to {type(target).__name__}"
            raise TypeError(msg)
        return target

    def setitem(self) -> None:
        value = self.stack.pop()
        self._set_items([self.stack.pop(), value])

    def setitems(self) -> None:
        self._set_items(self._pop_to_mark())

    def _set_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            msg = f"items set on {type(target).__name__}"
            raise TypeError(msg)
        keys = items[::2]
        if not _KEY_TYPES.issuperset(map(type, keys)):
            raise TypeError("a dict key that is neither a name nor a record")
        target.update(zip(keys, items[1::2], strict=True))

    # Memo

    def put1(self) -> None:
        self._put(self._take_uint(1))

    def put4(self) -> None:
        self._put(self._take_uint(4))

    def _put(self, index: int) -> None:
        if index > len(self.data):
            msg = f"memo index {index} in a pickle of {len(self.data)} bytes"
            raise ValueError(msg)
        missing = index + 1 - len(self.memo)
        if missing > 0:
            self.memo.extend([_UNSET] * missing)
        self.memo[index] = self.stack[-1]

    # Globals and instances

    def proto(self) -> None:
        self._take(1)

    def frame(self) -> None:
        self._take(8)

    def global_lines(self) -> None:
        module = self._take_line()
        self._push_global(f"{module}.{self._take_line()}")

    def global_from_stack(self) -> None:
        attribute = self.stack.pop()
        module = self.stack.pop()
        if not (isinstance(module, str) and isinstance(attribute, str)):
            msg = "a global is not named by two strings"
            raise TypeError(msg)
        self._push_global(f"{module}.{attribute}")

    def _push_global(self, name: str) -> None:
        if name not in self.globals:
            self.globals[name] = self._find_global(name)
        self.stack.append(self.globals[name])

    def _find_global(self, name: str) -> Global:
        construct = self.allowed.get(name)
        if construct is None:
            found = f"the name {name!r}"
            raise self.refuse_unsafe(found)
        return Global(name, construct)

    def call(self) -> None:
        args = self.stack.pop()
        target = self.stack.pop()
        if not (isinstance(target, Global) and isinstance(args, tuple)):
            msg = f"{type(target).__name__} called with {type(args).__name__}"
            raise TypeError(msg)
        self.stack.append(target.construct(args))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, dict):  # an OrderedDict may carry attributes; they are no items
            msg = f"state given to {type(target).__name__}"
            raise TypeError(msg)

    def persistent_id(self) -> None:
        if self.resolve_id is None:
            msg = "a persistent id, of which there are none here"
            raise ValueError(msg)
        self.stack.append(self.resolve_id(self.stack.pop()))


_HANDLERS: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine.proto,
    0x95: _Machine.frame,
    ord("N"): _Machine.none,
    0x88: _Machine.true,
    0x89: _Machine.false,
    ord("M"): _Machine.int2,
    ord("J"): _Machine.int4,
    0x8A: _Machine.long1,
    ord("G"): _Machine.float8,
    0x8C: _Machine.str1,
    ord("X"): _Machine.str4,
    0x8D: _Machine.str8,
    ord("C"): _Machine.bytes1,
    ord("B"): _Machine.bytes4,
    0x8E: _Machine.bytes8,
    0x87: _Machine.tuple3,
    ord("t"): _Machine.tuple_from_mark,
    ord("]"): _Machine.empty_list,
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("s"): _Machine.setitem,
    ord("u"): _Machine.setitems,
    ord("q"): _Machine.put1,
    ord("r"): _Machine.put4,
    ord("c"): _Machine.global_lines,
    0x93: _Machine.global_from_stack,
    ord("R"): _Machine.call,
    0x81: _Machine.call,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent_id,
}
"""Opcode -> what it does; the names of the opcodes are in the standard library's pickletools."""

_FORBIDDEN = {
    ord("i"): "INST",
    ord("o"): "OBJ",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    0x92: "NEWOBJ_EX",
}
