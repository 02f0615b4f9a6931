"""`kvferry keygen`: one file, never overwritten, and what to do with it."""

from kv_engine_adapter.cli.keygen import main as keygen


def test_keygen_makes_one_and_never_overwrites(tmp_path, capsys):
    path = tmp_path / "new" / "key"
    assert keygen([str(path)]) == 0
    first = path.read_bytes()
    assert '"curve_key"' in capsys.readouterr().out
    assert keygen([str(path)]) == 2
    assert "there is a key file already" in capsys.readouterr().err
    assert path.read_bytes() == first
