import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firesteel.cli.auditing import Usage, read_traffic, read_usage
from firesteel.cli.planning import PlanChoice, make_plans, make_specs
from firesteel.errors import InvalidArgumentError
from firesteel.launch import LaunchKey, plan, replay
from firesteel.moe.spec import geometry
from tests.cli.command import assert_error, invoke
from tests.launch.gather_rows import GatherRows
from tests.moe.tiles import FIXED, FIXED_FILE

SEED = ("--model", "glm-5.2", "--tp", 4, "--table", FIXED_FILE, "--max-tokens", 64)
LAYER = replace(geometry("glm-5.2", tensor_parallel=4), table=FIXED)
A = LaunchKey("m.a", (), (("B", 1),))
B = LaunchKey("m.a", (), (("B", 2),))
C = LaunchKey("m.c", (), ())


@pytest.fixture
def put(tmp_path):
    """Writes a file: text as it is, anything else as JSON."""

    def write(name: str, content: object):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def audit(*arguments: object) -> tuple[int, dict]:
    result = invoke("audit", *arguments, "--json")
    (line,) = result.stdout.splitlines()
    return result.exit_code, json.loads(line)


def entry(key: LaunchKey, *spans: list[int]) -> dict:
    return {**key.as_dict(), "tokens": list(spans)}


def test_traffic_that_reaches_every_key_passes(put):
    traffic = put("t.txt", "# start\n1\n5 # packed\n\n  64\n")
    code, found = audit(*SEED, "--ids", "int32", "--traffic", traffic)
    keys = plan(LAYER, 64, flags={"ids": ["i32"]}).keys
    assert (code, found["passed"], found["planned"], found["calls"]) == (0, True, len(keys), 3)
    assert found["reached"] == [str(key) for key in keys]
    assert found["prewarmed"] == len(keys)
    assert found["misses"] == found["too_long"] == found["never_reached_numbers"] == []
    by_kernel: Counter[str] = Counter()
    for counted in found["launches_by_key"]:
        by_kernel[counted["kernel"].rpartition(".")[2]] += counted["launches"]
    gate_up, down = "gate_up_stream_kernel", "down_stream_kernel"
    # One direct call and two packed ones.
    direct = Counter({gate_up: 1, "activate_kernel": 1, down: 1, "combine_kernel": 1})
    packed = Counter({"place_kernel": 2, gate_up: 2, down: 2, "combine_kernel": 2})
    assert by_kernel == direct + packed
    assert found["launches"] == by_kernel.total()


def test_a_call_reaches_the_keys_of_every_type_of_ids(put):
    traffic = put("t.json", [1, 64])
    code, found = audit(*SEED, "--traffic", traffic)
    keys = plan(LAYER, 64).keys
    assert len(keys) > len(plan(LAYER, 64, flags={"ids": ["i32"]}).keys)
    assert (code, found["planned"]) == (0, len(keys))
    assert set(found["reached"]) == {str(key) for key in keys}


def test_keys_that_are_never_reached_have_the_numbers_of_the_plan(put):
    result = invoke("audit", *SEED, "--ids", "int32", "--traffic", put("t.txt", "64\n64\n"))
    assert result.exit_code == 0
    made = plan(LAYER, 64, flags={"ids": ["i32"]})
    direct = [n for n, key in enumerate(made.keys) if made.ranges()[key] == [(1, 4)]]
    names = {made.keys[number].name for number in direct}
    assert names == {"gate_up_stream_kernel", "activate_kernel", "down_stream_kernel"}
    lines = result.stdout.splitlines()
    head = f"never reached    {len(direct)} keys: {', '.join(map(str, direct))}"
    assert head in [line.rstrip() for line in lines]
    assert "traffic          2 calls of 1 token count" in result.stdout
    # In the head, and beside each of them.
    marked = [line.split()[0] for line in lines if line.rstrip().endswith("never reached")]
    assert marked == [str(number) for number in direct]
    assert result.stdout.count("never reached") == 1 + len(direct)


def test_counts_beyond_the_plan_fail(put):
    traffic = put("t.txt", "64\n65\n65\n4000\n")
    result = invoke("audit", *SEED, "--traffic", traffic)
    assert result.exit_code == 1
    assert "65 (2 calls), 4000 (1 call)" in result.stdout
    code, found = audit(*SEED, "--traffic", traffic)
    assert (code, found["passed"], found["too_long"]) == (1, False, [65, 4000])


def test_a_warm_up_of_too_few_keys_misses(put):
    made = plan(LAYER, 64, flags={"ids": ["i32"]})
    some = [key.as_dict() for key in made.keys if key.name != "combine_kernel"]
    options = ("--ids", "int32", "--traffic", put("t.txt", "1\n64\n64"))
    code, found = audit(*SEED, *options, "--prewarmed", put("keys.json", some))
    assert len(some) == len(made.keys) - 1
    assert (code, found["prewarmed"], found["planned"]) == (1, len(some), len(made.keys))
    (miss,) = found["misses"]
    assert miss["asked"] == "1 tokens"
    assert miss["key"]["kernel"].endswith("combine_kernel")


def test_a_miss_names_the_fields_that_differ(put):
    plan_file = put("plan.json", {"max_tokens": 9, "keys": [entry(A, [1, 4]), entry(B, [5, 9])]})
    arguments = ("--plan", plan_file, "--prewarmed", put("keys.json", [A.as_dict(), C.as_dict()]))
    result = invoke("audit", *arguments, "--traffic", put("t.txt", "1\n6\n6\n7\n"))
    assert result.exit_code == 1
    last = " ".join(result.stdout.splitlines()[-1].split())
    assert last == "6 tokens a 3 B: 2, nearest has 1"
    assert "misses           1 key, 3 launches" in result.stdout
    # A is reached, C is not.
    assert "never reached    1 key: 1" in result.stdout


def test_a_warm_up_of_nothing(put):
    plan_file = put("plan.json", {"max_tokens": 9, "keys": [entry(A, [1, 9])]})
    arguments = ("--plan", plan_file, "--prewarmed", put("keys.json", []))
    result = invoke("audit", *arguments, "--traffic", put("t.txt", "1"))
    assert result.exit_code == 1
    assert "no key was prewarmed" in result.stdout


def test_names_of_another_library_are_printed_as_they_are(put):
    ours = LaunchKey("m.a[bold]b[/no]", (), (("TILE", "[64]"),))
    theirs = LaunchKey("m.a[bold]b[/no]", (), (("TILE", ":smile:"),))
    value = {"title": "x [red]", "max_tokens": 9, "keys": [entry(ours, [1, 9])]}
    plan_file = put("plan.json", value)
    arguments = ("--plan", plan_file, "--prewarmed", put("keys.json", [theirs.as_dict()]))
    shown = invoke("audit", *arguments, "--traffic", put("t.txt", "1")).stdout
    assert "x [red], 0..9 tokens" in shown
    assert "a[bold]b[/no]" in shown
    assert "TILE: '[64]', nearest has ':smile:'" in shown


def test_the_json_of_plan_is_a_plan_file(put):
    printed = invoke("plan", *SEED, "--json").stdout
    traffic = put("t.txt", "0\n1\n40\n65")
    code, found = audit("--plan", put("plan.json", printed), "--traffic", traffic)
    assert (code, found) == audit(*SEED, "--traffic", traffic)


def test_traffic_may_be_in_several_files(put):
    first, second = put("a.txt", "1\n2"), put("b.json", [64])
    _, found = audit(*SEED, "--traffic", first, "--traffic", second)
    assert found["calls"] == 3


def test_usage_is_what_the_plan_resolves():
    choice = PlanChoice(model="glm-5.2", tp=4, max_tokens=500)
    plans = make_plans(choice, make_specs(choice))
    usage = Usage.of(plans)
    (made,) = plans
    for num_tokens in range(501):
        assert Counter(usage.used(num_tokens)) == made.used(num_tokens)
    both = Usage.of((made, made))
    assert Counter(both.used(77)) == made.used(77) + made.used(77)
    assert both.keys == usage.keys == made.keys


def test_launches_of_a_call_are_counted_as_replay_counts_them(put, monkeypatch):
    """A key that a call launches twice, and an empty grid: the same from a plan and its file."""

    class Twice(GatherRows):
        def select(self, num_tokens, flags):
            gather, combine = super().select(num_tokens, flags)
            return (gather, combine, combine) if num_tokens > 20 else (gather, combine)

    made = plan(Twice(), 40)
    counts = [0, 3, 21, 21, 40]
    found = replay(made, counts).as_dict()
    assert sum(n["launches"] for n in found["launches_by_key"]) == found["launches"] == 15
    plan_file, traffic = put("plan.json", json.dumps(made.as_dict())), put("t.json", counts)
    _, printed = audit("--plan", plan_file, "--traffic", traffic)
    assert {name: printed[name] for name in found} == found
    monkeypatch.setattr("firesteel.cli.auditing.make_specs", lambda choice: ())
    monkeypatch.setattr("firesteel.cli.auditing.make_plans", lambda choice, specs: (made,))
    _, printed = audit("--traffic", traffic)
    assert {name: printed[name] for name in found} == found


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), min_size=1))
def test_ranges_in_any_order_and_overlapping(found: list[tuple[int, int]]):
    spans = [(first, first + more) for first, more in found]
    covered = {n for first, last in spans for n in range(first, last + 1)}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"max_tokens": 40, "keys": [entry(A, *map(list, spans))]}, file)
        file.flush()
        usage = read_usage(Path(file.name))
    assert {n for n in range(41) if list(usage.used(n)) == [A]} == covered


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.txt", "1\n2\nx # y\n", ":3: got 'x', must be a token count"),
        ("t.txt", "1\n-2\n", ":2: got '-2'"),
        ("t.txt", "1 2\n", ":1: got '1 2'"),
        ("t.txt", "1.5\n", ":1: got '1.5'"),
        ("t.txt", "٣\n", ":1: got '٣'"),
        ("t.txt", "9" * 5000, ":1: got '999"),
        ("t.txt", "# nothing\n", "holds no token count"),
        ("t.txt", "", "holds no token count"),
        ("t.json", "[]", "holds no token count"),
        ("t.json", "[1, true]", "entry 1 is True"),
        ("t.json", '[1, "2"]', "entry 1 is '2'"),
        ("t.json", "[1, -3]", "entry 1 is -3"),
        ("t.json", "[1,\n 2", "not JSON"),
        ("t.json", "[" * 100_000, "not JSON"),
    ],
)
def test_traffic_that_is_none(put, name: str, content: str, words: str):
    path = put(name, content)
    with pytest.raises(InvalidArgumentError) as caught:
        read_traffic(path)
    assert str(caught.value).startswith(str(path))
    assert words in str(caught.value)


def test_a_broken_line_of_json_is_numbered(put):
    path = put("t.json", "[1,\n 2,\n oops]")
    assert_error(invoke("audit", *SEED, "--traffic", path), "t.json", "line 3")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "max_tokens and keys"),
        ([], "max_tokens and keys"),
        ({"max_tokens": -1, "keys": []}, "max_tokens is -1"),
        ({"max_tokens": "9", "keys": []}, "max_tokens is '9'"),
        ({"max_tokens": 9, "keys": {}}, "keys is {}"),
        ({"max_tokens": 9, "keys": [1]}, "key 0 is 1, must be an object"),
        ({"max_tokens": 9, "keys": [A.as_dict()]}, "key 0: tokens is None"),
        ({"max_tokens": 9, "keys": [entry(A, [1, 10])]}, "within 0..9"),
        ({"max_tokens": 9, "keys": [entry(A, [3, 2])]}, "within 0..9"),
        ({"max_tokens": 9, "keys": [entry(A, [3, 4, 0])]}, "within 0..9"),
        ({"max_tokens": 9, "keys": [entry(A, [3, 4, 10**9])]}, "up to 1000"),
        ({"max_tokens": 9, "keys": [entry(A), {"kernel": "x"}]}, "key 1: key: got"),
        (
            {"max_tokens": 9, "keys": [{**entry(A), "constexprs": {"B": [1]}}]},
            "key 0: ",
        ),
        ({"max_tokens": 9, "keys": [{**entry(A), "what": 1}]}, "unknown fields ['what']"),
        ("{", "not JSON"),
    ],
)
def test_a_plan_file_that_is_none(put, content: object, words: str):
    path = put("plan.json", content)
    assert_error(invoke("audit", "--plan", path, "--traffic", put("t.txt", "1")), str(path), words)


@pytest.mark.parametrize(
    ("content", "words"), [({}, "must be a list"), ([3], "key 0 is 3"), ([{}], "key 0: ")]
)
def test_a_list_of_keys_that_is_none(put, content: object, words: str):
    path = put("keys.json", content)
    traffic = put("t.txt", "1")
    assert_error(invoke("audit", *SEED, "--traffic", traffic, "--prewarmed", path), words)


def test_one_plan_must_be_given(put):
    traffic, plan_file = put("t.txt", "1"), put("plan.json", {"max_tokens": 9, "keys": []})
    assert_error(invoke("audit", "--traffic", traffic), "got neither, must be exactly one")
    given_both = invoke("audit", *SEED, "--plan", plan_file, "--traffic", traffic)
    assert_error(given_both, "--plan", "must be alone")
    assert_error(invoke("audit", *SEED), "--traffic")
    assert_error(invoke("audit", *SEED, "--traffic", traffic.parent / "no"), "cannot be read")


def test_help_says_what_the_exit_code_means():
    words = " ".join(invoke("audit", "--help").stdout.split())
    assert "Exits with 0 when no launch misses" in words
