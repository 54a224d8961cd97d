"""The packed encoder, its heads, the momentum encoder; Hugging Face's and fairseq's models in and out."""
