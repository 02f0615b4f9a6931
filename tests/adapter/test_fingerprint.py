"""Which changes of a checkpoint change its fingerprint, and which do not."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from kv_core.errors import CallerError
from kv_engine_adapter.fingerprint import model_fingerprint, read_config

CONFIG = {"hidden_size": 64, "rope_theta": 1e4, "_name_or_path": "/home/a", "transformers_version": "5.1"}


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}.weight": torch.randn(16, 64, generator=generator) for i in range(5)}


def checkpoint(path, files):
    path.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, path / f"model-{number}.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def fingerprint(path, config=CONFIG, **extra):
    return model_fingerprint(config, path, extra=extra)


@pytest.fixture
def original(tmp_path):
    return checkpoint(tmp_path / "original", [weights()])


def test_a_copy_under_another_path_and_name_agrees(original, tmp_path):
    copy = shutil.copytree(original, tmp_path / "copy")
    renamed = CONFIG | {"_name_or_path": "hub/name", "transformers_version": "9"}
    assert fingerprint(copy, renamed) == fingerprint(original)
    assert len(fingerprint(original)) == 64


def test_the_same_weights_in_two_files_agree(original, tmp_path):
    tensors = weights()
    first = {name: tensors[name] for name in list(tensors)[:2]}
    second = {name: tensors[name] for name in list(tensors)[2:]}
    assert fingerprint(checkpoint(tmp_path / "sharded", [second, first])) == fingerprint(original)


def test_other_weights_of_the_same_shape_differ(original, tmp_path):
    assert fingerprint(checkpoint(tmp_path / "other", [weights(seed=1)])) != fingerprint(original)


def test_one_changed_tensor_is_seen(original, tmp_path):
    for name in weights():
        changed = weights()
        changed[name] = -changed[name]
        assert fingerprint(checkpoint(tmp_path / name, [changed])) != fingerprint(original), name


@pytest.mark.parametrize("config", [CONFIG | {"rope_theta": 2e4}, CONFIG | {"quantization_config": {"bits": 8}},
                                    CONFIG | {"text_config": {"hidden_size": 1}}])  # fmt: skip
def test_rope_quantisation_and_shape_differ(original, config):
    assert fingerprint(original, config) != fingerprint(original)


def test_what_the_engine_adds_differs(original):
    assert fingerprint(original, dtype="bfloat16") != fingerprint(original, dtype="float32")


@pytest.mark.parametrize("name", ["attn.k_scale", "v_proj.v_scale", "kv_scale", "k_cache.scale"])
def test_scales_of_a_cache_are_compared_by_themselves(tmp_path, name):
    """Which only a cache of codes has; whether there are any is part of the model."""
    prints = [
        fingerprint(checkpoint(tmp_path / f"{value}", [weights() | {f"layer.0.{name}": torch.tensor(value)}]))
        for value in (0.5, 0.25)
    ]
    assert prints[0] == prints[1] != fingerprint(checkpoint(tmp_path / "none", [weights()]))


def test_scales_of_queries_and_tensors_that_are_no_scales_count(tmp_path):
    found = {
        fingerprint(checkpoint(tmp_path / f"{at}", [weights() | {f"layer.0.{name}": tensor}]))
        for at, (name, tensor) in enumerate(
            [(name, value * torch.ones(size)) for name, size in (("q_scale", 1), ("k_scale", 2)) for value in (1, 2)]
        )
    }
    assert len(found) == 4


def test_made_up_weights_are_told_apart_by_their_seed():
    one, two = (model_fingerprint(CONFIG, None, extra={"made_up_seed": seed}) for seed in (1, 2))
    assert one != two


def test_weights_in_other_formats_are_sampled_whole(tmp_path):
    directories = [tmp_path / "a", tmp_path / "b"]
    for number, directory in enumerate(directories):
        directory.mkdir()
        (directory / "pytorch_model.bin").write_bytes(bytes([number]) * 300_000)
    assert fingerprint(directories[0]) != fingerprint(directories[1])


def test_a_directory_without_weights_or_configuration_is_refused(tmp_path):
    with pytest.raises(CallerError, match=str(tmp_path)):
        fingerprint(tmp_path)
    with pytest.raises(CallerError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_header_of_absurd_length_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CallerError, match="believed"):
        fingerprint(tmp_path)
