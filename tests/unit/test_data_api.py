"""States of a data source: global streams resume on any number of replicas, other states on the same number."""

import pytest

from dit.data_api import check_resumed_streams, merge_states
from dit.errors import ConfigError, DataError


@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
def test_streams_are_distributed_over_any_number_of_replicas(dp_size: int) -> None:
    states = [{"format": 1, "streams": streams} for streams in ({0: "a", 2: "c"}, {}, {1: "b"})]
    for dp_rank in range(dp_size):
        state = merge_states(states, dp_rank=dp_rank, dp_size=dp_size)
        assert state == {"format": 1, "streams": {0: "a", 1: "b", 2: "c"}}
    check_resumed_streams(state, [[0], [2, 1]])
    with pytest.raises(DataError, match=r"saved the streams \[0, 1, 2\] and resumes with \[0, 1\]"):
        check_resumed_streams(state, [[0], [1]])


@pytest.mark.parametrize("empty", [{}, {"streams": {}}], ids=["none", "empty"])
@pytest.mark.parametrize("positions", [[5, 5], [5, 7]], ids=["equal", "different"])
def test_a_state_without_streams_stays_with_its_replica(empty: dict, positions: list[int]) -> None:
    states = [{"position": position, **empty} for position in positions]
    assert [merge_states(states, dp_rank=rank, dp_size=2) for rank in range(2)] == states
    check_resumed_streams(states[0], [[], []])


@pytest.mark.parametrize(("saved", "dp_size"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_a_state_without_streams_is_refused_on_another_number_of_replicas(saved: int, dp_size: int) -> None:
    """It is refused even if all replicas have equal states, as with a source that counts its own samples."""
    message = (
        rf"without `streams` on {saved} data-parallel replica.* this run has {dp_size}, .*; resume on {saved} again"
    )
    for dp_rank in range(dp_size):
        with pytest.raises(ConfigError, match=message) as raised:
            merge_states([{"position": 5}] * saved, dp_rank=dp_rank, dp_size=dp_size)
        assert "\n" not in str(raised.value)


def test_a_state_with_streams_does_not_resume_without() -> None:
    with pytest.raises(DataError, match=r"saved the streams \[0\] and resumes with \[\]"):
        check_resumed_streams({"streams": {0: {}}}, [[], []])
