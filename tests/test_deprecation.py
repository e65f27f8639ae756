import warnings

import pytest

import rankgrad
from rankgrad import _deprecation
from rankgrad._deprecation import DEPRECATIONS, Deprecation, deprecated, renamed_arguments


@pytest.fixture(autouse=True)
def own_list(monkeypatch):
    """What tests deprecate is not part of the package."""
    monkeypatch.setattr(_deprecation, "DEPRECATIONS", [])


def overdue(deprecations, version):
    def number(text):
        return tuple(int(part) for part in text.split(".")[:2])

    return [each for each in deprecations if number(version) >= number(each.removed_in)]


class Loss:
    @renamed_arguments("0.2", temperature="tau")
    def __init__(self, tau=0.5):
        self.tau = tau


def test_an_argument_works_by_its_old_name_and_says_the_new_one():
    with pytest.warns(
        FutureWarning, match=r"Loss\(temperature=\) is deprecated since rankgrad 0\.2 .* removed in 0\.4: use tau="
    ) as told:
        assert Loss(temperature=0.01).tau == 0.01
    assert told[0].filename == __file__, "the warning must point to the caller"


def test_the_new_name_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Loss(tau=0.01).tau == Loss(0.01).tau == 0.01


def test_both_names_at_once_are_refused():
    with pytest.raises(TypeError, match="Loss: temperature is the former name of tau, got both"):
        Loss(tau=1, temperature=2)


def test_a_deprecated_function_goes_on_and_keeps_its_docstring():
    @deprecated("1.9", "use rankgrad.evaluate")
    def recall_at(k):
        """Recall."""
        return k + 1

    with pytest.warns(FutureWarning, match=r"recall_at is deprecated since rankgrad 1\.9 .* 1\.11: use rankgrad\.evaluate"):
        assert recall_at(2) == 3
    assert recall_at.__doc__ == "Recall."


def test_what_is_deprecated_is_listed():
    @renamed_arguments("0.2", old="new", older="newer")
    def function(new, newer): ...

    names = [each.name.split(".")[-1] for each in _deprecation.DEPRECATIONS]
    assert names == ["function(old=)", "function(older=)"]


def test_a_name_is_overdue_in_the_version_that_promised_its_removal():
    name = Deprecation("f", since="0.9", instead="use g")
    assert overdue([name], "0.10.3") == []
    assert overdue([name], "0.11.0") == overdue([name], "1.0.0") == [name]


def test_nothing_in_the_package_is_overdue():
    assert overdue(DEPRECATIONS, rankgrad.__version__) == []
