"""Rank losses in `transformers.Trainer`, and trained models on the Hugging Face Hub.

    trainer = Trainer(model, args, train_dataset=dataset, compute_loss_func=compute_loss_func(rg.RecallAtKLoss()))

    HubEmbedder.of(rg.load("runs/pets"), card=Path("pets-model/README.md").read_text()).push_to_hub("me/pets")
    model = HubEmbedder.from_pretrained("me/pets").eval()
    model(model.preprocess("cat.jpg")[None])

Install transformers and huggingface_hub: pip install 'rankgrad[hugging-face]'.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, PyTorchModelHubMixin
from torch import Tensor, nn

from rankgrad.data.preprocessing import Preprocessing
from rankgrad.models import Embedder, ModelSpec
from rankgrad.models.trunks import build_trunk

if TYPE_CHECKING:
    from rankgrad.search.trained_model import TrainedModel

EMBEDDING_FIELDS = ("embeddings", "sentence_embedding", "pooler_output", "image_embeds", "text_embeds")


class compute_loss_func:  # noqa: N801  named like the Trainer's argument
    """A rank loss as the `compute_loss_func` of `transformers.Trainer`.

    Each process ranks its own batch. Wrap the loss in `rg.DistributedRankLoss` to rank the batches of all processes together.

    Args:
        loss: any loss of (embeddings, labels).
        field: field of the model's output that holds the embeddings [B, d]; by default the first of "embeddings",
            "sentence_embedding", "pooler_output", "image_embeds", "text_embeds".
    """

    def __init__(self, loss: nn.Module, field: str | None = None) -> None:
        self.loss, self.field = loss, field

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        value: Tensor = self.loss(self._embeddings(outputs), labels)
        # the trainer sums over accumulated batches and leaves the mean, over the items of all of them, to the loss
        return value if num_items_in_batch is None else value * (len(labels) / num_items_in_batch)

    def _embeddings(self, outputs: Any) -> Tensor:
        if isinstance(outputs, Tensor):
            return outputs
        if not isinstance(outputs, Mapping):
            raise TypeError(
                "compute_loss_func: the model must return a tensor or a mapping with the embeddings, "
                f"got {type(outputs).__name__}"
            )
        fields = EMBEDDING_FIELDS if self.field is None else (self.field,)
        for name in fields:
            if isinstance(outputs.get(name), Tensor):
                found: Tensor = outputs[name]
                return found
        raise ValueError(
            f"compute_loss_func: the model's output must have one of {', '.join(fields)}, got {', '.join(outputs)}; "
            "name the field that holds the embeddings with field="
        )


class HubEmbedder(
    Embedder,
    PyTorchModelHubMixin,
    library_name="rankgrad",
    tags=["image-retrieval", "metric-learning", "embeddings"],
    pipeline_tag="image-feature-extraction",
):
    """The network of a run with `save_pretrained`, `from_pretrained` and `push_to_hub`.

    Args:
        spec: fields of `ModelSpec`; the weights come from the Hub or from `of`.
        preprocessing: fields of `Preprocessing`.

    Attributes:
        preprocess: an image -> uint8 [3, H, W], as the run evaluates images.
        card: Markdown of the model card; "" for the one of huggingface_hub.
    """

    def __init__(self, spec: Mapping[str, Any], preprocessing: Mapping[str, Any]) -> None:
        described = ModelSpec(**{**spec, "weights": "none"})
        if described.inputs != "images":
            raise ValueError(
                "HubEmbedder: the model embeds texts; write it for sentence-transformers with `rankgrad export RUN`, whose "
                "models have push_to_hub"
            )
        super().__init__(described, build_trunk(described.trunk, pretrained=False))
        self.preprocess = Preprocessing.from_dict(preprocessing)
        self.card = ""

    @classmethod
    def of(cls, trained: "TrainedModel", card: str = "") -> "HubEmbedder":
        """The network of `rankgrad.load`.

        Args:
            trained: the model.
            card: its model card, such as the one that `rankgrad card RUN` prints: protocol, intervals, recipe.
        """
        model = cls(spec=asdict(trained.model.spec), preprocessing=trained.preprocess.as_dict())
        model.load_state_dict(trained.model.state_dict())
        model.card = card
        return model.eval()

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The card of the run, where there is one."""
        return ModelCard(self.card) if self.card else super().generate_model_card(*args, **kwargs)
