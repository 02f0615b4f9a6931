"""A gate, against its law, from one thread and from many."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.gate import Gate


@given(st.lists(st.sampled_from(["enter", "leave", "shut"]), max_size=30))
def test_nobody_enters_after_it_was_shut(steps) -> None:
    gate, num_inside, is_shut = Gate(), 0, False
    for step in steps:
        if step == "enter":
            assert gate.enter() == (not is_shut)
            num_inside += not is_shut
        elif step == "leave" and num_inside:
            gate.leave()
            num_inside -= 1
        elif step == "shut":
            is_shut = True
            assert gate.shut() == (num_inside == 0)


def test_many_threads_at_one_gate() -> None:
    """Whoever shuts it sees no write after that."""
    for _ in range(50):
        gate, written, at_shut = Gate(), [], []

        def copy(gate=gate, written=written) -> None:
            while gate.enter():
                written.append(1)
                gate.leave()

        threads = [threading.Thread(target=copy) for _ in range(3)]
        for thread in threads:
            thread.start()
        while not gate.shut():
            pass
        at_shut.append(len(written))
        for thread in threads:
            thread.join()
        assert len(written) == at_shut[0]
