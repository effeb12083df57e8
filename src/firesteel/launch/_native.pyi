from typing import final

@final
class Launcher:
    def __init__(self, program: int, keep: object, /) -> None: ...
    def run(self, num_tokens: int, stream: int, /, *values: int) -> int: ...
    def resolve(self, num_tokens: int, /) -> int: ...

def launch_floor_ns(
    cu_launch_kernel_address: int,
    function: int,
    threads: int,
    shared_bytes: int,
    params: tuple[int, ...],
    stream: int,
    num_launches: int,
    /,
) -> float: ...
def note_fork() -> None: ...
