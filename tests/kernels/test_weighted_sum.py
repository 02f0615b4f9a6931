"""The weighted sum that is the checksum of staged bytes on a GPU, against Python's own integers."""

from random import Random

import pytest
import torch

from kv_kernels.weighted_sum import weighted_sum

WORD = 1 << 64


def by_hand(words: list[int]) -> int:
    """The documented sum, of words as Python integers."""
    total = 0
    for number, word in enumerate(words, start=1):
        mixed = number
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            mixed = (mixed ^ mixed >> 33) * factor % WORD
        total += word * (mixed ^ mixed >> 33 | 1)
    return total % WORD


def drawn(num_words: int) -> list[int]:
    dice = Random(num_words)
    return [dice.randrange(-(1 << 63), 1 << 63) for _ in range(num_words)]


@pytest.mark.parametrize("num_words", [1, 7, 2047, 2048, 2049, 10_000])
def test_the_kernel_gives_the_documented_sum(interpreted, num_words):
    words = drawn(num_words)
    found = interpreted.weighted_sum.weighted_sum(torch.tensor(words))
    assert int(found) % WORD == by_hand([word % WORD for word in words])


def test_programs_share_what_is_longer_than_all_of_them(interpreted, monkeypatch):
    monkeypatch.setattr(interpreted.weighted_sum, "NUM_PROGRAMS", 3)
    words = drawn(9 * 2048 + 5)
    found = interpreted.weighted_sum.weighted_sum(torch.tensor(words))
    assert int(found) % WORD == by_hand([word % WORD for word in words])


@pytest.mark.parametrize(
    "words", [torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64), torch.arange(8)[::2]]
)
def test_what_is_no_row_of_words_is_refused(interpreted, words):
    with pytest.raises(ValueError, match="not words in one piece"):
        interpreted.weighted_sum.weighted_sum(words)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("num_words", [1, 2049, 1_000_003, 1 << 23])
def test_a_gpu_gives_the_sum_of_the_cpu(num_words):
    from kv_transfer.checksum import Pending, Summer

    staged = torch.randint(0, 256, (8 * num_words,), dtype=torch.uint8)
    words = staged.view(torch.int64).cuda()
    assert int(weighted_sum(words)) == Summer().checksum(staged)
    found = Summer().checksum(staged[:-3].cuda())
    torch.cuda.synchronize()
    assert isinstance(found, Pending)
    assert found.known() == Summer().checksum(staged[:-3])
