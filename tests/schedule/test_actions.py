from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorselike.schedule import Action, Kind, format_actions, parse_action, parse_actions

_numbers = st.integers(0, 10**6)
_optional = st.none() | _numbers
_plain = (st.sampled_from(list(Kind)), _optional, _optional)
_with_rows = (*_plain, _numbers, _numbers, _numbers)
_actions = st.one_of(
    st.tuples(*fields).map(lambda fields: Action(*fields))
    for fields in (_plain, _with_rows, (*_with_rows, st.tuples(_numbers, _numbers)))
)


@given(_actions)
def test_parser_is_the_inverse_of_the_text(action: Action) -> None:
    assert parse_action(action.text) == action
    assert parse_action(f"  {action} ") == action


_NUMBER = "(0|[1-9][0-9]{0,3})?"


@given(st.from_regex(rf"{_NUMBER}(F|B|STEP|TIE_GRAD|RECV_F){_NUMBER}(@7\[3:5(,0:1024)?\])?", fullmatch=True))
def test_text_is_the_inverse_of_the_parser(text: str) -> None:
    assert parse_action(text).text == text


@given(st.lists(_actions))
def test_lists_on_one_line(actions: list[Action]) -> None:
    assert parse_actions(format_actions(actions)) == actions


@pytest.mark.parametrize(
    "text", ["", "3", "3X0", "0SEND_F2@", "0SEND_F2@4[3]", "0F1@4[3:5,6]", "F0 B0", "-1F0", "3f0", "\u0663F0"]
)
def test_what_is_no_action_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        parse_action(text)
