"""Where a compiled kernel writes: its integer arithmetic, read from Triton's IR and done again in the IR's widths.

For kernels that no interpreter takes and whose addresses pass what fits in memory here.
"""

import re

import numpy as np

_LINE = re.compile(r"^ *(?:%(\w+) = )?(\S+)\b(.*?)(?: loc\(.*)?$")
_ARITHMETIC = {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    # Of numbers that are not negative, rounding is the same down and toward zero.
    "arith.divsi": np.floor_divide,
    "arith.remsi": np.remainder,
}


def stored_offsets(ttgir, *, program, **arguments):
    """Offset of each element of the kernel's only `tt.store` from the pointer argument it writes to.

    Args:
        ttgir: a kernel without control flow before the store's address is known.
        program: its program id.
        arguments: the scalars it is called with, 32-bit integers.
    """
    values = {name: np.int32(value) for name, value in arguments.items()}
    for line in ttgir.splitlines():
        name, operation, rest = _LINE.match(line).groups() if _LINE.match(line) else (None, "", "")
        operands = [values.get(operand) for operand in re.findall(r"%(\w+)", rest)]
        dtype = np.int64 if re.search(r"(i64|xi64\S*)$", rest.strip()) else np.int32
        if operation == "tt.store":
            return operands[0]
        if operation == "arith.constant" and (constant := re.search(r" (?:dense<)?(-?\d+)>? :", rest)):
            values[name] = dtype(int(constant[1]))
        elif operation == "tt.get_program_id":
            values[name] = np.int32(program)
        elif operation == "tt.make_range":
            values[name] = np.arange(int(re.search(r"end = (\d+)", rest)[1]), dtype=np.int32)
        elif operation == "tt.addptr":
            base, offset = operands
            values[name] = np.asarray(offset, np.int64) + (0 if base is None else base)
        elif any(operand is None for operand in operands):
            continue  # a float or what is made of floats
        elif operation in _ARITHMETIC:
            with np.errstate(over="ignore"):
                values[name] = _ARITHMETIC[operation](*operands)
        elif operation == "arith.extsi":
            values[name] = operands[0].astype(np.int64)
        elif operation == "tt.expand_dims":
            values[name] = np.expand_dims(operands[0], int(re.search(r"axis = (\d)", rest)[1]))
        elif operation in ("tt.splat", "tt.broadcast", "ttg.convert_layout"):
            values[name] = operands[0]  # numpy broadcasts by itself
    raise AssertionError("the kernel stores nothing")
