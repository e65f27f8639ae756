from benchmarks.million_items import main


def test_a_small_batch_goes_through_and_its_gradient_is_checked(capsys):
    assert (
        main(["--items", "256", "--dim", "16", "--size", "16", "--chunk-size", "64", "--sample", "4", "--device", "cpu"]) == 0
    )
    shown = capsys.readouterr().out
    assert "256 items, high" in shown
    assert "4 queries against float64" in shown
