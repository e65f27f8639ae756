"""Any recipe, shrunk so that all its stages run within a minute on a CPU."""

from dataclasses import replace

from rankgrad.runs.recipe import Recipe

CLASSES, IMAGES_PER_CLASS = 12, 6


def shrunk(recipe: Recipe) -> Recipe:
    """`recipe` with a tiny network, few classes, small batches and two epochs; sampler, loss and protocol stay its own.

    The result measures nothing. An incomplete copy of the data set is accepted.
    """
    per_class = min(recipe.per_class, 3)
    batch = {"class-balanced": 3 * per_class, "category-hard": 16}.get(recipe.sampler, 12)
    return replace(
        recipe,
        name=f"{recipe.name}-debug",
        what=f"{recipe.what} (debug: shrunk, its numbers mean nothing)",
        partial=True,
        classes=CLASSES,
        images_per_class=IMAGES_PER_CLASS,
        size=32,
        stored_side=36,
        batch_size=batch,
        per_class=per_class,
        batches_per_pair=1,
        trunk="convnet",
        weights="none",
        pool="avg" if recipe.pool == "cls" else recipe.pool,
        dim=16 if recipe.dim else 0,
        chunk_size=5 if isinstance(recipe.chunk_size, int) and recipe.chunk_size else recipe.chunk_size,
        memory=min(recipe.memory, 1),
        lr=min(1e-3, recipe.lr * 10),
        milestones=(1,) if recipe.milestones else (),
        warmup=min(recipe.warmup, 0.5),
        warmup_steps=min(recipe.warmup_steps, 1),
        epochs=2,
        steps=4 if recipe.steps else 0,
        precision="float32",
        compile=False,
        evaluate_every=1,
        log_every=1,
    )
