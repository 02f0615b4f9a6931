"""What counts as a right answer, shown on small answers: the judge of the end-to-end tests can say no."""

import pytest

from kv_testing.answers import Answer, Tally, Verdict, judge, largest_move

BEST = {1: -0.5, 2: -1.5, 3: -2.5, 4: -3.5, 5: -4.5}
TIED = {1: -0.50000, 2: -0.50005, 3: -2.5, 4: -3.5, 5: -4.5}
ALONE = Answer((1, 1), (BEST, BEST))


def test_the_same_answer_is_equal():
    assert judge(ALONE, ALONE).verdict is Verdict.EQUAL


def test_another_token_is_wrong():
    assert judge(Answer((1, 2), (BEST, BEST)), ALONE).verdict is Verdict.WRONG


def test_another_length_is_wrong():
    assert judge(Answer((1,), (BEST,)), ALONE).verdict is Verdict.WRONG


def test_another_token_where_two_are_as_good_is_a_tie_whatever_follows():
    alone = Answer((1, 1), (TIED, BEST))
    assert judge(Answer((2, 7), (TIED, {7: -0.1})), alone).verdict is Verdict.TIE


def test_moved_log_probabilities_are_a_gap_also_where_the_answers_part():
    moved = {**BEST, 2: -1.4}
    assert judge(Answer((1, 1), (BEST, moved)), ALONE).gap == pytest.approx(0.1)
    assert judge(Answer((1, 2), (BEST, moved)), ALONE).gap == pytest.approx(0.1)
    assert largest_move(Answer((1, 1), (moved, BEST)), ALONE) == pytest.approx(0.1)


def test_a_token_that_fell_out_of_the_best_counts_from_the_last_of_them():
    fallen = {1: -0.5, 2: -1.5, 3: -2.5, 4: -3.5, 6: -4.4}
    assert judge(Answer((1, 1), (BEST, fallen)), ALONE).gap == pytest.approx(0.1)


def test_the_tally_refuses_wrong_answers_gaps_and_too_many_ties():
    tally = Tally()
    tally.demand_right([ALONE] * 99, [ALONE] * 99)
    tied = Answer((1, 1), (TIED, BEST))
    tally.demand_right([Answer((2, 1), (TIED, BEST))], [tied])
    tally.check()
    tally.demand_right([Answer((2, 1), (TIED, BEST))], [tied])
    with pytest.raises(AssertionError, match="ties=2 of 101"):
        tally.check()
    with pytest.raises(AssertionError, match="answer 0"):
        Tally().demand_right([Answer((2, 1), (BEST, BEST))], [ALONE])
    with pytest.raises(AssertionError, match="differ by"):
        Tally().demand_right([Answer((1, 1), ({**BEST, 1: -0.6}, BEST))], [ALONE])
