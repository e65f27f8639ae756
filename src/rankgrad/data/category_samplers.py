"""Batches from pairs of categories: FastAP's hard strategy and its variant for VehicleID. See `rankgrad.data.samplers`."""

from abc import abstractmethod
from collections.abc import Iterator
from math import isqrt

import numpy as np
from numpy.typing import ArrayLike

from rankgrad._checks import check_count
from rankgrad.data.samplers import ClassDeck, EpochSampler, Indices, checked_integers, class_groups
from rankgrad.data.seeds import bits, permutation


class _CategoryPairs(EpochSampler):
    """Batches of two halves, each from the classes of one category; a subclass defines the pairs of an epoch."""

    def __init__(self, labels: ArrayLike, categories: ArrayLike, batch_size: int, *, seed: int, per_class: int | None) -> None:
        super().__init__(batch_size, seed)
        if batch_size % 2 or batch_size < 4:
            raise ValueError(f"{self._name}: batch_size must be even and at least 4, for two halves, got {batch_size}")
        if per_class is not None:
            check_count(per_class, name="per_class", caller=self._name, least=2)
        of_class = checked_integers(labels, name="labels", caller=self._name)
        of_category = checked_integers(categories, name="categories", caller=self._name)
        if len(of_class) != len(of_category):
            raise ValueError(f"{self._name}: categories must have one entry per label, {len(of_class)}, got {len(of_category)}")
        if len(of_category) and of_category.min() < -1:
            raise ValueError(f"{self._name}: categories must be at least 0, or -1 for unlabelled, got {of_category.min()}")
        # the category belongs to the image: a class in two categories is a group in each
        self._classes = class_groups(of_class, of_category)
        self._most = batch_size if per_class is None else per_class
        names, first = np.unique(self._classes.outer, return_index=True)
        last = np.append(first[1:], len(self._classes.outer))
        self._members = {int(name): np.arange(a, b) for name, a, b in zip(names, first, last, strict=True)}
        room = np.minimum(self._classes.sizes, self._most)
        self._room = {name: int(room[members].sum()) for name, members in self._members.items()}
        if self._classes.images and sum(self._room.values()) < batch_size:
            raise ValueError(
                f"{self._name}: batch_size must be at most {sum(self._room.values())} for {self._classes.images} images"
                f"{'' if per_class is None else f' at {per_class} per class'}, got {batch_size}"
            )
        self.short_categories = tuple(name for name, capacity in self._room.items() if capacity < batch_size // 2)

    @staticmethod
    def largest_batch(labels: ArrayLike, categories: ArrayLike, per_class: int | None = None) -> int:
        """Images of the largest batch that can be filled."""
        caller = "CategoryHard.largest_batch"
        groups = class_groups(
            checked_integers(labels, name="labels", caller=caller),
            checked_integers(categories, name="categories", caller=caller),
        )
        total = int((groups.sizes if per_class is None else np.minimum(groups.sizes, per_class)).sum())
        return total - total % 2

    @abstractmethod
    def _pair(self, slot: int) -> tuple[int, int]:
        """The two categories of one of the `len(self)` batches, before their order is shuffled."""

    def _batches(self, epoch: int, start: int) -> Iterator[Indices]:
        stream = bits(self.seed, self._name, epoch)
        decks: dict[int, ClassDeck] = {}
        for position, slot in enumerate(permutation(len(self), stream)):
            parts = []
            for category, count in self._shares(*self._pair(int(slot)), stream):
                if category not in decks:
                    own = bits(self.seed, self._name, epoch, category)
                    decks[category] = ClassDeck(self._classes, self._members[category], self._most, own)
                parts.append(decks[category].take(count))
            if position >= start:
                yield np.concatenate(parts)

    def _shares(self, first: int, second: int, stream: np.random.PCG64) -> list[tuple[int, int]]:
        """Images of each category: half and half; what one lacks comes from the other, then from any."""
        half = self.batch_size // 2
        a, b = min(half, self._room[first]), min(half, self._room[second])
        a += min(self.batch_size - a - b, self._room[first] - a)
        b += min(self.batch_size - a - b, self._room[second] - b)
        shares, lacking = [(first, a), (second, b)], self.batch_size - a - b
        if lacking:
            others = [name for name in self._members if name not in {first, second}]
            for place in permutation(len(others), stream):
                count = min(lacking, self._room[others[place]])
                shares.append((others[place], count))
                lacking -= count
                if not lacking:
                    break
        return shares


class CategoryHard(_CategoryPairs):
    """Half a batch from one category, half from another: FastAP's "hard" strategy (supplement A), also RaMBO's.

    1. An epoch visits every pair of categories `batches_per_pair` times, in random order.
    2. A half is filled with whole classes of its category (or up to `per_class` random images of each). No class of a category
       is repeated before all have been used. The last class is cut as in `WholeClass`.
    3. A category with less than half a batch (`short_categories`) contributes all it has; the rest comes from its partner,
       then from other categories. `filled` counts the images of an epoch that replace those of a short category.

    SOP, 12 categories with 5 batches per pair: 330 batches. In-Shop, 23 with 2: 506.
    """

    def __init__(
        self,
        labels: ArrayLike,
        categories: ArrayLike,
        batch_size: int,
        *,
        batches_per_pair: int = 5,
        seed: int = 0,
        per_class: int | None = None,
    ) -> None:
        super().__init__(labels, categories, batch_size, seed=seed, per_class=per_class)
        check_count(batches_per_pair, name="batches_per_pair", caller=self._name)
        if -1 in self._members:
            raise ValueError(
                f"{self._name}: every image must have a category, {(self._classes.sizes[self._members[-1]]).sum()} have -1; "
                "remove them, or use CategoryHalf, which pairs each category with them"
            )
        if len(self._members) < 2:
            raise ValueError(f"{self._name}: at least 2 categories are needed to form pairs, got {len(self._members)}")
        self.batches_per_pair = batches_per_pair
        self._names = tuple(self._members)
        half, visits = batch_size // 2, (len(self._names) - 1) * batches_per_pair
        self.filled = visits * sum(half - self._room[name] for name in self.short_categories)

    def __len__(self) -> int:
        return len(self._names) * (len(self._names) - 1) // 2 * self.batches_per_pair

    def _pair(self, slot: int) -> tuple[int, int]:
        # pairs in the order (1, 0), (2, 0), (2, 1), (3, 0), ...: row r begins at r (r - 1) / 2
        pair = slot // self.batches_per_pair
        row = (1 + isqrt(1 + 8 * pair)) // 2
        return self._names[row], self._names[pair - row * (row - 1) // 2]


class CategoryHalf(_CategoryPairs):
    """Half a batch from one labelled category, half from images without one (-1): FastAP's strategy on VehicleID.

    A category of N images is visited ceil(2 N / batch_size) times, so that an epoch uses all its classes. Classes are drawn
    and short categories filled as in `CategoryHard`; the images without a category are the partner of every category.
    """

    def __init__(
        self, labels: ArrayLike, categories: ArrayLike, batch_size: int, *, seed: int = 0, per_class: int | None = None
    ) -> None:
        super().__init__(labels, categories, batch_size, seed=seed, per_class=per_class)
        labelled = [name for name in self._members if name != -1]
        if -1 not in self._members or not labelled:
            raise ValueError(
                f"{self._name}: needs images with and without (-1) a category, got {len(labelled)} categories and "
                f"{'some' if -1 in self._members else 'no'} images without; use "
                + ("CategoryHard" if labelled else "WholeClass")
            )
        images = np.array([self._classes.sizes[self._members[name]].sum() for name in labelled])
        visits = -(-2 * images // batch_size)
        self._visited = np.repeat(labelled, visits)
        self.filled = sum(
            int(count) * max(batch_size // 2 - self._room[name], 0) for name, count in zip(labelled, visits, strict=True)
        )

    def __len__(self) -> int:
        return len(self._visited)

    def _pair(self, slot: int) -> tuple[int, int]:
        return int(self._visited[slot]), -1
