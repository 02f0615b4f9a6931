"""`kvferry doctor`: each fact of a host, good and bad, and the command itself."""

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kv_engine_adapter.cli import host as host_module
from kv_engine_adapter.cli.doctor import main
from kv_engine_adapter.cli.findings import Level, findings
from kv_engine_adapter.cli.host import PACKAGES, Disk, Gpu, Host, this_host
from kv_engine_adapter.config import ferry_config
from kv_transfer.keys import make_keys

PLAIN = ferry_config({})
VERSIONS: dict[str, str | None] = {**dict.fromkeys(PACKAGES, "1.0"), "vllm": "0.32.0"}
WELL = Host(
    python=(3, 11, 7),
    versions=VERSIONS,
    environment={},
    plugin_names=frozenset({"kvferry", "another"}),
    max_files=20_000,
    max_locked_bytes=None,
    shared_memory_bytes=8 << 30,
    ptrace_scope=0,
    nixl_gbps=3.0,
    disk=Disk(Path("/cache"), 100 << 30),
)
H200 = Gpu("NVIDIA H200", frozenset({0, 1}))
BAD, HINT = Level.BAD, Level.HINT


def worst(host, config=PLAIN):
    """The findings that are not good: (level, subject), and all their advice."""
    found = [each for each in findings(host, config) if each.level is not Level.GOOD]
    assert all(each.advice for each in found), "whatever is not well has advice"
    return [(each.level, each.subject) for each in found], " ".join(f"{each.found} {each.advice}" for each in found)


def test_a_host_that_is_well_has_nothing_to_say():
    assert worst(WELL) == ([], "")
    two = replace(WELL, gpus=(Gpu("NVIDIA H200", frozenset({1})), Gpu("NVIDIA H200", frozenset({0}))))
    assert worst(two) == ([], "")


@pytest.mark.parametrize(
    ("change", "expected", "words"),
    [
        ({"python": (3, 10, 1)}, (BAD, "Python"), "3.11"),
        ({"versions": VERSIONS | {"vllm": None}}, (BAD, "vllm"), "pip install"),
        ({"versions": VERSIONS | {"vllm": "0.24.9"}}, (HINT, "vllm"), "0.25 to 0.33"),
        ({"versions": VERSIONS | {"vllm": "0.34.0+cpu"}}, (HINT, "vllm"), "0.25 to 0.33"),
        ({"versions": VERSIONS | {"vllm": "0.27.0"}}, (HINT, "vllm"), "several cache groups need 0.30"),
        ({"versions": VERSIONS | {"nixl": None}}, (BAD, "nixl"), "kv-transfer[nixl]"),
        ({"versions": VERSIONS | {"triton": None}, "gpus": (H200,)}, (BAD, "triton"), "pip install triton"),
        ({"plugin_names": frozenset({"another"})}, (BAD, "vLLM plugin"), "reinstall"),
        ({"environment": {"VLLM_PLUGINS": "lora"}}, (BAD, "vLLM plugin"), "kv_connector_module_path"),
        ({"nixl_gbps": None, "nixl_trouble": "no transport"}, (BAD, "NIXL over UCX"), "no transport"),
        ({"environment": {"UCX_TLS": "tcp"}, "adapters": ("mlx5_0",)}, (HINT, "UCX transports"), "mlx5_0"),
        ({"shared_memory_bytes": 64 << 20}, (HINT, "/dev/shm"), "--shm-size"),
        ({"ptrace_scope": 1}, (HINT, "copies between processes"), "ptrace_scope=0"),
        ({"max_files": 1024}, (HINT, "open files"), "ulimit -n 4096"),
        ({"max_locked_bytes": 64 << 10, "adapters": ("mlx5_0",)}, (BAD, "locked memory"), "ulimit -l unlimited"),
        ({"gpus": (Gpu("A10", frozenset()), Gpu("A10", frozenset({0})))}, (HINT, "GPU peer access"), "none for 0>1"),
        (
            {"gpus": (H200,), "environment": {"PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments:True"}},
            (HINT, "GPU memory"),
            "switch it off",
        ),
        ({"taken_ports": (("127.0.0.1", 8100, "in use"),)}, (BAD, "port"), "127.0.0.1:8100: in use"),
        ({"disk": Disk(Path("/cache"), None, "it is not a directory")}, (BAD, "disk"), "not a directory"),
        ({"disk": Disk(Path("/cache"), 1 << 30)}, (HINT, "disk"), "1.0 GiB free"),
    ],
)
def test_each_fact_that_is_not_well_is_found_and_says_what_to_do(change, expected, words):
    found, said = worst(replace(WELL, **change))
    assert found == [expected]
    assert words in said


def test_facts_that_do_no_harm_are_not_complained_about():
    tcp_alone = replace(WELL, environment={"UCX_TLS": "tcp", "VLLM_PLUGINS": "lora,kvferry"})
    no_gpu = replace(tcp_alone, versions=VERSIONS | {"triton": None}, max_locked_bytes=64 << 10, max_files=-1)
    assert worst(no_gpu) == ([], "")


def test_an_open_door_wants_a_key_and_a_key_is_for_its_owner_alone(tmp_path):
    address = {"bind_host": "10.0.0.7"}
    assert worst(WELL, ferry_config(address))[0] == [(HINT, "encryption")]
    key = tmp_path / "key"
    config = ferry_config({**address, "curve_key": str(key)})
    assert worst(WELL, config)[0] == [(BAD, "key file")]
    key.touch(mode=0o644)
    key.chmod(0o644)
    assert f"chmod 600 {key}" in worst(WELL, config)[1]
    key.chmod(0o600)
    assert worst(WELL, config)[0] == [(BAD, "key file")], "it is empty, and an engine would not start with it"
    key.unlink()
    make_keys(key)
    assert worst(WELL, config) == ([], "")


@pytest.mark.nixl
def test_nixl_really_moves_bytes_here(tmp_path):
    host = this_host("127.0.0.1", [], tmp_path)
    assert host.nixl_gbps is not None, host.nixl_trouble
    assert host.disk is not None


@pytest.fixture
def no_nixl(monkeypatch):
    """The command's own tests are about the command: an agent costs seconds on a busy machine."""
    monkeypatch.setattr(host_module, "_nixl_speed", lambda: (1.0, ""))


def test_a_port_in_use_is_named_and_fails_the_command(capsys, no_nixl):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status = main(["--config", json.dumps({"port": port}), "--ranks", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    taken = [each["found"] for each in found if each["subject"] == "port"]
    assert status == 1
    assert len(taken) == 1
    assert taken[0].startswith(f"127.0.0.1:{port}: ")


def test_lines_show_level_subject_and_advice(capsys, no_nixl, tmp_path):
    main(["--disk", str(tmp_path / "nowhere")])
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if "nowhere" in line)
    assert lines[at].startswith("BAD   disk")
    assert lines[at + 1].strip() == "-> name a directory of this user's own"


@pytest.mark.parametrize(
    ("text", "words"), [("{", "not JSON"), ("[]", "not a JSON object"), ('{"prot": 1}', "unknown keys ['prot']")]
)
def test_settings_that_the_connector_would_refuse_are_refused(capsys, text, words):
    assert main(["--config", text]) == 2
    assert words in capsys.readouterr().err


def test_a_port_beyond_the_last_is_a_finding(capsys, no_nixl):
    """An engine takes as many ports in a row as it has ranks, and one more."""
    assert main(["--config", '{"port": 65534}', "--ranks", "2", "--json"]) == 1
    ports = [each["found"] for each in json.loads(capsys.readouterr().out) if each["subject"] == "port"]
    assert [each.split(":")[1] for each in ports if "0-65535" in each] == ["65536"]


@pytest.mark.parametrize("ranks", ["0", "-5", "two"])
def test_an_engine_has_a_rank_at_least(capsys, no_nixl, ranks):
    with pytest.raises(SystemExit) as end:
        main(["--ranks", ranks])
    assert end.value.code == 2
    assert "--ranks" in capsys.readouterr().err


def test_a_package_that_cannot_be_loaded_is_a_finding(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "kv_transfer.agent.nixl", raising=False)
    host = this_host("127.0.0.1", [], None)
    assert (host.gpus, host.nixl_gbps) == ((), None)
    assert "torch" in host.nixl_trouble
    assert worst(host)[0].count((BAD, "NIXL over UCX")) == 1
