"""The packed encoder, its heads and the momentum encoder; reading and writing Hugging Face and fairseq models."""
