"""The benchmark of a large gallery, on a small one."""

import sys

from benchmarks import gallery


def test_it_makes_a_gallery_once_and_measures_it(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "clusters"
    monkeypatch.setattr(sys, "argv", ["gallery", str(folder), "--items", "700", "--dim", "8", "-k", "3"])
    gallery.main()
    first = capsys.readouterr().out
    assert "writing 700 embeddings" in first
    assert "query, median of 200" in first
    gallery.main()
    assert "writing" not in capsys.readouterr().out
