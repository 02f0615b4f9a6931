"""`kvferry explain`: the plan of a pair as a page, and what it says of words it cannot use."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_engine_adapter.cli.explain import main
from kv_engine_adapter.cli.model_facts import model_facts
from kv_engine_adapter.cli.shapes import cache_state

MODEL = "layers=32,heads=8,size=128"
TOKEN_BYTES = 32 * 8 * 2 * 128 * 2


def explain(capsys, sender, receiver, *more, model=MODEL):
    status = main(["--from", sender, "--to", receiver, "--model", str(model), *more])
    found = capsys.readouterr()
    return status, found.out + found.err


def test_tp4pp2_to_tp3(capsys):
    status, page = explain(capsys, "tp4pp2", "tp3")
    assert status == 0
    rows = re.findall(r"^ *P(\d) +D(\d)  (\[\S+ \d+\)) +(\[\S+ \d\))", page, re.MULTILINE)
    assert rows[:4] == [
        ("0", "0", "[0, 16)", "[0, 2)"),
        ("4", "0", "[16, 32)", "[0, 2)"),
        ("1", "1", "[0, 16)", "[2, 4)"),
        ("2", "1", "[0, 16)", "[4, 5)"),
    ]
    assert len(rows) == 10
    assert " [16, 32) | P4>D0  | P5>D1  | P6>D1  | P6>D2  | P7>D2  |" in page
    assert f"1,024 tokens: {1024 * TOKEN_BYTES:,} bytes in 10 sessions" in page


@pytest.mark.parametrize(
    ("sender", "receiver", "copies"),
    [
        ("tp2cp2,cut=round_robin", "tp1pp2,block=64", 1),
        ("tp4dp2", "tp2", 1),
        ("tp2", "tp4dp2", 1),
        ("tp8", "tp16", 2),
        ("tp2,order=token_major", "tp2,stages=20+12", 1),
    ],
)
def test_the_bytes_are_those_of_the_tokens(capsys, sender, receiver, copies):
    status, page = explain(capsys, sender, receiver, "--tokens", "1000", "--held", "100")
    assert status == 0
    assert f"900 tokens: {900 * TOKEN_BYTES * copies:,} bytes" in page
    shown = re.findall(r"^ *P\d+ +D\d+ .* ([\d,]+)$", page, re.MULTILINE)
    assert sum(int(number.replace(",", "")) for number in shown) == 900 * TOKEN_BYTES * copies


def test_a_refused_pair_tells_every_reason_with_both_values(capsys):
    status, page = explain(capsys, "tp2,dtype=float16", "tp2,model=other")
    assert status == 1
    assert "fingerprint differs: ours=other, theirs=the model" in page
    assert "dtype differs: ours=bfloat16, theirs=float16" in page


def test_a_pair_whose_elements_are_converted(capsys):
    status, page = explain(capsys, "tp2,convert=yes", "tp1,dtype=float8_e4m3fn,scale=0.5+0.25,convert=yes")
    assert status == 0
    assert "elements: bfloat16 on the wire, converted to float8_e4m3fn by the receiver; never read where they" in page
    assert "float8_e4m3fn (scale 0.5, 0.25)" in page
    assert f"1,024 tokens: {1024 * TOKEN_BYTES:,} bytes" in page, "of the sender's elements"
    assert "path: staged (gather, one write a chunk, scatter); one" in page
    alike = explain(capsys, "tp2,convert=yes", "tp1,convert=yes")[1]
    assert "elements:" not in alike
    assert "scatter), or direct (one kernel reads the sender's blocks) between GPUs of one host; one run" in alike


def test_a_pair_of_which_one_side_alone_would_convert(capsys):
    status, page = explain(capsys, "tp2,convert=yes", "tp1,dtype=float16")
    assert status == 1
    assert "dtype differs: ours=float16, theirs=bfloat16" in page
    assert "convert_elements differs: ours=False, theirs=True" in page


def test_a_long_table_is_cut_and_counted(capsys):
    _, page = explain(capsys, "tp8pp8", "tp8pp4,stages=1+1+1+29")
    assert re.search(r"\.\.\. and \d+ more lines", page)


@pytest.mark.parametrize(
    ("sender", "model", "why"),
    [
        ("four", MODEL, "not the sizes of an engine: got='four'"),
        ("tp2tp2", MODEL, "a size is given twice: got='tp2tp2'"),
        ("tp0", MODEL, "tp is not a positive number: got='0'"),
        ("tp2,colour=red", MODEL, "not options of an engine: got=['colour=red']"),
        ("tp2,stages=20+11", MODEL, "stages do not hold the layers: got='20+11', pp=1, layers=32"),
        ("tp3dp2", MODEL, "groups do not divide the tensor ranks: groups=2, tensor ranks=3"),
        ("tp1,dtype=float12", MODEL, "unknown dtype: got='float12'"),
        ("tp1,cut=slanted", MODEL, "slanted"),
        ("tp1,cp2,deal=0", MODEL, "not options"),
        ("tp1cp2,deal=0", MODEL, "deal is not a positive number: got='0'"),
        ("tp1,convert=perhaps", MODEL, "convert is neither yes nor no: got='perhaps'"),
        ("tp1,scale=half", MODEL, "scale is not numbers: got='half'"),
        ("tp1,scale=0.5", MODEL, "elements of this type have no scale: dtype=bfloat16, scales=0.5"),
        ("tp1", "layers=32,heads=8", "missing=['size']"),
        ("tp1", "layers=32,heads=8,size=128,depth=3", "unknown=['depth']"),
        ("tp1", "nowhere", "no such model: got='nowhere'"),
        ("tp1", "x" * 5000, "no such model"),
        ("tp1", "layers=2,heads=2,size=\u0663", "size is not a positive number"),
        ("tp1", "layers=99999,heads=2,size=8", "layers is too large: got=99999, most=4096"),
        ("pp99999999999999999999", MODEL, "pp is too large: got=99999999999999999999, most=4096"),
        ("tp" + "9" * 5000, MODEL, "tp is not a positive number"),
        ("tp64pp64cp2", MODEL, "too many ranks: got=8192, most=4096"),
    ],
)
def test_words_that_cannot_be_used(capsys, sender, model, why):
    status, page = explain(capsys, sender, "tp1", model=model)
    assert status == 2
    assert why in page


NUMBERS = st.sampled_from(["0", "1", "2", "3", "8", "64", "100", "-1", "", "x", "\u00b2", "1.5", "9" * 30])
SIZES = st.lists(st.tuples(st.sampled_from(["tp", "pp", "cp", "dp", ""]), NUMBERS), min_size=1, max_size=4)
OPTIONS = st.tuples(
    st.sampled_from(
        ["stages", "block", "order", "dtype", "cut", "deal", "numbering", "model", "scale", "convert", "z"]
    ),
    st.sampled_from(
        ["yes", "no", "1", "2+3", "8+24", "0.5+0.25", "nan", "-1", "token_major", "float8_e4m3fn", "float16"]
    )
    | st.sampled_from(["round_robin", "tensor_inner", "", "\0", "="]),
)
SHAPES = st.builds(
    lambda sizes, options: ",".join(["".join(map("".join, sizes)), *map("=".join, options)]),
    SIZES,
    st.lists(OPTIONS, max_size=3),
)
USUAL = st.sampled_from(["tp1", "tp4pp2", "tp3,block=64", "tp2cp2,cut=round_robin", "tp8dp2"])
FIELDS = [
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "sliding_window",
    "layer_types",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "text_config",
    "torch_dtype",
]
VALUES = st.sampled_from([1, 4, 8, 0, -1, 10**30, 1.5, "8", "bfloat16", True, None, [], ["sliding_attention"], {}])
WRITTEN = st.dictionaries(st.sampled_from(FIELDS), VALUES) | VALUES


@given(USUAL | SHAPES, USUAL | SHAPES, WRITTEN | st.none(), st.integers(-2, 3000), st.integers(-2, 300))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_written_is_explained_or_refused(tmp_path, sender, receiver, written, num_tokens, num_held):
    """Never a traceback: exit status 0, 1 or 2."""
    model = "layers=8,heads=4,size=16"
    if written is not None:
        usual = {"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8}
        (tmp_path / "config.json").write_text(json.dumps(usual | written if isinstance(written, dict) else written))
        model = str(tmp_path)
    words = [f"--from={sender}", f"--to={receiver}", f"--model={model}", f"--tokens={num_tokens}", f"--held={num_held}"]
    assert main(words) in (0, 1, 2)


CONFIGS = {
    "grouped": (
        {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64},
        ("full", 2, 2, 8, 2, "bfloat16", ()),
    ),
    "windowed": (
        {
            "text_config": {
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "head_dim": 16,
                "sliding_window": 512,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "dtype": "float16",
            }
        },
        ("full", 3, 4, 16, 2, "float16", (512, 0, 512)),
    ),
    "chunks": (
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "head_dim": 16,
            "attention_chunk_size": 8192,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        ("full", 2, 4, 16, 2, "bfloat16", (8192, 0)),
    ),
    "switched off": (
        {
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 4,
            "sliding_window": 9,
            "use_sliding_window": False,
        },
        ("full", 1, 2, 4, 2, "bfloat16", ()),
    ),
    "latent": (
        {"num_hidden_layers": 2, "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        ("latent", 2, 1, 576, 1, "bfloat16", ()),
    ),
}


@pytest.mark.parametrize(("config", "facts"), CONFIGS.values(), ids=CONFIGS)
def test_facts_of_a_published_configuration(tmp_path, config, facts):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = model_facts(str(tmp_path))
    told = (found.attention, found.num_layers, found.num_kv_heads, found.head_size, found.num_planes, found.dtype)
    assert (*told, found.windows) == facts
    state = cache_state("tp1", found)
    assert (state.windows, state.chunked) == (found.windows, "attention_chunk_size" in str(config))


def test_windows_take_whole_blocks_of_what_is_still_seen(capsys):
    model = "layers=2,heads=1,size=4,dtype=float32,window=101"
    _, page = explain(capsys, "tp1", "tp1", "--tokens", "1000", model=model)
    assert "[896, 1000)" in page


def test_a_configuration_that_lacks_something_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    status, page = explain(capsys, "tp1", "tp1", model=tmp_path)
    assert status == 2
    assert "field=num_hidden_layers, got=None" in page
    (tmp_path / "config.json").write_text("{")
    assert "not a model's configuration" in explain(capsys, "tp1", "tp1", model=tmp_path)[1]
