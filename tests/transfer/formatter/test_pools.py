"""An engine's tensors as planes: where every element must show up, and what is refused."""

import pytest
import torch

from kv_core.ids import Rank
from kv_core.spans import Span
from kv_testing.layouts import make_state
from kv_transfer.plan.cache_state import BlockLayout, ParallelLayout, Share
from kv_transfer.pools import PagedCaches, planes_of

C, B, T, H, D = 2, 5, 4, 3, 6
SIZES = {"C": C, "B": B, "T": T, "H": H, "D": D}


def numbered(letters):
    """A tensor whose elements tell their indices along C, B, T, H, D, with axes in the given order."""
    canonical = torch.arange(C * B * T * H * D).view(C, B, T, H, D)
    return canonical.permute(*("CBTHD".index(letter) for letter in letters)).contiguous()


@pytest.mark.parametrize(
    ("tensor", "axes"),
    [
        (numbered("CBTHD"), "CBTHD"),
        (numbered("CBHTD"), "CBHTD"),
        (numbered("BCTHD"), "BCTHD"),
        (numbered("BCHTD"), "BCHTD"),
        (numbered("BHTCD").view(B, H, T, C * D), "BHT(CD)"),
        (numbered("BTHCD").view(B, T, H, C * D).transpose(1, 2), "BHT(CD)"),
        (numbered("BHCTD").view(B, H, T, C * D), "BH(CTD)"),
        (numbered("BTHCD").flatten(1), "B(THCD)"),
        (numbered("CBTHD").view(C, B * T * H * D), "C(BTHD)"),
    ],
)
def test_planes_are_views_with_every_element_in_its_place(tensor, axes):
    planes = planes_of(tensor, axes, **SIZES)
    assert torch.equal(torch.stack(planes), numbered("CBTHD"))
    planes[1][2, 3, 1] = -1
    assert (tensor == -1).sum() == D


def test_planes_may_be_folded_each_in_its_own_way():
    """What vLLM's vector kernels on CPU keep in [B, H, T, 2 D]: K as D x T, then V as T x D."""
    keys, values = numbered("CBHTD")
    tensor = torch.cat([keys.transpose(2, 3).flatten(2), values.flatten(2)], dim=-1).view(B, H, T, C * D)
    planes = planes_of(tensor, "BH(CDT) BH(CTD)", **SIZES)
    assert torch.equal(torch.stack(planes), numbered("CBTHD"))
    assert [plane.data_ptr() - tensor.data_ptr() for plane in planes] == [0, T * D * tensor.itemsize]


def test_opaque_tiles_are_planes_of_one_token():
    tensor = numbered("BHTCD").view(B, H, T, C * D)
    planes = planes_of(tensor, "BH(CD)", C=C)
    assert [tuple(plane.shape) for plane in planes] == [(B, 1, H, T * D)] * C
    assert torch.equal(planes[1][2, 0, 1], tensor.view(B, H, C, T * D)[2, 1, 1])


@pytest.mark.parametrize(
    ("shape", "axes", "words"),
    [
        ((B, H, T, D), "BHTX", "unknown axes: got='BHTX'"),
        ((B, H, T, D), "BHTT", "unknown axes"),
        ((B, H, T), "BHT", "unknown axes"),
        ((B, H, T), "BHTD", r"shape=\(5, 3, 4\), axes='BHTD'"),
        ((B, H, T, 2 * D), "BHT(CD) BHT(CD) BHT(CD)", "words=3, planes=2"),
    ],
)
def test_axes_that_do_not_fit_are_refused(shape, axes, words):
    with pytest.raises(ValueError, match=words):
        planes_of(torch.zeros(shape), axes, C=2, D=D)


def test_folded_axes_must_be_viewable():
    scattered = torch.zeros(B, T, H, C * D).transpose(1, 2)
    with pytest.raises(RuntimeError, match="view"):
        planes_of(scattered, "BH(CTD)", C=C, T=T)


def caches(order="BTHD", share=None, tile="plain", num_layers=2):
    share = share or Share(Rank(0), Span(3, 3 + num_layers), Span(6, 6 + H))
    layers = [planes_of(torch.zeros(C, *(SIZES[letter] for letter in order)), f"C{order}") for _ in range(num_layers)]
    return PagedCaches.of_layers(share, layers, T, tile)


def test_caches_know_their_part_of_the_model():
    held = caches()
    assert (held.layers, held.heads, held.num_blocks) == (Span(3, 5), Span(6, 9), B)
    assert held.planes_of_layers(Span(4, 5)) == held.planes[2:]
    with pytest.raises(ValueError, match=r"layers are not held: wanted=\[2, 4\), held=\[3, 5\)"):
        held.planes_of_layers(Span(2, 4))


def test_the_block_order_is_told_from_the_strides():
    assert caches("BTHD").layout == BlockLayout("token_major")
    assert caches("BHTD").layout == BlockLayout("head_major")


def test_a_stage_without_layers_has_empty_caches():
    held = caches(num_layers=0)
    assert (held.layers, held.heads, held.num_blocks, held.planes) == (Span(3, 3), Span(6, 6), 0, ())
    held.check(state_of_three_heads(), Share(Rank(0), Span(3, 3), Span(6, 9)))


def state_of_three_heads(**changes):
    parallel = ParallelLayout((Span(0, 3), Span(3, 5)), (Span(0, 6), Span(6, 9)))
    usual = {"num_layers": 5, "num_kv_heads": 9, "parallel": parallel, "tokens_per_block": T, "head_size": D}
    return make_state(**(usual | {"dtype": "float32", "layout": BlockLayout("token_major")} | changes))


def test_caches_are_what_the_state_says():
    state = state_of_three_heads()
    caches().check(state, state.share_of(Rank(3)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float16"}, "dtype: caches=float32, stated=float16"),
        ({"head_size": 5}, "elements of a row: caches=6, stated=5"),
        ({"tokens_per_block": 8}, "tokens_per_block: caches=4, stated=8"),
        ({"num_planes": 1}, "num_planes: caches=2, stated=1"),
        ({"layout": BlockLayout("token_major", "amx")}, "tile: caches=plain, stated=amx"),
    ],
)
def test_caches_that_are_not_as_stated_are_refused(changes, words):
    state = state_of_three_heads(**changes)
    with pytest.raises(ValueError, match=words):
        caches().check(state, state.share_of(Rank(3)))


@pytest.mark.parametrize(
    ("rank", "words"),
    [(2, r"heads: caches=\[6, 9\), stated=\[0, 6\)"), (1, r"layers: caches=\[3, 5\), stated=\[0, 3\)")],
)
def test_caches_of_another_rank_are_refused(rank, words):
    state = state_of_three_heads()
    with pytest.raises(ValueError, match=words):
        caches().check(state, state.share_of(Rank(rank)))


@pytest.mark.parametrize(
    ("planes", "words"),
    [
        ([torch.zeros(B, T, H, D)] * 3, "planes are not whole layers: planes=3, per layer=2"),
        ([torch.zeros(B, T + 1, H, D)] * 2, r"not \[B, T, H, D\]: got=\(5, 5, 3, 6\), T=4"),
        (
            [torch.zeros(1, T, H, D).expand(B, -1, -1, -1)] * 2,
            r"slots of a plane overlap: shape=\(5, 4, 3, 6\), strides=\(0, ",
        ),
        ([torch.zeros(B, T, H, D), torch.zeros(B, T, H, D + 1)], "planes differ"),
        ([torch.zeros(B, T, H, D), torch.zeros(B, T, H, D).half()], "planes differ"),
        (
            [torch.zeros(B, T, H, D)] * 2 + [torch.zeros(B, H, T, D).transpose(1, 2)] * 2,
            "planes of one kind differ in strides",
        ),
    ],
)
def test_planes_that_are_not_alike_are_refused(planes, words):
    with pytest.raises(ValueError, match=words):
        PagedCaches(0, tuple(planes), 0, T)
