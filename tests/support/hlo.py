"""Reading an optimised program: what its loop computes, moves and sends."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator

COMPUTATION = re.compile(r"(ENTRY )?%(\S+) \(.*\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.*?) ([\w\-]+)\(")
ARRAY = re.compile(r"\w+\[([\d,]*)\](\{[^}]*\})?")
CALLED = re.compile(r"(?:body|condition|to_apply|branch_computations|\w+_computation)=(\{[^}]*\}|%[\w.\-]+)")

NAMES = ("parameter", "tuple", "get-tuple-element", "bitcast", "while")  # these say what something is called
PREFETCHES = ("copy-start", "copy-done", "slice-start", "slice-done")  # asynchronous moves
VMEM = "S(1)"
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    result: str  # its type, that of all parts where it is a tuple
    opcode: str
    line: str

    @property
    def sizes(self) -> list[int]:
        """Elements of the result's arrays."""
        return [math.prod(map(int, filter(None, dims.split(",")))) for dims, _ in ARRAY.findall(self.result)]

    @property
    def is_prefetch(self) -> bool:
        """Brings something into VMEM as it is."""
        if self.opcode == "custom-call":
            return 'custom_call_target="ConcatBitcast"' in self.line  # what came in slices, seen as one
        parts = self.result.split("}, ")
        moved = parts[0 if self.opcode == "copy-start" else -2 if self.opcode == "slice-start" else -1]
        return self.opcode in PREFETCHES and VMEM in moved

    @property
    def is_scatter(self) -> bool:
        return self.opcode == "fusion" and self.name.startswith("scatter_fusion")

    def is_kernel(self, name: str) -> bool:
        return self.name.startswith(name) and 'custom_call_target="tpu_custom_call"' in self.line


class Program:
    """The computations of an optimised program, by name."""

    def __init__(self, text: str) -> None:
        self.text, self.computations = text, {}
        for line in text.splitlines():
            if header := COMPUTATION.match(line):
                current = self.computations[header[2]] = []
                if header[1]:
                    self.entry = current
            elif found := INSTRUCTION.match(line):
                current.append(Instruction(*found.groups(), line))

    def within(self, instructions: Iterable[Instruction]) -> Iterator[Instruction]:
        """These and those of the loops and branches among them; a fusion is one instruction."""
        for instruction in instructions:
            yield instruction
            if instruction.opcode in ("while", "conditional", "call"):
                for name in re.findall(r"%([\w.\-]+)", " ".join(CALLED.findall(instruction.line))):
                    yield from self.within(self.computations[name])

    @property
    def all(self) -> list[Instruction]:
        return list(self.within(self.entry))

    @property
    def loop(self) -> list[Instruction]:
        """The body of the one loop of the program's entry, over rounds."""
        (loop,) = [i for i in self.entry if i.opcode == "while"]
        return list(self.within([loop]))[1:]

    def dynamic_slices(self, least: int) -> list[int]:
        """Elements of the arrays, at least so many, of which a dynamic slice is taken, in fusions too."""
        found = []
        for instructions in self.computations.values():
            slices = [i for i in instructions if i.opcode == "dynamic-slice"]
            sizes = {i.name: max(i.sizes, default=0) for i in instructions} if slices else {}
            operand = lambda i: re.search(r"dynamic-slice\(%([^,)\s]+)", i.line)[1]
            found += [sizes[operand(i)] for i in slices if sizes[operand(i)] >= least]
        return found


def kernels(instructions: Iterable[Instruction], name: str) -> int:
    """Calls of the Pallas kernel `name`."""
    return sum(i.is_kernel(name) for i in instructions)


def collectives(instructions: Iterable[Instruction]) -> Counter[str]:
    """Arrays sent in each way: the compiler joins several into one instruction."""
    count: Counter[str] = Counter()
    for instruction in instructions:
        name = instruction.opcode.removesuffix("-start")
        if name in COLLECTIVES:
            count[name] += len(instruction.sizes)
    return count


def made(instructions: Iterable[Instruction], sizes: set[int], *, prefetched: bool) -> list[str]:
    """What makes or moves an array of one of these sizes: writing keys and values in place does not, nor features (a
    scatter, in place where the program's temporary memory has no room for another array), nor, where it may be
    prefetched, bringing it into VMEM."""
    return [
        i.line.strip()[:200]
        for i in instructions
        if i.opcode not in NAMES and sizes & set(i.sizes) and not i.is_scatter
        if not (i.is_kernel("kv_write") or i.is_kernel("scale_write"))
        if not (prefetched and i.is_prefetch)
    ]
