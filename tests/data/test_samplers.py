"""What batches are made of, counted batch by batch, and that an epoch can be interrupted anywhere."""

import contextlib
import itertools
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankgrad.data.category_samplers import CategoryHalf, CategoryHard
from rankgrad.data.samplers import ClassBalanced, Sequential, WholeClass
from rankgrad.data.seeds import derive, generator


def labels_of(sizes, seed=0):
    """A shuffled table with `sizes[c]` images of class c."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


def spread(low, high, count):
    """Class sizes from low to high, both present."""
    return np.linspace(low, high, count).astype(int)


# as large as SOP: 59,551 images of 11,318 classes in 12 categories
SOP_LABELS = np.repeat(np.arange(11318), np.where(np.arange(11318) < 2961, 6, 5))
SOP_CATEGORIES = SOP_LABELS % 12

SMALL_SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 2, 2, 3, 3]
SMALL = labels_of(SMALL_SIZES)


def make(kind, seed=0):
    categories = SMALL % 4
    return {
        "balanced": lambda: ClassBalanced(SMALL, 12, 3, seed=seed),
        "whole": lambda: WholeClass(SMALL, 16, seed=seed),
        "hard": lambda: CategoryHard(SMALL, categories, 16, batches_per_pair=3, seed=seed),
        "half": lambda: CategoryHalf(SMALL, categories - 1, 16, seed=seed),
        "order": lambda: Sequential(50, 7),
    }[kind]()


KINDS = ["balanced", "whole", "hard", "half", "order"]


@pytest.mark.parametrize("kind", KINDS)
def test_length_is_exact_and_batches_are_full_without_repeats(kind):
    for epoch in range(5):
        sampler = make(kind)
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        for batch in batches if kind != "order" else batches[:-1]:
            assert len(set(batch)) == len(batch) == sampler.batch_size
            assert all(type(index) is int for index in batch)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_seed_and_epoch_decide_everything(kind):
    def epoch(seed, number):
        sampler = make(kind, seed)
        sampler.set_epoch(number)
        return list(sampler)

    torch.manual_seed(1)
    reference = epoch(0, 3)
    torch.manual_seed(2)
    assert epoch(0, 3) == reference
    assert epoch(1, 3) != reference
    assert epoch(0, 4) != reference
    again = make(kind)
    again.set_epoch(3)
    assert list(again) == list(again) == reference


def test_the_same_on_every_machine():
    """Pinned: a change here changes what every saved run would continue with."""
    assert derive(0) == 6148773199958884930
    assert derive(0, "a", 1) == 6069026815483291126
    assert next(iter(ClassBalanced(np.repeat(np.arange(6), 4), 6, 2, seed=3))) == [8, 9, 12, 14, 18, 17]
    assert next(iter(WholeClass(np.repeat(np.arange(6), 4), 6, seed=3))) == [4, 5, 6, 7, 9, 11]


def test_derive_keeps_purposes_apart():
    values = [(0,), (1,), (0, 0), (0, "0"), (0, "a", "bc"), (0, "ab", "c"), (0, "abc"), (0, 1, 11), (0, 11, 1), (-1,), (2**70,)]
    derived = [derive(*value) for value in values]
    assert len(set(derived)) == len(values)
    assert all(0 <= value < 2**63 for value in derived)
    assert derive(np.int64(7), np.int32(2)) == derive(7, 2)
    with pytest.raises(TypeError, match=r"parts must be integers or strings, got 0\.5 of type float"):
        derive(0, 0.5)


def test_generators_do_not_touch_the_global_state():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = torch.rand(3, generator=generator(5, "augment", 1, 2))
    list(make("hard"))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, torch.rand(3, generator=generator(5, "augment", 1, 2)))
    assert not torch.equal(first, torch.rand(3, generator=generator(5, "augment", 1, 3)))


@pytest.mark.parametrize("kind", KINDS)
def test_continues_where_it_was_interrupted(kind):
    whole = make(kind)
    whole.set_epoch(2)
    batches = list(whole)
    for stop in (0, 1, len(batches) // 2, len(batches)):
        first = make(kind)
        first.set_epoch(2)
        seen = list(itertools.islice(first, stop))
        state = first.state_dict()
        assert first.position == stop
        second = make(kind)
        second.load_state_dict(state)
        second.set_epoch(2)
        assert seen + list(second) == batches
        # the position is used once: what follows is a whole epoch
        assert list(second) == batches
        assert second.position == len(batches)


def test_another_epoch_begins_at_its_first_batch():
    sampler = make("whole")
    sampler.load_state_dict({**sampler.state_dict(), "position": 2})
    sampler.set_epoch(1)
    assert len(list(sampler)) == len(sampler)


def test_a_state_of_other_data_is_refused():
    with pytest.raises(ValueError, match="the state belongs to another sampler: it has seed 1, this one 0"):
        make("whole").load_state_dict(make("whole", seed=1).state_dict())
    with pytest.raises(ValueError, match=r"it has batches 18, this one"):
        make("whole").load_state_dict({**make("hard").state_dict()})
    with pytest.raises(ValueError, match="position must be at most"):
        make("whole").load_state_dict({**make("whole").state_dict(), "position": 100})


def test_works_as_batch_sampler_of_a_loader():
    sampler = make("hard")
    loader = torch.utils.data.DataLoader(torch.arange(len(SMALL)), batch_sampler=sampler)
    assert [batch.tolist() for batch in loader] == list(sampler)


def most_batches_by_trying(groups, per_batch):
    """Greedy from the fullest classes makes as many batches as can be made."""
    left, made = sorted(groups, reverse=True), 0
    while len(left) >= per_batch and left[per_batch - 1] > 0:
        left = sorted([count - 1 for count in left[:per_batch]] + left[per_batch:], reverse=True)
        made += 1
    return made


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=3, max_size=20), st.integers(1, 3), st.integers(1, 3), st.integers(0, 9))
def test_class_balanced_makes_all_the_batches_it_can(sizes, per_class, classes, epoch):
    groups = [size // per_class for size in sizes]
    if sum(count > 0 for count in groups) < classes:
        return
    labels = labels_of(sizes)
    sampler = ClassBalanced(labels, per_class * classes, per_class)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler) == most_batches_by_trying(groups, classes)
    assert sampler.unused_classes == sum(count == 0 for count in groups)
    for batch in batches:
        assert Counter(Counter(labels[batch].tolist()).values()) == {per_class: classes}
        assert all(len(set(labels[batch[i : i + per_class]])) == 1 for i in range(0, len(batch), per_class))
    assert max(Counter(itertools.chain.from_iterable(batches)).values(), default=1) == 1


def test_class_balanced_epochs_of_the_papers():
    cars = ClassBalanced(labels_of(spread(59, 97, 98)), 392, 4)
    assert len(cars) == len(list(cars)) == 14
    birds = ClassBalanced(labels_of(spread(41, 60, 100)), 400, 4)
    assert len(birds) == len(list(birds)) == 10


def test_class_balanced_uses_every_image_in_time():
    labels = labels_of([7, 9, 11, 5, 6, 4])
    sampler, seen = ClassBalanced(labels, 8, 4), set()
    for epoch in range(40):
        sampler.set_epoch(epoch)
        seen.update(itertools.chain.from_iterable(sampler))
    assert seen == set(range(len(labels)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"labels": np.repeat(np.arange(60), 4), "batch_size": 392, "per_class": 4},
            "a batch of 392 needs 98 classes with at least 4 images, the data has 60; lower batch_size to 240 or per_class",
        ),
        ({"labels": [0, 1], "batch_size": 4, "per_class": 2}, "the data has 0; lower per_class"),
        ({"labels": [0, 0], "batch_size": 7, "per_class": 2}, "must be a multiple of per_class, got 7 and 2; 6 is one"),
        ({"labels": [[0]], "batch_size": 2, "per_class": 2}, r"labels must have one integer per image, got shape \(1, 1\)"),
        ({"labels": [0, 0], "batch_size": 0, "per_class": 2}, "batch_size must be at least 1, got 0"),
        ({"labels": [0, 0], "batch_size": 2, "per_class": 2, "seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_class_balanced_says_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        ClassBalanced(**arguments)


def test_labels_must_be_integers():
    with pytest.raises(TypeError, match="WholeClass: labels must be integers, got float64"):
        WholeClass([0.5, 1.0], 4)


def test_images_of_no_class_are_left_out():
    labels = np.r_[np.repeat([0, 1, 2], 6), np.full(20, -1)]
    for sampler in (ClassBalanced(labels, 6, 2), WholeClass(labels, 8)):
        assert set(itertools.chain.from_iterable(sampler)) == set(range(18))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=25), st.integers(4, 20), st.integers(0, 5))
def test_whole_class_cuts_only_the_last_class_of_a_batch(sizes, batch_size, epoch):
    if sum(min(size, batch_size - 2) for size in sizes) < batch_size:
        return
    labels = labels_of(sizes)
    sampler = WholeClass(labels, batch_size)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == -(-len(labels) // batch_size)
    times = Counter()
    for batch in batches:
        counts = Counter(labels[batch].tolist())
        times.update(counts.keys())
        assert len(counts) > 1
        # the last cut to fit, and at most one other that gave an image to keep it from being alone
        cut = [c for c, n in counts.items() if n < min(sizes[c], batch_size - 2)]
        assert len(cut) <= 2
        alone = [c for c in cut if counts[c] == 1]
        assert not alone or max(counts.values()) <= 2
    assert set(times) == set(range(len(sizes)))


def test_no_class_comes_again_before_all_have_come():
    sampler = WholeClass(SMALL, 16)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        seen = set()
        for batch in sampler:
            fresh = list(dict.fromkeys(SMALL[batch].tolist()))
            repeated = [c for c in fresh if c in seen]
            seen.update(fresh)
            assert not repeated or seen == set(range(len(SMALL_SIZES)))


def test_a_class_larger_than_a_batch_leaves_room_for_another():
    labels = labels_of([100, 100, 3])
    for batch in WholeClass(labels, 20):
        assert len(set(labels[batch])) > 1


@pytest.mark.parametrize(
    ("labels", "batch_size", "message"),
    [
        ([0] * 10, 4, "labels must have at least 2 classes, got 1"),
        ([0, 0, 1, 1], 5, "batch_size must be at most 4 for 4 images of 2 classes, got 5"),
        ([0, 0, 1, 1], 3, "batch_size must be at least 4, got 3"),
    ],
)
def test_whole_class_says_what_is_wrong(labels, batch_size, message):
    with pytest.raises(ValueError, match=message):
        WholeClass(labels, batch_size)


def test_category_hard_visits_every_pair_equally_with_half_of_each():
    labels = labels_of([6] * 60)
    categories = labels % 5
    sampler = CategoryHard(labels, categories, 24, batches_per_pair=4)
    pairs = Counter()
    for batch in sampler:
        halves = Counter(categories[batch].tolist())
        assert set(halves.values()) == {12}
        pairs[tuple(sorted(halves))] += 1
        assert set(Counter(labels[batch].tolist()).values()) == {6}
    assert pairs == dict.fromkeys(itertools.combinations(range(5), 2), 4)
    assert len(sampler) == 40
    assert sampler.filled == 0
    assert sampler.short_categories == ()


def test_the_order_of_pairs_changes_with_the_epoch():
    labels = labels_of([6] * 60)
    categories, orders = labels % 5, set()
    for epoch in range(4):
        sampler = CategoryHard(labels, categories, 24)
        sampler.set_epoch(epoch)
        orders.add(tuple(tuple(sorted(set(categories[batch]))) for batch in sampler))
    assert len(orders) == 4


def test_category_hard_epochs_of_the_papers():
    assert len(CategoryHard(SOP_LABELS, SOP_CATEGORIES, 256)) == 330
    labels = np.repeat(np.arange(3997), 7)
    assert len(CategoryHard(labels, labels % 23, 96, batches_per_pair=2)) == 506


def test_category_hard_covers_a_category_before_it_repeats():
    labels = labels_of([4] * 40)
    categories = labels % 2
    sampler = CategoryHard(labels, categories, 40, batches_per_pair=4)
    seen = Counter(c for batch in sampler for c in set(labels[batch]))
    # each batch has 5 of a category's 20 classes, four batches all of them
    assert set(seen.values()) == {1}
    assert len(seen) == 40


def test_per_class_takes_so_many_of_each():
    labels = labels_of([9] * 40)
    sampler = CategoryHard(labels, labels % 3, 32, per_class=4, batches_per_pair=20)
    chosen = set()
    for batch in sampler:
        assert set(Counter(labels[batch].tolist()).values()) == {4}
        chosen.update(batch)
    assert chosen == set(range(len(labels)))


def test_a_short_category_is_filled_from_its_partner_and_counted():
    # category 0 has 3 + 3 images, category 1 twelve, category 2 forty
    labels = np.repeat(np.arange(15), [3, 3, 4, 4, 4] + [4] * 10)
    categories = np.repeat([0, 1, 2], [6, 12, 40])
    sampler = CategoryHard(labels, categories, 40, batches_per_pair=2)
    assert sampler.short_categories == (0, 1)
    filled, seen = 0, set()
    for batch in sampler:
        assert len(set(batch)) == 40
        counts = Counter(categories[batch].tolist())
        seen.add(tuple(counts[c] for c in range(3)))
        pair = {c for c in (0, 1) if counts[c]}
        filled += sum(20 - (6, 12)[c] for c in pair)
    # with its partner; with the partner's all and the rest from category 2; the other partner
    assert seen == {(6, 0, 34), (6, 12, 22), (0, 12, 28)}
    assert sampler.filled == filled


def test_an_image_of_a_class_in_two_categories_is_in_one_half():
    labels = np.repeat(np.arange(10), 8)
    categories = np.tile([0, 1], 40)
    sampler = CategoryHard(labels, categories, 16)
    for batch in sampler:
        assert Counter(categories[batch].tolist()) == {0: 8, 1: 8}


def test_many_categories_cost_nothing_until_they_are_visited():
    labels = np.repeat(np.arange(6000), 5)
    began = time.process_time()
    sampler = CategoryHard(labels, labels % 600, 64)
    assert len(sampler) == 600 * 599 // 2 * 5
    assert time.process_time() - began < 0.2
    began = time.process_time()
    first = list(itertools.islice(sampler, 3))
    assert time.process_time() - began < 1
    assert all(len(batch) == 64 for batch in first)


def test_category_half_pairs_each_category_with_the_unlabelled():
    sizes = [5] * 40
    labels = labels_of(sizes)
    categories = np.where(labels < 20, labels % 3, -1)
    sampler = CategoryHalf(labels, categories, 20)
    visits = Counter()
    for batch in sampler:
        counts = Counter(categories[batch].tolist())
        assert counts[-1] == 10
        (category,) = set(counts) - {-1}
        visits[category] += 1
    expected = {c: -(-2 * int((categories == c).sum()) // 20) for c in range(3)}
    assert visits == expected
    assert len(sampler) == sum(expected.values())
    # all of a category in an epoch
    assert set(np.flatnonzero(categories >= 0)) <= set(itertools.chain.from_iterable(sampler))


def test_category_half_fills_small_models_with_unlabelled():
    labels = np.repeat(np.arange(30), 4)
    categories = np.where(labels == 0, 0, np.where(labels < 8, 1, -1))
    sampler = CategoryHalf(labels, categories, 20)
    assert len(sampler) == 1 + 3
    assert sampler.short_categories == (0,)
    assert sampler.filled == 6
    seen = Counter(tuple(sorted(Counter(categories[batch].tolist()).items())) for batch in sampler)
    assert seen == {((-1, 16), (0, 4)): 1, ((-1, 10), (1, 10)): 3}


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (CategoryHard, {"batch_size": 5}, "batch_size must be even and at least 4, for two halves, got 5"),
        (CategoryHard, {"categories": [0, 0, 0, 0]}, "at least 2 categories are needed to form pairs, got 1"),
        (CategoryHard, {"categories": [0, 1, 2]}, "categories must have one entry per label, 4, got 3"),
        (CategoryHard, {"categories": [0, 0, -1, -1]}, "every image must have a category, 2 have -1.*CategoryHalf"),
        (CategoryHard, {"categories": [0, 0, 1, -2]}, "categories must be at least 0, or -1 for unlabelled, got -2"),
        (CategoryHard, {"batch_size": 6}, "batch_size must be at most 4 for 4 images, got 6"),
        (CategoryHard, {"batches_per_pair": 0}, "batches_per_pair must be at least 1, got 0"),
        (CategoryHard, {"per_class": 1}, "per_class must be at least 2, got 1"),
        (CategoryHalf, {}, "got 2 categories and no images without; use CategoryHard"),
        (CategoryHalf, {"categories": [-1] * 4}, "got 0 categories and some images without; use WholeClass"),
    ],
)
def test_category_samplers_say_what_is_wrong(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"labels": [0, 0, 1, 1], "categories": [0, 0, 1, 1], "batch_size": 4, **arguments})


def test_an_epoch_of_sop_takes_well_under_a_second():
    for sampler in (
        ClassBalanced(SOP_LABELS, 4000, 4),
        WholeClass(SOP_LABELS, 256),
        CategoryHard(SOP_LABELS, SOP_CATEGORIES, 256),
        CategoryHalf(SOP_LABELS, SOP_CATEGORIES - 1, 256),
    ):
        began = time.process_time()
        batches = list(sampler)
        # CPU seconds; 0.1 or less on a free core
        assert time.process_time() - began < 1
        assert len(batches) == len(sampler)


@pytest.mark.parametrize("sizes", [[6, 6, 6], [2, 9, 4, 1], [3, 3, 20], [1, 1, 5]])
def test_the_largest_batch_is_the_largest_that_is_accepted(sizes):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    categories = labels % 2
    for make, largest in (
        (lambda size: ClassBalanced(labels, size, 2), ClassBalanced.largest_batch(labels, 2)),
        (lambda size: WholeClass(labels, size), WholeClass.largest_batch(labels)),
        (lambda size: CategoryHard(labels, categories, size), CategoryHard.largest_batch(labels, categories)),
        (lambda size: CategoryHard(labels, categories, size, per_class=2), CategoryHard.largest_batch(labels, categories, 2)),
    ):
        accepted = []
        for size in range(4, len(labels) + 5):
            with contextlib.suppress(ValueError):
                make(size)
                accepted.append(size)
        assert max(accepted, default=largest) == largest
