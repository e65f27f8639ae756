"""Which images make a batch: batch samplers for any `DataLoader(batch_sampler=...)`.

| sampler         | a batch                                                              | source                         |
| --------------- | -------------------------------------------------------------------- | ------------------------------ |
| `ClassBalanced` | m images of each of batch_size / m classes                           | RS@k                           |
| `WholeClass`    | all images of random classes                                         | FastAP, "random"               |
| `CategoryHard`  | half from one category, half from another, all pairs of categories   | FastAP, "hard" (supplement A)  |
| `CategoryHalf`  | half from a labelled category, half from images without a category   | FastAP on VehicleID            |
| `Sequential`    | the next images of the table                                         | evaluation                     |

Every batch has exactly `batch_size` images (except the last of `Sequential`), none of them twice. The batches of an epoch are
a function of (labels, seed, epoch), the same on every machine; `set_epoch` chooses the epoch. Images with label -1 have no
class and are skipped.

A sampler can be interrupted: `state_dict` has the position of the latest iteration, and after `load_state_dict` the next
iteration continues there. A loader that prefetches asks for batches before they are used; its user keeps the position
(`ImageBatches.iterate(start)`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rankgrad._checks import check_count
from rankgrad.data.seeds import bits, permutation

Indices = NDArray[np.int64]


class BatchSampler(Protocol):
    """What a loader needs from a sampler."""

    def __iter__(self) -> Iterator[list[int]]: ...

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None: ...

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class EpochSampler(ABC):
    """Epochs, positions and their state; a subclass defines the batches."""

    def __init__(self, batch_size: int, seed: int) -> None:
        check_count(batch_size, name="batch_size", caller=self._name, least=1)
        check_count(seed, name="seed", caller=self._name, least=0)
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0
        self.position = 0
        self._start = 0

    @property
    def _name(self) -> str:
        return type(self).__name__

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Indices]:
        """The batches of `epoch` from number `start` on."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; another epoch begins at its first batch."""
        check_count(epoch, name="epoch", caller=f"{self._name}.set_epoch", least=0)
        if epoch != self.epoch:
            self.epoch, self.position, self._start = epoch, 0, 0

    def __iter__(self) -> Iterator[list[int]]:
        # read here and not at the first `next`, so that an iterator keeps the epoch it was made in
        start, self._start = self._start, 0
        self.position = start
        return self._run(self.epoch, start)

    def _run(self, epoch: int, start: int) -> Iterator[list[int]]:
        for position, batch in enumerate(self._batches(epoch, start), start + 1):
            self.position = position
            yield batch.tolist()

    def state_dict(self) -> dict[str, int]:
        """Epoch and position, and what identifies the sampler they belong to."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed, "batches": len(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the next iteration at the position of `state`."""
        for name, own in (("seed", self.seed), ("batches", len(self))):
            if state[name] != own:
                raise ValueError(
                    f"{self._name}: the state belongs to another sampler: it has {name} {state[name]}, this one {own}; "
                    "load it with the data and settings it was saved with"
                )
        check_count(state["epoch"], name="epoch", caller=f"{self._name}.load_state_dict", least=0)
        check_count(state["position"], name="position", caller=f"{self._name}.load_state_dict", least=0)
        if state["position"] > len(self):
            raise ValueError(f"{self._name}: position must be at most {len(self)} (batches), got {state['position']}")
        self.epoch, self.position = state["epoch"], state["position"]
        self._start = self.position


class Sequential(EpochSampler):
    """All images once, in the order of the table; the last batch may be smaller. For evaluation."""

    def __init__(self, images: int, batch_size: int) -> None:
        super().__init__(batch_size, seed=0)
        check_count(images, name="images", caller=self._name, least=0)
        self.images = images

    def __len__(self) -> int:
        return (self.images + self.batch_size - 1) // self.batch_size

    def _batches(self, epoch: int, start: int) -> Iterator[Indices]:
        for begin in range(start * self.batch_size, self.images, self.batch_size):
            yield np.arange(begin, min(begin + self.batch_size, self.images))


class ClassBalanced(EpochSampler):
    """`per_class` images of each of batch_size / per_class classes; no image twice in an epoch.

    1. The images of a class are shuffled and cut into groups of `per_class`; the remainder is not used in this epoch. A class
       with fewer images is never used (`unused_classes` counts these classes).
    2. An epoch has as many full batches as these groups allow with no class twice in a batch, which depends on the class
       sizes alone and is the sampler's length.
    3. Surplus groups are dropped at random; the others are distributed over the batches in random order.

    The images of a class are adjacent in the batch.
    """

    def __init__(self, labels: ArrayLike, batch_size: int, per_class: int, *, seed: int = 0) -> None:
        super().__init__(batch_size, seed)
        check_count(per_class, name="per_class", caller=self._name, least=1)
        if batch_size % per_class:
            raise ValueError(
                f"{self._name}: batch_size must be a multiple of per_class, got {batch_size} and {per_class}; "
                f"{max(batch_size // per_class, 1) * per_class} is one"
            )
        self.per_class = per_class
        classes = class_groups(checked_integers(labels, name="labels", caller=self._name))
        groups = classes.sizes // per_class
        usable = np.flatnonzero(groups)
        self.unused_classes = len(groups) - len(usable)
        self._classes_per_batch = batch_size // per_class
        if len(usable) < self._classes_per_batch:
            raise ValueError(
                f"{self._name}: a batch of {batch_size} needs {self._classes_per_batch} classes with at least {per_class} "
                f"images, the data has {len(usable)}; "
                + (f"lower batch_size to {len(usable) * per_class} or per_class" if len(usable) else "lower per_class")
            )
        self._length = _most_batches(groups, self._classes_per_batch)
        # a batch can have at most one group of a class
        self._classes, self._usable, self._groups = classes, usable, np.minimum(groups[usable], self._length)

    @staticmethod
    def largest_batch(labels: ArrayLike, per_class: int) -> int:
        """Images of the largest batch that can be filled."""
        check_count(per_class, name="per_class", caller="ClassBalanced.largest_batch", least=1)
        sizes = class_sizes(checked_integers(labels, name="labels", caller="ClassBalanced.largest_batch"))
        return int((sizes >= per_class).sum()) * per_class

    def __len__(self) -> int:
        return self._length

    def _batches(self, epoch: int, start: int) -> Iterator[Indices]:
        yield from self._plan(epoch)[start:]

    def _plan(self, epoch: int) -> Indices:
        stream = bits(self.seed, self._name, epoch)
        images = self._classes.shuffled(stream)
        order = permutation(len(self._usable), stream)
        counts = self._groups[order]
        line = np.repeat(self._usable[order], counts)
        nth = np.arange(len(line)) - np.repeat(np.cumsum(counts) - counts, counts)

        wanted = self._length * self._classes_per_batch
        kept = np.sort(permutation(len(line), stream)[:wanted])
        first = self._classes.starts[line[kept]] + nth[kept] * self.per_class
        dealt = images[first[:, None] + np.arange(self.per_class)]
        # group j goes to batch j modulo their number: the groups of a class are consecutive and no more than there are
        # batches, so no batch gets two of them
        batches = dealt.reshape(self._classes_per_batch, self._length, self.per_class).swapaxes(0, 1)
        shuffled: Indices = batches.reshape(self._length, self.batch_size)[permutation(self._length, stream)]
        return shuffled


class WholeClass(EpochSampler):
    """All images of randomly chosen classes, until the batch is full: FastAP's "random" strategy.

    1. Classes come in random order, each with all its images; no class is repeated before all have been used.
    2. The last class of a batch is cut to fit, at random. If that leaves a single image of it, one image of another class of
       three or more is dropped to take two; only a batch of pairs and single images can end with a single image.
    3. A class too large for a batch is cut to batch_size - 2, so that every batch has negatives.

    An epoch has ceil(images / batch_size) batches: every class is used at least once.
    """

    def __init__(self, labels: ArrayLike, batch_size: int, *, seed: int = 0) -> None:
        super().__init__(batch_size, seed)
        self._classes = class_groups(checked_integers(labels, name="labels", caller=self._name))
        images, classes = self._classes.images, len(self._classes.sizes)
        check_count(batch_size, name="batch_size", caller=self._name, least=4)
        if classes < 2:
            raise ValueError(f"{self._name}: labels must have at least 2 classes, got {classes}: a batch needs negatives")
        self._most = batch_size - 2
        room = int(np.minimum(self._classes.sizes, self._most).sum())
        if room < batch_size:
            raise ValueError(
                f"{self._name}: batch_size must be at most {room} for {images} images of {classes} classes, got {batch_size}"
            )
        self._length = -(-images // batch_size)

    @staticmethod
    def largest_batch(labels: ArrayLike) -> int:
        """Images of the largest batch that can be filled; 0 where any batch would lack negatives."""
        sizes = class_sizes(checked_integers(labels, name="labels", caller="WholeClass.largest_batch"))
        total = int(sizes.sum())
        return total if total - sizes.max(initial=0) >= 2 else 0

    def __len__(self) -> int:
        return self._length

    def _batches(self, epoch: int, start: int) -> Iterator[Indices]:
        deck = ClassDeck(self._classes, np.arange(len(self._classes.sizes)), self._most, bits(self.seed, self._name, epoch))
        for position in range(self._length):
            batch = deck.take(self.batch_size)
            if position >= start:
                yield batch


def checked_integers(values: ArrayLike, *, name: str, caller: str) -> Indices:
    """`values` (a list, a numpy array, a tensor on the CPU) as 1-D int64."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{caller}: {name} must have one integer per image, got shape {array.shape}")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{caller}: {name} must be integers, got {array.dtype}")
    return array.astype(np.int64)


def class_sizes(labels: Indices) -> Indices:
    """Images of each class, in the order of their labels; images without a class (-1) do not count."""
    return np.unique(labels[labels != -1], return_counts=True)[1]


class ClassGroups:
    """Images sorted by class: class c has `order[starts[c] : starts[c] + sizes[c]]`."""

    def __init__(self, order: Indices, starts: Indices, sizes: Indices, outer: Indices) -> None:
        self.order, self.starts, self.sizes, self.outer = order, starts, sizes, outer

    @property
    def images(self) -> int:
        return len(self.order)

    def of(self, group: int) -> Indices:
        start = self.starts[group]
        return self.order[start : start + self.sizes[group]]

    def shuffled(self, stream: np.random.PCG64) -> Indices:
        """`order` with the images of each class in random order."""
        group = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return self.order[np.lexsort((stream.random_raw(self.images), group))]


def class_groups(labels: Indices, outer: Indices | None = None) -> ClassGroups:
    """Images with a label (not -1) sorted by label, within `outer` if it is given."""
    if outer is None:
        outer = np.zeros_like(labels)
    rows = np.flatnonzero(labels != -1)
    order = rows[np.lexsort((labels[rows], outer[rows]))]
    keys = np.stack((outer[order], labels[order]))
    starts = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))[: len(order)])
    return ClassGroups(order, starts, np.diff(np.append(starts, len(order))), outer[order[starts]])


def _most_batches(groups: Indices, per_batch: int) -> int:
    """The largest number of batches, each of `per_batch` groups of different classes.

    B batches are possible if the classes have B per_batch groups, counting at most B of each class. The surplus is concave in
    B and 0 at B = 0, so the possible B form an interval.
    """
    low, high = 0, int(groups.sum()) // per_batch
    while low < high:
        middle = (low + high + 1) // 2
        if np.minimum(groups, middle).sum() >= middle * per_batch:
            low = middle
        else:
            high = middle - 1
    return low


class ClassDeck:
    """Classes in random order, drawn without replacement, then shuffled again.

    Args:
        classes: the images of all classes.
        members: the classes of this deck.
        most: largest number of images of a class.
        stream: of random bits.
    """

    def __init__(self, classes: ClassGroups, members: Indices, most: int, stream: np.random.PCG64) -> None:
        self._classes, self._members, self._most, self._stream = classes, members, most, stream
        self._remaining: list[int] = []  # drawn from the end

    def take(self, count: int) -> Indices:
        """Draw `count` images, at most as many as the deck has: whole classes, the last cut to fit."""
        taken: list[int] = []
        parts: list[Indices] = []
        while count:
            if not self._remaining:
                self._shuffle(taken)
            group = self._remaining.pop()
            images = self._classes.of(group)
            size = min(len(images), self._most)
            if count == 1 and size > 1:
                count += self._drop_one(parts)
            size = min(size, count)
            if size < len(images):
                images = images[permutation(len(images), self._stream)[:size]]
            taken.append(group)
            parts.append(images)
            count -= size
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _shuffle(self, taken: list[int]) -> None:
        """Start again with all classes; those already in this batch come last, which it does not reach."""
        order = self._members[permutation(len(self._members), self._stream)].tolist()
        already = set(taken)
        self._remaining = [group for group in order if group in already] + [group for group in order if group not in already]

    def _drop_one(self, parts: list[Indices]) -> int:
        """Drop an image of the latest class of three or more, which keeps a pair; returns the number dropped."""
        for place in reversed(range(len(parts))):
            if len(parts[place]) > 2:
                parts[place] = np.delete(parts[place], permutation(len(parts[place]), self._stream)[0])
                return 1
        return 0
