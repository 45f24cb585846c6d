"""From logits to tokens: processors, truncation, keyed noise, log-probabilities, stop strings, traces."""

from paceline.sampling.noise import sample_seed
from paceline.sampling.pipeline import Pipeline
from paceline.sampling.processed import NO_TOKEN, Processed
from paceline.sampling.processors import SampleRow
from paceline.sampling.state import SampleState, tokenise_bad_words

__all__ = ["NO_TOKEN", "Pipeline", "Processed", "SampleRow", "SampleState", "sample_seed", "tokenise_bad_words"]
