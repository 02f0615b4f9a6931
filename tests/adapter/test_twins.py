"""Equal prompts, and the requests of one call."""

from random import Random

from kv_core.ids import RequestId
from kv_engine_adapter.families import Families
from kv_engine_adapter.twins import Twins

A, B = b"a" * 32, b"b" * 32
ONE, TWO = RequestId("1"), RequestId("2")


def test_a_prompt_is_loading_for_the_others_only():
    twins = Twins()
    twins.begins(ONE, A)
    assert twins.is_loading(A, TWO)
    assert not twins.is_loading(A, ONE)
    assert not twins.is_loading(B, TWO)
    assert not twins.is_loading(None, TWO)
    twins.begins(TWO, A)
    assert twins.is_loading(A, ONE)
    twins.ends(TWO, A)
    twins.ends(TWO, A)
    assert not twins.is_loading(A, ONE)
    assert twins.is_loading(A, TWO)
    twins.ends(ONE, B)
    twins.ends(ONE, A)
    assert len(twins) == 0


def test_drawn_loads_agree_with_a_list_of_them():
    dice, twins, loading = Random(1), Twins(), set[tuple[RequestId, bytes]]()
    for _ in range(2000):
        request, prompt = RequestId(str(dice.randrange(5))), dice.choice((A, B))
        if dice.random() < 0.5:
            twins.begins(request, prompt)
            loading.add((request, prompt))
        else:
            twins.ends(request, prompt)
            loading.discard((request, prompt))
        asked = RequestId(str(dice.randrange(5)))
        assert twins.is_loading(prompt, asked) == any(other != asked for other, theirs in loading if theirs == prompt)
        assert len(twins) == len({theirs for _, theirs in loading})
        twins.check()


def test_a_call_keeps_its_id_while_it_is_asked_for():
    now = [0.0]
    families = Families(30.0, lambda: now[0])
    first = families.transfer_id("a")
    assert len(first) == 32
    other = families.transfer_id("b")
    assert first != other
    now[0] = 29.0
    assert families.transfer_id("a") == first
    now[0] = 31.0
    assert families.transfer_id("c") not in (first, other)
    assert len(families) == 2, "b was not asked for in time"
    assert families.transfer_id("a") == first
    assert families.transfer_id("b") != other
