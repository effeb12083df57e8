"""A stub driver with functions, and plans for a Runner to run on it."""

import ctypes
from array import array
from dataclasses import dataclass

from firesteel.launch.runner import runner_class
from firesteel.launch.stub import StubDriver

NUM_FUNCTIONS = 4
MAX_PARAMS = 64
UINT64 = 2**64
CONSTANT, CALL, ROW = range(3)
# Launch attributes (id, value) of each value of flags: cooperative is 2, programmatic 6.
ATTRIBUTES = {0: (), 1: ((6, 1),), 2: ((2, 1),), 3: ((2, 1), (6, 1))}
STREAM, OTHER_STREAM = 0x7000, 0x8000
OUT_OF_MEMORY = 2


class Stage:
    """A stub driver with a few functions loaded."""

    def __init__(self):
        self.driver = StubDriver.open()
        self.driver.reset()
        self.context = self.driver.context(0)
        self.functions = tuple(
            self.driver.load(self.context, b"cubin", f"f{i}", shared_bytes=0).handle
            for i in range(NUM_FUNCTIONS)
        )
        self.driver.reset()

    def runner(self, kind, plan, *, owner=0, held=(), **changes):
        """A Runner of `plan`; `owner` is the cell of its arena, 0 for none."""
        arguments = {
            "driver_addresses": self.driver.runner_addresses,
            "context": self.context,
            "max_tokens": len(plan.index) - 1,
            "index": plan.index.buffer_info()[0],
            "rows": plan.rows.buffer_info()[0],
            "sequences": plan.sequences,
            "num_values": plan.num_values,
            "owner": owner if isinstance(owner, int) else owner.buffer_info()[0],
            "keep": (plan.index, plan.rows, owner, *held),
        }
        return runner_class(kind)(**{**arguments, **changes})

    def expect_params(self, function, num_params):
        self.driver.expect_params(function, num_params)

    def push(self, context):
        """Makes a context current, as a host program does."""
        function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        assert function(self.driver.addresses["cuCtxPushCurrent_v2"])(context) == 0

    def current(self):
        function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        context = ctypes.c_void_p()
        address = ctypes.addressof(context)
        assert function(self.driver.addresses["cuCtxGetCurrent"])(address) == 0
        return context.value


def arena_cell(owner=-1):
    """What an arena shares with its Runners: the stream that owns it, and a lock."""
    return array("q", [owner, 0])


@dataclass
class Plan:
    """The tables of a Runner, and the same in Python's types: `chosen[m]` is (sequence, rows)."""

    sequences: tuple
    num_values: int
    chosen: dict

    def __post_init__(self):
        self.index = array("i", [-1] * (max(self.chosen) + 1))
        self.rows = array("q", [])
        for num_tokens, (sequence, launches) in self.chosen.items():
            self.index[num_tokens] = len(self.rows)
            self.rows.append(sequence)
            for grid, integers in launches:
                self.rows.extend((*grid, *integers))

    @property
    def row_counts(self):
        """What `check_tables` needs of the sequences."""
        return [[num_row_values(launch) for launch in launches] for launches in self.sequences]

    def expected(self, num_tokens, values):
        """What the driver must see: (function, grid, threads, shared, attributes, params)."""
        sequence, rows = self.chosen[num_tokens]
        for launch, (grid, integers) in zip(self.sequences[sequence], rows, strict=True):
            function, threads, shared_bytes, flags, params = launch
            sources = {CONSTANT: None, CALL: values, ROW: integers}
            if 0 in grid:
                continue
            yield (
                function,
                grid,
                (threads, 1, 1),
                shared_bytes,
                ATTRIBUTES[flags],
                tuple(
                    (value if source == CONSTANT else sources[source][value]) % UINT64
                    for source, value in params
                ),
            )


def num_row_values(launch):
    return max((value + 1 for source, value in launch[4] if source == ROW), default=0)


def simple_plan(stage, *, num_launches=1, num_values=1, max_tokens=4):
    """One sequence: launch i of grid (i + 1, 1, 1) passes call value 0 and the number of tokens."""
    params = ((CALL, 0), (ROW, 0)) if num_values else ((ROW, 0),)
    launches = tuple((stage.functions[i], 128, 0, 0, params) for i in range(num_launches))
    for function in stage.functions[:num_launches]:
        stage.expect_params(function, len(params))
    chosen = {
        m: (0, [((i + 1, 1, 1), (m,)) for i in range(num_launches)])
        for m in range(1, max_tokens + 1)
    }
    return Plan((launches,), num_values, chosen)
