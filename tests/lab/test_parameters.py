import ast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UsageError
from lab.parameters import Parameter, Parameters

SIZE = Parameter("response_size", int, "3MiB", "bytes", 1, 2**30, help="body of one response")
SECONDS = Parameter("window_seconds", float, 2, "s", 0.2, 60)
FLAGS = Parameter("flags", str, "none", choices=("none", "coop", "sqpoll"))
DEPTH = Parameter("depth", int, 2, choices=(1, 2, 4))
TRACE = Parameter("trace", bool, False)
ALL = Parameters([SIZE, SECONDS, FLAGS, DEPTH, TRACE])


@pytest.mark.parametrize(
    ("parameter", "given_value", "expected"),
    [
        (SIZE, "4096", 4096), (SIZE, "4KiB", 4096), (SIZE, "4k", 4000), (SIZE, "1.5MiB", 1572864),
        (SIZE, "1M", 10**6), (SIZE, "1_000", 1000), (SIZE, 7.0, 7), (SIZE, np.int64(9), 9),
        (SIZE, "0x10", 16), (SECONDS, "0.5", 0.5), (SECONDS, 1, 1.0), (SECONDS, np.float32(2), 2.0),
        (FLAGS, "coop", "coop"), (DEPTH, "4", 4), (TRACE, "On", True), (TRACE, 0, False),
        (TRACE, np.True_, True),
    ],
)
def test_accepts_and_types(parameter: Parameter, given_value: object, expected: object) -> None:
    value = parameter.check(given_value)
    assert value == expected
    assert type(value) is parameter.kind


@pytest.mark.parametrize(
    ("parameter", "bad"),
    [
        (SIZE, "0"), (SIZE, "2GiB"), (SIZE, "4kB"), (SIZE, "0.3k b"), (SIZE, 1.5), (SIZE, True),
        (SIZE, (1, 2)), (SIZE, [3]), (SIZE, np.array([3])), (SIZE, None), (SIZE, ""),
        (SIZE, 10**400), (SIZE, "1.0001KiB"), (SECONDS, "inf"), (SECONDS, float("nan")),
        (SECONDS, 10**400), (SECONDS, "2KiB"), (SECONDS, "1\n2"), (FLAGS, 3), (DEPTH, 3),
        (TRACE, 2), (TRACE, "perhaps"), (TRACE, 0.5),
    ],
)
def test_refuses_in_one_line(parameter: Parameter, bad: object) -> None:
    with pytest.raises(UsageError) as caught:
        parameter.check(bad)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 250
    assert parameter.name in message
    assert parameter.allowed in message


def test_range_error_names_value_range_and_unit() -> None:
    with pytest.raises(UsageError, match=r"window_seconds=99 .*0\.2 to 60 s"):
        SECONDS.check("99")


def test_unknown_choice_and_name_list_nearest_first() -> None:
    with pytest.raises(UsageError, match="'sqpol'; choose from: sqpoll"):
        FLAGS.check("sqpol")
    with pytest.raises(UsageError, match="'respons_size'; choose from: response_size"):
        ALL.resolve({"respons_size": 1})


def test_a_definition_with_a_refused_default_does_not_load() -> None:
    with pytest.raises(UsageError):
        Parameter("n", int, 11, high=10)
    with pytest.raises(UsageError, match="identifier"):
        Parameter("not-a-name", int, 1)
    with pytest.raises(UsageError, match="twice"):
        Parameters([TRACE, TRACE])


def test_parse_returns_only_what_was_given() -> None:
    assert ALL.parse(["response-size=4KiB", "trace=yes"]) == {"response_size": 4096, "trace": True}
    assert ALL.resolve(ALL.parse([])) == ALL.defaults()


@pytest.mark.parametrize("bad", [["depth"], ["=3"], ["depth=1", "depth=2"], [""]])
def test_parse_refuses(bad: list[str]) -> None:
    with pytest.raises(UsageError):
        ALL.parse(bad)


def test_cell_is_python_that_gives_the_values_back_with_types_and_ranges() -> None:
    text = ALL.as_cell({"depth": 4})
    variables: dict[str, object] = {}
    exec(text, variables)
    assert {name: variables[name] for name in ALL.names()} == ALL.resolve({"depth": 4})
    assert all(isinstance(line, ast.AnnAssign) for line in ast.parse(text).body)
    lines = text.splitlines()
    assert len(lines) == len(ALL)
    assert "# 1 to 1,073,741,824 bytes; body of one response" in lines[0]


def test_table_has_one_row_each_with_default_and_allowed() -> None:
    rows = ALL.as_table()
    assert [row["name"] for row in rows] == ALL.names()
    assert rows[1]["allowed"] == "0.2 to 60 s"
    assert rows[2]["allowed"] == "one of none, coop, sqpoll"


@given(st.integers(1, 2**30))
def test_numbers_survive_the_way_over_text(size: int) -> None:
    assert SIZE.check(str(size)) == SIZE.check(size) == size


@given(st.one_of(st.text(), st.floats(), st.integers(), st.none(), st.lists(st.integers())))
def test_anything_is_either_typed_or_a_usage_error(value: object) -> None:
    for parameter in ALL:
        try:
            typed = parameter.check(value)
        except UsageError:
            continue
        assert type(typed) is parameter.kind
