from rankgrad import _device
from rankgrad._device import available_bytes


def test_the_smaller_of_machine_and_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(_device, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(_device, "CGROUP", tmp_path)
    assert available_bytes() is None
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:   4000 kB\n")
    assert available_bytes("cpu") == 4_096_000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_bytes() == 4_096_000
    (tmp_path / "memory.max").write_text("5000\n")
    assert available_bytes() == 4000
    (tmp_path / "memory.current").write_text("6000\n")
    assert available_bytes() == 0
    (tmp_path / "meminfo").write_text("damaged")
    (tmp_path / "memory.max").write_text("?")
    assert available_bytes() is None


def test_of_this_machine_it_is_plausible():
    found = available_bytes()
    assert found is None or found > 2**20
