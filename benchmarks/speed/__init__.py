"""Our steps beside those of Hugging Face and fairseq: the same work, found equal first, timed in one process."""
