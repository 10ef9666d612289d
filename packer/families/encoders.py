"""Encoders, and encoders with a decoder: BERT and its like, T5, BART, Whisper."""

from __future__ import annotations

from .family import ModelFamily
from .parallel import ParallelAxes
from .roles import Rule, tail

_WHOLE = ParallelAxes(rows=(), columns=())  # no engine cuts them
_BERT = (
    Rule(r"(?:^|\.)(?:cls|lm_head|generator_predictions|classifier|qa_outputs|pooler|vocab_\w+)(?:\.|$)", "head"),
    Rule(tail("embeddings_project", "embedding_hidden_mapping_in"), "head"),
    Rule(tail(r"(?:query|key|value)(?:_proj)?", r"(?:[qkv]|out)_lin", r"lin[12]", "ffn", "ffn_output"), "linear"),
    Rule(tail(r"(?:attention|attention\.output|intermediate|output)\.dense"), "linear"),
)
BERT = ModelFamily(
    id="bert",
    model_types=(
        *("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "ernie"),
        *("deberta", "deberta-v2", "mpnet", "bert-generation", "roberta-prelayernorm"),
    ),
    rules=_BERT,
    axes=_WHOLE,
    head="",
    tied=("cls.predictions.decoder", "lm_head.decoder", "generator_lm_head", "vocab_projector", "predictions.decoder"),
)
T5 = ModelFamily(
    id="t5",
    model_types=("t5", "mt5", "umt5", "longt5", "switch_transformers"),
    rules=(
        Rule(tail("shared"), "embedding"),
        Rule(tail(r"DenseReluDense\.wo"), "precise"),
        Rule(tail(r"\w*Attention\.[qkvo]", r"wi(?:_[01])?"), "linear"),
    ),
    axes=_WHOLE,
)
BART = ModelFamily(
    id="bart",
    model_types=("bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot", "plbart"),
    rules=(Rule(tail("shared"), "embedding"),),
    axes=_WHOLE,
)
WHISPER = ModelFamily(
    id="whisper",
    model_types=("whisper",),
    rules=(Rule(tail("proj_out"), "head"), Rule(tail(r"conv[12]"), "conv")),
    axes=_WHOLE,
    head="proj_out",
)
