"""Four machines out of one set of pieces: GPT-2, Llama, a BERT-style encoder, the encoder-decoder of 2017."""
