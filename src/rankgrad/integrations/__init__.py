"""Adapters to other training libraries. Each module needs its library and is imported by name.

rankgrad.integrations.sentence_transformers      losses, batch sampler and evaluator for SentenceTransformerTrainer
rankgrad.integrations.pytorch_metric_learning    a rank loss as a BaseMetricLossFunction, for miners and reducers
rankgrad.integrations.lightning                  a callback that evaluates embeddings after validation
rankgrad.integrations.hugging_face               compute_loss_func for transformers.Trainer
"""
